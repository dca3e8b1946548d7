# SPDX-License-Identifier: Apache-2.0
"""The launcher with real processes: order, restarts, and that nothing is left behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
from pathlib import Path

import pytest

from dynamo_epd.serve.supervisor import KEPT_FAILING, KILLED, STOPPED, Policy

_SPEC = importlib.util.spec_from_file_location("launcher", Path(__file__).with_name("launcher.py"))
launcher = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(launcher)

ALL_READY = "all are ready: http://127.0.0.1:"


@pytest.fixture
def serve(tmp_path):
    """A function that starts the launcher; sections are completed."""
    running = []

    def start(sections=None, *args, **kwargs):
        sections = sections or {}
        sections.setdefault("Front", {}).setdefault("http-port", free_port())
        running.append(launcher.Launcher(tmp_path, sections, *args, **kwargs))
        return running[-1]

    yield start
    for one in running:
        one.__exit__()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def index(journal, line):
    return next(i for i, entry in enumerate(journal) if entry == line)


def test_starts_the_entry_last_and_stops_it_first(serve):
    run = serve({"Middle": {"ServiceArgs": {"workers": 2}}})
    run.until_said(ALL_READY)
    journal = run.journal()
    assert journal.count("start Middle") == 2
    assert journal.index("start Front") > max(index(journal, "start Back"), index(journal, "start Middle"))
    assert run.end(signal.SIGINT) == STOPPED
    stops = [line for line in run.journal() if line.startswith(("term", "end"))]
    assert stops[:2] == ["term Front", "end Front"]
    assert sorted(stops[2:6]) == ["end Middle"] * 2 + ["term Middle"] * 2
    assert stops[6:] == ["term Back", "end Back"]
    assert "Middle-1 | hello from Middle" in run.output
    assert "Back     | last words\n" in run.output
    assert run.left() == []
    assert list(run.tmp.iterdir()) == []


def test_one_by_one_starts_each_service_after_those_it_needs(serve):
    run = serve(None, "--one-by-one")
    run.until_said(ALL_READY)
    assert [line for line in run.journal() if line.startswith("start")] == ["start Back", "start Middle", "start Front"]
    said = [line.split()[2] for line in run.output.splitlines() if "is ready after" in line]
    assert said == ["Back", "Middle", "Front"]
    assert run.end(signal.SIGTERM) == STOPPED


def test_one_service_only(serve):
    run = serve(None, "--service-name", "Middle")
    run.until_said("all are ready\n")
    assert run.end(signal.SIGTERM) == STOPPED
    assert [line.split()[-1] for line in run.journal()] == ["Middle"] * 4
    assert (run.tmp / f"dynamo-epd-{os.getuid()}" / "discovery").is_dir()


def test_a_failure_is_started_again_and_the_entry_waits_for_it(serve):
    run = serve({"Back": {"failures": 1, "exit-status": 1}})
    run.until_said(ALL_READY)
    assert "Back ended with exit status 1; starting it again in 1 s" in run.output
    journal = run.journal()
    assert journal.count("start Back") == 2
    assert journal.index("start Front") > len(journal) - 1 - journal[::-1].index("start Back")
    run.end(signal.SIGTERM)


def test_a_service_that_dies_later_comes_back_on_its_port(serve):
    run = serve()
    run.until_said(ALL_READY)
    pid = next(int(line.split()[1]) for line in run.journal() if line.startswith("pid") and line.endswith("Middle"))
    os.kill(pid, signal.SIGKILL)
    run.until_said("Middle was ended by SIGKILL; starting it again")
    run.until(lambda: run.output.count("Middle is ready") == 2, "second start of Middle")
    assert run.journal().count("start Front") == 1
    assert run.end(signal.SIGHUP) == STOPPED


def test_failing_too_often_stops_everything(serve):
    run = serve({"Back": {"failures": 99, "exit-status": 7}}, "--max-restarts", "1")
    assert run.end() == KEPT_FAILING
    assert "Back ended with exit status 7, time 2 in a row; stopping everything" in run.output
    assert "end Middle" in run.journal()
    assert "start Front" not in run.journal()
    assert run.left() == []


def test_a_usage_error_is_not_tried_again(serve):
    run = serve({"Back": {"failures": 99, "exit-status": 2}})
    assert run.end() == KEPT_FAILING
    assert run.journal().count("start Back") == 1
    assert "Back cannot run as it is configured" in run.output


def test_a_start_that_takes_too_long_is_a_failure(serve):
    run = serve({"Back": {"never-ready": True}}, "--start-timeout", "1", "--max-restarts", "0")
    assert run.end() == KEPT_FAILING
    assert "Back was not ready after 1 s; killing it" in run.output


def test_the_deadline_ends_a_service_that_will_not_stop(serve):
    run = serve({"Middle": {"ignore-term": True}}, "--stop-timeout", "1")
    run.until_said(ALL_READY)
    assert run.end(signal.SIGTERM) == KILLED
    assert "Middle did not stop in time; killing it" in run.output
    assert run.journal()[-1] == "end Back"
    assert run.left() == []


def test_a_second_request_to_stop_kills_at_once(serve):
    run = serve({"Middle": {"ignore-term": True}}, "--stop-timeout", "600")
    run.until_said(ALL_READY)
    run.process.send_signal(signal.SIGINT)
    run.until_journal("term Middle")
    assert run.end(signal.SIGTERM) == KILLED
    assert run.left() == []


def test_one_request_to_stop_that_arrives_twice_is_one(serve):
    """As from ``timeout``, which signals its command and then its whole process group."""
    run = serve({"Middle": {"ignore-term": True}}, "--stop-timeout", "1")
    run.until_said(ALL_READY)
    run.process.send_signal(signal.SIGTERM)
    run.until(lambda: not _pending(run.process.pid), "delivery")
    assert run.end(signal.SIGTERM) == KILLED
    assert run.journal()[-1] == "end Back"
    assert run.left() == []


def test_what_a_service_started_itself_ends_with_it(serve):
    """A process in a session of its own, of which neither the service nor the launcher has a handle."""
    run = serve({"Middle": {"stray": True}})
    run.until_said(ALL_READY)
    strays, pids = (
        [int(line.split()[1]) for line in run.journal() if line.startswith(what) and line.endswith("Middle")]
        for what in ("stray", "pid")
    )
    assert strays[0] in run.left()
    os.kill(pids[0], signal.SIGKILL)
    run.until(lambda: strays[0] not in run.left(), "end of the stray")
    run.until(lambda: run.output.count("Middle is ready") == 2, "second start of Middle")
    assert run.end(signal.SIGINT) == STOPPED
    assert run.left() == []


def test_nothing_is_left_when_the_supervisor_is_killed(serve):
    run = serve({"Middle": {"stray": True}})
    run.until_said(ALL_READY)
    os.kill(run.supervisor(), signal.SIGKILL)
    assert run.end() == 128 + signal.SIGKILL
    assert run.left() == []
    assert list(run.tmp.iterdir()) == []


def test_everything_stops_in_order_when_the_guard_is_killed(serve):
    run = serve({"Middle": {"stray": True}})
    run.until_said(ALL_READY)
    run.process.kill()
    run.until(lambda: run.left() == [], "end of everything")
    assert [line for line in run.journal() if line.startswith("end")] == ["end Front", "end Middle", "end Back"]


def test_services_end_even_when_both_are_killed(serve):
    run = serve()
    run.until_said(ALL_READY)
    supervisor = run.supervisor()
    os.kill(run.process.pid, signal.SIGSTOP)
    os.kill(supervisor, signal.SIGKILL)
    run.process.kill()
    run.until(lambda: run.left() == [], "end of everything")
    assert "end Front" not in run.journal()


def test_the_third_request_to_stop_ends_a_supervisor_that_does_not_answer(serve):
    run = serve()
    run.until_said(ALL_READY)
    os.kill(run.supervisor(), signal.SIGSTOP)
    for number in (signal.SIGINT, signal.SIGTERM):
        run.process.send_signal(number)
        run.until(lambda: not _pending(run.process.pid), "delivery")
    assert run.end(signal.SIGHUP) == 128 + signal.SIGKILL
    assert run.left() == []


def _pending(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
    return any(masks)


def test_a_reader_of_the_output_that_goes_away_stops_nothing(serve, tmp_path):
    run = serve(None, "--log-dir", str(tmp_path / "logs"), read_lines=2)
    run.until(lambda: "Front" in " ".join(line for line in run.journal() if line.startswith("pid")), "Front")
    assert run.end(signal.SIGTERM) == STOPPED
    assert (tmp_path / "logs" / "Back.log").read_text() == "hello from Back\nlast words\n"
    assert len(run.output.splitlines()) == 2


def test_nothing_starts_before_etcd_answers_and_waiting_is_no_failure(serve):
    port = free_port()
    run = serve({"Discovery": {"etcd": f"http://127.0.0.1:{port}"}}, "--max-restarts", "0", "--one-by-one")
    run.until_said(f"Back waits for etcd, which does not answer at 127.0.0.1:{port}")
    assert not run.journal()
    with socket.socket() as etcd:
        etcd.bind(("127.0.0.1", port))
        etcd.listen()
        run.until_said("all are ready")
        assert run.end(signal.SIGINT) == STOPPED
    assert run.output.count("waits for etcd") == 1


def test_ctrl_c_ends_the_wait_for_etcd(serve):
    run = serve({"Discovery": {"etcd": f"http://127.0.0.1:{free_port()}"}})
    run.until_said("waits for etcd")
    assert run.end(signal.SIGINT) == STOPPED
    assert not run.journal()


def test_a_port_that_is_taken_is_named_before_anything_starts(serve):
    with socket.socket() as s:
        s.bind(("0.0.0.0", 0))
        s.listen()
        port = s.getsockname()[1]
        run = serve({"Front": {"http-port": port}})
        assert run.end() == 1
    assert f"error: Front: port {port} is taken" in run.output
    assert run.journal() == []
    assert list(run.tmp.iterdir()) == []


def test_back_off_doubles_to_a_limit():
    policy = Policy(first_delay=1, longest_delay=10)
    assert [policy.delay(n) for n in range(1, 7)] == [1, 2, 4, 8, 10, 10]
