# SPDX-License-Identifier: Apache-2.0
"""``serve`` as a command: dry runs, what the processes get, and the ``dynamo`` command."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_epd.commands import serve
from dynamo_epd.contract.errors import ConfigError
from dynamo_epd.serve import discovery, dynamo, launch
from dynamo_epd.serve.config import Override

ROOT = Path(__file__).parents[2]


@pytest.fixture
def args(fakes, tmp_path):
    """A function from arguments to the parsed ones, for the graph of fakes."""

    def parse(*argv):
        parser = argparse.ArgumentParser()
        serve.add_parser(parser.add_subparsers())
        common = [f"--{name}.journal=/j" for name in ("Front", "Middle", "Back")]
        return parser.parse_args(["serve", "fakes:Front", "--working-dir", str(fakes), *common, *argv])

    return parse


@pytest.fixture
def planned(args, monkeypatch, tmp_path):
    """A function from arguments and environment to the processes, by name."""

    def plan(*argv, environ=None):
        for name in list(os.environ):
            if name.startswith(("DYN_", "ETCD_", "NATS_", "CUDA_")):
                monkeypatch.delenv(name)
        for name, value in (environ or {}).items():
            monkeypatch.setenv(name, value)
        _, made = serve._prepare(args("--gpus", "0,1,2,3", *argv), tmp_path)
        return {instance.name: instance for instance in made.instances}

    return plan


def test_overrides_in_both_forms(args):
    parsed = args("--Back.failures=3", "--dry-run", "--Back.extra", "a b", "--Back.never-ready", "--log-dir", "/x")
    assert parsed.overrides[3:] == [
        Override(("Back", "failures"), 3),
        Override(("Back", "extra"), "a b"),
        Override(("Back", "never-ready"), True),
    ]
    assert parsed.dry_run and parsed.log_dir == Path("/x") and parsed.graph == "fakes:Front"


def test_an_option_that_nobody_knows_is_refused(args, capsys):
    with pytest.raises(SystemExit):
        args("--dry-runn-it")
    assert "--dry-runn-it" in capsys.readouterr().err


def test_what_the_processes_get(planned, tmp_path, fakes):
    made = planned("--Middle.ServiceArgs.workers=2", "--Middle.ServiceArgs.resources.gpu=2", "--Environment.LEVEL=3")
    assert list(made) == ["Front", "Middle-1", "Middle-2", "Back"]
    assert made["Middle-2"].argv == (sys.executable, "-m", "fake_service", "--name", "Middle", "--journal", "/j")
    assert [made[n].env["CUDA_VISIBLE_DEVICES"] for n in made] == ["", "0,1", "2,3", ""]
    ports = [int(made[n].env["DYN_SYSTEM_PORT"]) for n in ("Middle-1", "Middle-2", "Back")]
    assert ports == sorted(set(ports)) and ports == [made[n].probe.port for n in ("Middle-1", "Middle-2", "Back")]
    assert "DYN_SYSTEM_PORT" not in made["Front"].env
    assert all(i.env["LEVEL"] == "3" and i.cwd == fakes for i in made.values())
    assert made["Front"].after == {"Middle", "Back"} and made["Middle-1"].after == set()
    assert planned("--one-by-one")["Middle"].after == {"Back"}


def test_asking_whether_a_worker_is_ready_leaves_nothing_in_its_log(planned):
    assert planned()["Middle"].env["DYN_LOG"] == "info,tower_http=off"
    assert planned(environ={"DYN_LOG": "warn"})["Back"].env["DYN_LOG"] == "warn,tower_http=off"
    assert "DYN_LOG" not in planned(environ={"DYN_LOG": "tower_http=info"})["Back"].env


def test_the_frontend_writes_no_url_into_its_log(planned):
    assert planned()["Front"].env["DYN_LOG"] == "info,mm_routing=error"
    assert "DYN_LOG" not in planned(environ={"DYN_LOG": "mm_routing=debug"})["Front"].env


def test_one_host_finds_itself_by_files_in_a_private_folder(planned, tmp_path):
    env = planned()["Middle"].env
    assert env["DYN_DISCOVERY_BACKEND"] == "file" and env["DYN_FILE_KV"] == str(tmp_path / "discovery")
    assert (env["DYN_REQUEST_PLANE"], env["DYN_EVENT_PLANE"]) == ("tcp", "zmq")
    assert env["DYN_TCP_RPC_HOST"] == env["DYN_EPD_TRANSFER_HOST"] == "127.0.0.1"


def test_parts_of_one_host_meet_in_one_folder(planned):
    front = planned("--service-name", "Front")["Front"].env
    back = planned("--service-name", "Back")["Back"].env
    assert front["DYN_FILE_KV"] == back["DYN_FILE_KV"]


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ([], {"ETCD_ENDPOINTS": "http://h:2379"}, {"DYN_DISCOVERY_BACKEND": "etcd", "ETCD_ENDPOINTS": "http://h:2379"}),
        (["--Discovery.backend=etcd"], {}, {"ETCD_ENDPOINTS": "http://localhost:2379", "DYN_EVENT_PLANE": "zmq"}),
        (["--Discovery.etcd=http://y:1"], {"ETCD_ENDPOINTS": "http://h:2"}, {"ETCD_ENDPOINTS": "http://y:1"}),
        (
            ["--Discovery.backend=etcd", "--Discovery.nats=nats://n:4222"],
            {},
            {"DYN_EVENT_PLANE": "nats", "DYN_REQUEST_PLANE": "tcp", "NATS_SERVER": "nats://n:4222"},
        ),
        (
            ["--Discovery.request-plane=nats", "--Discovery.backend=etcd"],
            {"NATS_SERVER": "nats://n:4222", "DYN_EVENT_PLANE": "zmq"},
            {"DYN_EVENT_PLANE": "zmq", "DYN_REQUEST_PLANE": "nats", "NATS_SERVER": "nats://n:4222"},
        ),
        (["--Discovery.directory=/shared"], {}, {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": "/shared"}),
        (["--Discovery.etcd=localhost:2379"], {}, {"ETCD_ENDPOINTS": "localhost:2379"}),
    ],
)
def test_discovery_for_many_hosts(planned, argv, environ, expected):
    env = planned(*argv, environ=environ)["Middle"].env
    assert expected.items() <= env.items()
    assert "DYN_TCP_RPC_HOST" not in env


_HOSTS = {
    "DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_EPD_TRANSFER_HOST",
    "DYN_SYSTEM_HOST",
}  # fmt: skip


def test_each_host_gives_the_address_from_which_it_reaches_etcd(planned, monkeypatch):
    monkeypatch.setattr(discovery, "address_towards", lambda servers: f"from {servers}")
    made = planned("--Discovery.etcd=http://h:1,https://g", environ={"DYN_EVENT_PLANE_HOST": "10.0.0.9"})["Middle"]
    assert {made.env[name] for name in _HOSTS} == {"from [('h', 1), ('g', 2379)]", "10.0.0.9"}
    assert made.env["DYN_EVENT_PLANE_HOST"] == "10.0.0.9"
    # A probe asks where the worker listens.
    assert made.probe.host == made.env["DYN_SYSTEM_HOST"] and made.needs == (("h", 1), ("g", 2379))


def test_the_address_that_is_given_is_the_one_that_is_taken(planned):
    env = planned("--Discovery.etcd=http://h:1", "--Discovery.host=10.0.0.7", environ={"DYN_SYSTEM_HOST": "::"})[
        "Back"
    ].env
    assert {env[name] for name in _HOSTS} == {"10.0.0.7"}


def test_an_address_towards_loopback_is_none_for_others():
    assert discovery.address_towards([("127.0.0.1", 2379)]) == ""
    assert discovery.address_towards([("no such host", 2379)]) == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--Discovery.backend=etdc"], "backend 'etdc' does not work here; did you mean 'etcd'"),
        (["--Discovery.etcd=http://h:port"], "'http://h:port' is no URL; write http://host:2379"),
        (["--Discovery.event-plane=nats"], "needs a server: set Discovery.nats"),
        (["--Middle.ServiceArgs.resources.gpu=5"], "Middle needs 5 GPU, and too little is left of this host's 4"),
        (["--working-dir", "/no/such"], "--working-dir /no/such: no such directory"),
        (["--stop-timeout", "0"], "--stop-timeout must be above 0"),
        (["-f", "/no/such.yaml"], "/no/such.yaml"),
    ],
)
def test_what_cannot_be_run_is_refused(args, argv, message, monkeypatch):
    monkeypatch.delenv("NATS_SERVER", raising=False)
    with pytest.raises(ConfigError, match=message):
        serve.run(args("--gpus", "0,1,2,3", "--dry-run", *argv))


def test_where_the_entry_is_asked(planned):
    assert planned("--Front.http-port=8123")["Front"].probe == ("models", "127.0.0.1", 8123, "/v1/models")
    assert planned("--service-name", "Front", "--Front.http-port=8123")["Front"].probe.path == "/live"
    assert planned(environ={"DYN_HTTP_PORT": "8124"})["Front"].probe.port == 8124
    assert planned("--Front.http-port=8123", environ={"DYN_TLS_CERT_PATH": "/c"})["Front"].probe.kind == "tcp"
    assert planned()["Front"].probe.kind == "running"


def test_the_system_ports_start_where_the_environment_says(planned):
    assert int(planned(environ={"DYN_SYSTEM_PORT": "23456"})["Middle"].env["DYN_SYSTEM_PORT"]) >= 23456


def test_a_shared_folder_that_is_not_ours_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(discovery.tempfile, "gettempdir", lambda: str(tmp_path))
    path = discovery.shared_folder() / "discovery"
    discovery.make_folder(path)
    discovery.make_folder(path)
    assert path.is_dir() and discovery.shared_folder().stat().st_mode & 0o777 == 0o700
    discovery.shared_folder().chmod(0o777)
    with pytest.raises(ConfigError, match="others may write"):
        discovery.make_folder(path)


def test_ports_are_claimed_once_and_never_those_in_use():
    with socket.create_server(("0.0.0.0", 0)) as server:
        taken = server.getsockname()[1]
        one, other = launch.Ports(), launch.Ports()
        first = one.claim(taken)
        assert first > taken
        assert other.claim(taken) > first


def test_a_dry_run_starts_nothing_and_prints_what_would_run(args, capsys):
    assert serve.run(args("--dry-run", "--Middle.ServiceArgs.resources.gpu=2", "--gpus", "4,7")) == 0
    printed = capsys.readouterr().out
    commands = [line for line in printed.splitlines() if " -m fake_service" in line]
    assert [line.split("--name ")[1].split()[0] for line in commands] == ["Back", "Middle", "Front"]
    assert "CUDA_VISIBLE_DEVICES=4,7 DYN_LOG=info,tower_http=off DYN_SYSTEM_PORT=" in commands[1]
    assert "# Middle: GPU 4,7; ready when http://127.0.0.1:" in printed
    assert "export DYN_DISCOVERY_BACKEND=file" in printed
    done = subprocess.run(["bash", "-n"], input=printed, text=True)
    assert done.returncode == 0


def test_a_dry_run_without_gpus_shows_what_would_be_needed(args, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert serve.run(args("--dry-run", "--Middle.ServiceArgs.resources.gpu=2")) == 0
    printed = capsys.readouterr().out
    assert "there is no GPU here: placed as if there were 2" in printed
    assert "CUDA_VISIBLE_DEVICES=0,1" in printed


@pytest.mark.parametrize(
    ("graph", "file", "processes"),
    [
        ("epd", "epd", 4), ("epd", "toy", 4), ("e_pd", "e_pd", 3), ("agg", "agg", 2),
    ],
)  # fmt: skip
def test_the_files_of_this_project_fit_their_graphs(graph, file, processes, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    argv = ["serve", f"graphs.{graph}:Frontend", "-f", f"configs/serve/{file}.yaml", "--dry-run"]
    parsed = parser.parse_args(argv)
    assert parsed.run(parsed) == 0
    commands = [line for line in capsys.readouterr().out.splitlines() if " -m dynamo" in line]
    assert len(commands) == processes
    for words in map(str.split, commands):
        if "--extra-engine-args" in words:
            assert Path(words[words.index("--extra-engine-args") + 1]).is_file()


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """No other ``dynamo`` on the path or among the installed distributions."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(dynamo, "entry_points", lambda **_: ())
    return tmp_path


