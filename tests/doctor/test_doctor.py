# SPDX-License-Identifier: Apache-2.0
"""The doctor: every colour has its cause, every line that is not green a remedy."""

from __future__ import annotations

import argparse
import json
import socket
from pathlib import Path

import pytest

from dynamo_epd.commands import doctor as command
from dynamo_epd.contract.errors import ConfigError
from dynamo_epd.demo.toy_data import TOY_MODEL
from dynamo_epd.doctor import dynamo, engines, examine, machine, nixl, startup_checks
from dynamo_epd.engine.trtllm.capabilities import Capabilities

FULL = Capabilities(
    version="1",
    form="seven",
    preprocessed_inputs=True,
    prefix_sum=True,
    cache_salt=True,
    to_handle=True,
    disagg_fields=frozenset({"disagg_request_id"}),
    id_helper="machine",
    kv_events=True,
    capacity=True,
    encoder=True,
)


NOBODY = "nats://127.0.0.1:1"


def but(**changes) -> Capabilities:
    from dataclasses import replace

    return replace(FULL, **changes)


def colours(findings) -> list[str]:
    return [f.status for f in findings]


@pytest.fixture
def here(monkeypatch, tmp_path):
    """A machine whose discovery works without servers."""
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    for name in ("UCX_TLS", "DYN_EVENT_PLANE", "DYN_REQUEST_PLANE", "DYN_MM_ALLOW_INTERNAL", "DYN_MM_LOCAL_PATH"):
        monkeypatch.delenv(name, raising=False)


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["doctor", *argv])
    return args.run(args)


def test_a_sound_machine_is_not_red_and_every_other_line_has_a_remedy(here, capsys):
    assert run("--model", str(TOY_MODEL), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    by_name = {f["check"]: f for f in report["findings"]}
    assert by_name["NIXL transfer"]["status"] == "green" and by_name["model"]["reason"].endswith("qwen2_5_vl")
    assert all(f["remedy"] for f in report["findings"] if f["status"] != "green")
    assert all(f["reason"] for f in report["findings"])


def test_one_red_line_is_exit_status_1_and_stands_in_the_table(here, monkeypatch, capsys):
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "etcd")
    monkeypatch.setenv("ETCD_ENDPOINTS", "http://127.0.0.1:1")
    monkeypatch.setattr("dynamo_epd.doctor.nixl", lambda: iter(()))
    assert run() == 1
    out = capsys.readouterr().out
    assert "red" in out and "DYN_DISCOVERY_BACKEND=file" in out


def test_examine_leaves_the_model_out_where_none_is_given(here, monkeypatch):
    monkeypatch.setattr("dynamo_epd.doctor.nixl", lambda: iter(()))
    assert "model" not in {f.check for f in examine()}


@pytest.mark.parametrize(
    ("env", "gpu", "status"),
    [
        ({}, True, "green"),
        ({"UCX_TLS": "cuda_copy,cuda_ipc,tcp"}, True, "green"),
        ({"UCX_TLS": "rc,cuda"}, True, "green"),
        ({"UCX_TLS": "all"}, True, "green"),
        ({"UCX_TLS": "^rc"}, True, "green"),
        ({"UCX_TLS": "tcp"}, True, "red"),
        ({"UCX_TLS": "tcp"}, False, "yellow"),
        ({"UCX_TLS": "tcp,shm"}, False, "green"),
        ({"UCX_TLS": "shm,self"}, False, "red"),
    ],
)
def test_ucx_transports(env, gpu, status):
    [finding] = machine.transports(env, gpu=gpu)
    assert finding.status == status and (status == "green") == (finding.remedy == "")


def test_variables_that_gb200_needs_and_memory_type_cache():
    found = {f.check: f for f in machine.transports({"UCX_MEMTYPE_CACHE": "y"}, gpu=True, gb200=True)}
    assert found["UCX_MEMTYPE_CACHE"].status == "yellow"
    assert found["NCCL_MNNVL_ENABLE"].remedy == "NCCL_MNNVL_ENABLE=1"
    good = {"NCCL_MNNVL_ENABLE": "1", "NCCL_CUMEM_ENABLE": "1", "UCX_CUDA_IPC_ENABLE_MNNVL": "y"}
    assert colours(machine.transports(good, gpu=True, gb200=True)) == ["green"]


def test_peer_rights_are_tried_for_real(monkeypatch):
    assert machine.peer_files().status == "green"
    assert machine.peer_memory().status in ("green", "yellow")
    monkeypatch.setattr(machine, "_PEEK", "import sys; sys.stdout.write('1')")
    refused = machine.peer_memory()
    assert refused.status == "yellow" and "Operation not permitted" in refused.reason and "SYS_PTRACE" in refused.remedy


def test_small_or_missing_shared_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_SHM_WANTED", 1 << 60)
    assert machine.shared_memory().status == "yellow"
    monkeypatch.setattr(machine, "_SHM", tmp_path / "none")
    assert machine.shared_memory().status == "red"


def test_python_outside_the_range(monkeypatch):
    monkeypatch.setattr(machine, "_PYTHON", ((3, 90), (3, 91)))
    assert machine.python().status == "red"


