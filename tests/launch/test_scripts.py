# SPDX-License-Identifier: Apache-2.0
"""The shell scripts, with programs in place of Python, Slurm, etcd and NATS that write down how they were called."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SLURM = LAUNCH / "slurm" / "epd.sh"
SCRIPTS = [LAUNCH / "epd.sh", LAUNCH / "e_pd.sh", LAUNCH / "agg.sh", SLURM]
DEADLINE = 30.0

# Notes its call, listens where a server would, and waits for SIGTERM; a call that contains $FAIL ends with status 3.
FAKE = f"""#!{sys.executable}
import os, re, signal, socket, sys, time
call = " ".join(sys.argv[1:])
def note(what):
    with open(os.environ["JOURNAL"], "a") as journal:
        print(what, os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("DYN_SYSTEM_PORT"), call, file=journal)
def stop(*_):
    note("stop")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
port = re.search(r"(?:--listen-client-urls http://0.0.0.0:|--port )(\\d+)", call)
if port:
    server = socket.create_server(("127.0.0.1", int(port[1])))
note("start")
if os.environ.get("FAIL") and os.environ["FAIL"] in call:
    # Who has not said that it started does not hear SIGTERM yet.
    while open(os.environ["JOURNAL"]).read().count("start") < int(os.environ.get("AFTER", "1")):
        time.sleep(0.02)
    sys.exit(3)
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def box(tmp_path):
    """A function that starts a script in a clean environment with a ``bin`` of fakes; returns process and journal."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    journal = tmp_path / "journal"
    journal.touch()
    (tmp_path / "tmp").mkdir()

    def program(name, text):
        path = binaries / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    fake = program("fake", FAKE)
    program("sbatch", '#!/bin/sh\necho sbatch "$@" >>"$JOURNAL"\n')
    program("scontrol", "#!/bin/sh\nseq -f node%g 9\n")
    program("srun", '#!/bin/bash\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n')
    running = []

    def start(script, **variables):
        env = {
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "JOURNAL": str(journal),
            "TMPDIR": str(tmp_path / "tmp"),
            **variables,
        }
        process = subprocess.Popen(
            ["bash", str(script)], env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        running.append(process)
        return process

    start.journal = lambda: journal.read_text().splitlines()
    start.tmp = tmp_path / "tmp"
    start.python = str(fake)
    yield start
    for process in running:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=DEADLINE)


def until(condition, process):
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.02)


def finish(process):
    output, _ = process.communicate(timeout=DEADLINE)
    return process.returncode, output


def role(line):
    """``encode`` and so on, or the module of the frontend, of a journal line."""
    words = line.split()
    return words[words.index("--disaggregation-mode") + 1] if "--disaggregation-mode" in words else words[4]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.relative_to(LAUNCH).as_posix())
def test_shellcheck_finds_nothing(script):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    assert os.access(script, os.X_OK)
    done = subprocess.run(["shellcheck", "-x", str(script)], capture_output=True, text=True, cwd=LAUNCH.parent)
    assert done.stdout == ""
    assert [line for line in script.read_text().splitlines() if len(line) > 120] == []


@pytest.mark.parametrize(
    ("script", "roles"),
    [
        ("epd.sh", {"encode": "0 8081", "prefill": "1 8082", "decode": "2 8083"}),
        ("e_pd.sh", {"encode": "0 8081", "agg": "1 8082"}),
        ("agg.sh", {"agg": "0 8081"}),
    ],
)
def test_each_script_runs_its_workers_and_stops_them_in_order(box, script, roles):
    process = box(LAUNCH / script, PYTHON=box.python)
    until(lambda: len(box.journal()) == len(roles) + 1, process)
    starts = {role(line): line for line in box.journal()}
    assert starts.keys() == {"dynamo.frontend", *roles}
    for name, place in roles.items():
        words = starts[name].split()
        assert " ".join(words[1:3]) == place
        options = dict(zip(words, words[1:], strict=False))
        assert options["--served-model-name"] == "toy"
        assert Path(options["--model-path"], "config.json").is_file()
        assert Path(options["--extra-engine-args"]) == ROOT / "configs" / "toy" / f"{name}.yaml"
        assert Path(options["--extra-engine-args"]).is_file()
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 0
    assert [role(line) for line in box.journal() if line.startswith("stop")] == ["dynamo.frontend", *roles]
    assert list(box.tmp.iterdir()) == []


def test_the_variables_of_upstream_scripts_are_taken(box):
    process = box(
        LAUNCH / "epd.sh",
        PYTHON=box.python,
        MODEL_PATH="/m/Qwen2.5-VL-7B-Instruct",
        PREFILL_ENGINE_ARGS="/e/mine.yaml",
        DECODE_CUDA_VISIBLE_DEVICES="4,5",
        ALLOWED_LOCAL_MEDIA_PATH="/media",
        MAX_FILE_SIZE_MB="7",
        DYN_SYSTEM_PORT2="9001",
    )
    until(lambda: len(box.journal()) == 4, process)
    starts = {role(line): line for line in box.journal()}
    assert "--model-path /m/Qwen2.5-VL-7B-Instruct --served-model-name Qwen2.5-VL-7B-Instruct" in starts["encode"]
    assert "--allowed-local-media-path /media --max-file-size-mb 7" in starts["encode"]
    assert starts["prefill"].startswith("start 1 9001") and "--extra-engine-args /e/mine.yaml" in starts["prefill"]
    assert starts["decode"].startswith("start 4,5 8083")
    assert f"--extra-engine-args {ROOT}/configs/qwen2.5-vl-7b-instruct/decode.yaml" in starts["decode"]
    process.terminate()
    finish(process)


def test_the_end_of_one_is_the_end_of_all(box):
    process = box(LAUNCH / "epd.sh", PYTHON=box.python, FAIL="mode prefill", AFTER="3")
    assert finish(process)[0] == 3
    stopped = {role(line) for line in box.journal() if line.startswith("stop")}
    assert stopped <= {"dynamo.frontend", "encode", "decode"} and "dynamo.frontend" in stopped


def dry_run(**variables):
    env = {"PATH": os.environ["PATH"], "DRY_RUN": "1", **variables}
    done = subprocess.run(["bash", str(SLURM)], env=env, cwd=ROOT, capture_output=True, text=True)
    return done, [shlex.split(line) for line in done.stdout.splitlines()]


def service(words):
    return words[words.index("--service-name") + 1] if "--service-name" in words else None


def test_a_dry_run_prints_every_srun_line():
    done, lines = dry_run(
        ENCODE_NODES="1", PREFILL_NODES="2", DECODE_NODES="4", IMAGE="/i.sqsh", MOUNTS="/a b:/c", MODEL="/models/x",
        PREFILL_GPUS="2", SRUN_ARGS="--mpi=pmix -v",
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == ""
    assert [words[0] for words in lines] == ["sbatch", *["srun"] * 6]
    assert "--nodes=7" in lines[0] and "--gpus-per-node=4" in lines[0]
    nodes = {}
    for words in lines[1:]:
        assert {"--container-image=/i.sqsh", "--container-mounts=/a b:/c", "--mpi=pmix", "-v"} <= set(words)
        assert any(word.startswith("--container-env=") and "ETCD_ENDPOINTS" in word for word in words)
        (listed,) = (word.split("=")[1].split(",") for word in words if word.startswith("--nodelist="))
        assert f"--nodes={len(listed)}" in words and f"--ntasks={len(listed)}" in words
        nodes[service(words) or words[words.index("-v") + 1]] = listed
        assert ("--gpus-per-node=4" in words) == (service(words) not in (None, "Frontend"))
    assert nodes == {
        "etcd": ["node01"], "nats-server": ["node01"], "Frontend": ["node01"], "EncodeWorker": ["node01"],
        "PrefillWorker": ["node02", "node03"], "DecodeWorker": ["node04", "node05", "node06", "node07"],
    }  # fmt: skip
    prefill = next(words for words in lines if service(words) == "PrefillWorker")
    assert prefill[prefill.index("dynamo-epd") :] == [
        "dynamo-epd", "serve", "graphs.epd:Frontend", "-f", "configs/serve/gb200.yaml", "--Frontend.http-port=8000",
        "--Common.model=/models/x", "--service-name", "PrefillWorker",
        "--PrefillWorker.ServiceArgs.workers=2", "--PrefillWorker.ServiceArgs.resources.gpu=2",
    ]  # fmt: skip


def test_what_srun_runs_is_what_serve_takes(tmp_path):
    """The printed commands, with the real launcher in a dry run of its own."""
    _, lines = dry_run(DECODE_GPUS="4")
    printed = {}
    for words in lines:
        if service(words):
            argv = words[words.index("serve") :]
            code = "import sys; from dynamo_epd.serve.dynamo import main; sys.exit(main(sys.argv[1:]))"
            env = {**os.environ, "PATH": "/usr/bin:/bin"}
            done = subprocess.run(
                [sys.executable, "-c", code, *argv, "--dry-run"], cwd=ROOT, env=env, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            printed[service(words)] = done.stdout.count("-m dynamo")
    assert printed == {"Frontend": 1, "EncodeWorker": 4, "PrefillWorker": 2, "DecodeWorker": 1}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PREFILL_NODES": "0"}, "PREFILL_NODES is 0"),
        ({"DECODE_GPUS": "8"}, "DECODE_GPUS is 8: a worker has from 1 to GPUS_PER_NODE=4"),
        ({"MOUNTS": "/a:/b"}, "MOUNTS without IMAGE"),
    ],
)
def test_settings_that_cannot_work_are_refused(variables, message):
    done, _ = dry_run(**variables)
    assert done.returncode == 2 and message in done.stderr and done.stdout == ""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def job(box, **variables):
    return box(
        SLURM, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n[1-9]", DYNAMO_EPD="fake", ETCD="fake etcd", NATS="fake nats",
        ETCD_PORT=free_port(), NATS_PORT=free_port(), HEAD_ADDRESS="127.0.0.1", **variables,
    )  # fmt: skip


def parts(box, what):
    return [service(line.split()) or line.split()[3] for line in box.journal() if line.startswith(what)]


def test_outside_of_a_job_it_submits_itself(box):
    process = box(SLURM, ENCODE_NODES="2", SBATCH_ARGS="-A me --time 1:00")
    assert finish(process)[0] == 0
    expected = f"sbatch --nodes=4 --ntasks-per-node=1 --gpus-per-node=4 -A me --time 1:00 {SLURM}"
    assert box.journal() == [expected]


def test_a_job_starts_etcd_and_nats_first_and_stops_them_last(box):
    process = job(box)
    until(lambda: len(box.journal()) == 6, process)
    workers = ["EncodeWorker", "PrefillWorker", "DecodeWorker"]
    assert sorted(parts(box, "start")[:2]) == ["etcd", "nats"]
    assert sorted(parts(box, "start")[2:]) == sorted(["Frontend", *workers])
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 0
    assert parts(box, "stop") == ["Frontend", *workers, "etcd", "nats"]


def test_the_end_of_one_part_is_the_end_of_the_job(box):
    process = job(box, FAIL="--service-name DecodeWorker")
    assert finish(process)[0] == 3
    assert parts(box, "stop")[-2:] == ["etcd", "nats"]


def test_a_head_service_that_dies_is_named(box):
    process = job(box, FAIL="etcd")
    status, output = finish(process)
    assert status == 2 and "etcd or NATS ended before 127.0.0.1:" in output