def test_dynamo_serve_is_serve(alone, fakes, capsys):
    argv = ["serve", "fakes:Front", "--working-dir", str(fakes), "--service-name", "Back", "--dry-run"]
    assert dynamo.main([*argv, "--Back.journal=/j"]) == 0
    assert "-m fake_service --name Back --journal /j" in capsys.readouterr().out
    assert dynamo.main([*argv, "--Back.jurnal=/j"]) == 2
    assert "dynamo: Back: unknown key 'jurnal'; did you mean 'journal'?" in capsys.readouterr().err


def test_dynamo_does_not_hide_another_program(alone, capsys):
    program = alone / "dynamo"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert dynamo.main(["serve", "graphs.epd:Frontend", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert f"another one at {program}" in error and "use `dynamo-epd serve` instead" in error
    program.write_text("#!/usr/bin/python\nfrom dynamo_epd.serve.dynamo import main\n")
    with pytest.raises(SystemExit):
        dynamo.main(["--help"])


def test_dynamo_does_not_hide_another_package(alone, monkeypatch, capsys):
    class Script:
        class dist:
            name, version = "dynamo-cli", "3.1"

    monkeypatch.setattr(dynamo, "entry_points", lambda **_: (Script,))
    assert dynamo.main(["serve"]) == 2
    assert "dynamo-cli 3.1 has a command of this name" in capsys.readouterr().err