@pytest.mark.parametrize(
    ("env", "colours_wanted"),
    [
        ({"DYN_DISCOVERY_BACKEND": "mem"}, ["yellow", "green"]),
        ({"DYN_DISCOVERY_BACKEND": "carrier-pigeon"}, ["red", "green"]),
        ({"DYN_DISCOVERY_BACKEND": "kubernetes"}, ["red", "green"]),
        ({"DYN_DISCOVERY_BACKEND": "kubernetes", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, ["green", "green"]),
        ({"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": f"{__file__}/below"}, ["red", "green"]),
        ({"DYN_DISCOVERY_BACKEND": "mem", "DYN_EVENT_PLANE": "nats", "NATS_SERVER": NOBODY}, ["yellow", "red"]),
    ],
)
def test_discovery_and_planes(env, colours_wanted):
    assert colours(dynamo.planes(env)) == colours_wanted


def test_a_server_that_answers_is_green():
    with socket.create_server(("127.0.0.1", 0)) as server:
        env = {"ETCD_ENDPOINTS": f"http://127.0.0.1:1,http://127.0.0.1:{server.getsockname()[1]}"}
        assert colours(dynamo.planes(env)) == ["green", "green"]


def test_media_policy(monkeypatch):
    monkeypatch.setenv("DYN_MM_ALLOW_INTERNAL", "1")
    assert dynamo.media_policy().status == "yellow"
    monkeypatch.setenv("DYN_MM_ALLOW_INTERNAL", "0")
    monkeypatch.setenv("DYN_MM_LOCAL_PATH", "/proc/nowhere")
    assert dynamo.media_policy().status == "yellow"


def test_dynamo_that_is_missing_or_of_two_versions(monkeypatch):
    monkeypatch.setattr(dynamo, "version", lambda name: {"ai-dynamo": "1.6.1"}.get(name, "1.5.0"))
    assert dynamo.sdk().status == "yellow"

    def missing(name):
        raise dynamo.PackageNotFoundError(name)

    monkeypatch.setattr(dynamo, "version", missing)
    assert dynamo.sdk().status == "red" and "pip install" in dynamo.sdk().remedy


def test_nixl_without_its_backend(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no UCX")

    monkeypatch.setattr("nixl._api.nixl_agent", broken)
    [finding] = nixl()
    assert finding.status == "red" and "no UCX" in finding.reason


@pytest.mark.parametrize(
    ("caps", "kind", "status", "said"),
    [
        (FULL, "qwen2_5_vl", "green", "keyed by content"),
        (FULL, "qwen3_vl", "green", "keyed by content"),
        (but(form="four"), "qwen2_5_vl", "green", "keyed by content"),
        (but(form="four"), "qwen3_vl", "yellow", "share by their content only"),
        (but(form="four", prefix_sum=False), "qwen3_vl", "yellow", "share nothing"),
        (but(form="none", cache_salt=False), "qwen2_5_vl", "red", "kv_cache_config.enable_block_reuse"),
        (but(preprocessed_inputs=False), "qwen2_5_vl", "red", "PreprocessedInputs"),
        (FULL, "nemotron_h_omni", "yellow", "recurrent state"),
        (None, "qwen2_5_vl", "green", "reference engine"),
    ],
)
def test_block_reuse_is_judged_by_version_and_model(caps, kind, status, said):
    [finding] = engines.block_reuse(caps, None, None, kind)
    assert finding.status == status and said in finding.reason


def test_a_yaml_that_turns_reuse_off_or_has_our_settings_in_it(tmp_path):
    path = tmp_path / "engine.yaml"
    path.write_text("kv_cache_config: {enable_block_reuse: false}\narena_gb: 4\n")
    findings = list(engines.block_reuse(FULL, path, None, None))
    assert colours(findings) == ["yellow", "yellow"]
    assert "arena_gb is not a key" in findings[0].reason and "is off" in findings[1].reason
    assert (
        colours(engines.block_reuse(FULL, path, '{"kv_cache_config": {"enable_block_reuse": true}}', None))[1]
        == "green"
    )
    path.write_text("kv_cache_config: [")
    assert colours(engines.block_reuse(FULL, path, None, None)) == ["red"]


def test_models_that_are_not_known(tmp_path):
    assert engines.family(tmp_path).status == "red"
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert engines.family(tmp_path).status == "red" and "qwen2_5_vl" in engines.family(tmp_path).remedy
    assert engines.family(TOY_MODEL).status == "green"


def test_start_up_checks_refuse_what_is_red(here, monkeypatch, tmp_path, caplog):
    found = startup_checks(engine="reference", model=TOY_MODEL)
    assert found and "red" not in colours(found)
    startup_checks(engine="none", model=TOY_MODEL)
    with pytest.raises(ConfigError, match="model: .*model_type"):
        startup_checks(engine="reference", model=tmp_path)
    monkeypatch.setenv("UCX_TLS", "shm,self")
    with pytest.raises(ConfigError, match="UCX_TLS: shm,self"):
        startup_checks(engine="none", model=TOY_MODEL)
    monkeypatch.setenv("UCX_TLS", "tcp")
    startup_checks(engine="none", model=TOY_MODEL)
    assert "several times slower" in caplog.text
    monkeypatch.delenv("UCX_TLS")
    off = Path(tmp_path / "off.yaml")
    off.write_text("kv_cache_config: {enable_block_reuse: false}")
    startup_checks(engine="reference", model=TOY_MODEL, engine_args=off)
    assert "every prompt is computed in full" in caplog.text
