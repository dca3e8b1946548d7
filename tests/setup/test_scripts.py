# SPDX-License-Identifier: Apache-2.0
"""``launch/*.sh`` with a stand-in for Python: when a virtual environment is made, kept, mended, and by whom."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

STAND_IN = """#!/usr/bin/env bash
# Answers as `python` would: -m venv copies this file, `-m pip` and everything else only leave a line in the log.
set -eu
log() { printf '%s\\n' "$*" >>"$EPD_TEST_LOG"; }
case "$1 ${2:-}" in
"-c import sys"*) if [ -n "${EPD_TEST_VERSION-3.11}" ]; then printf '%s\\n' "${EPD_TEST_VERSION-3.11}"; fi ;;
"-c "*) ;;
"-m venv") log venv; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
"-m pip")
    log "pip ${*: -2}"
    if [ -e "$EPD_TEST_LOG.hold" ]; then while [ -e "$EPD_TEST_LOG.hold" ]; do sleep 0.02; done; fi
    if [ -e "$EPD_TEST_LOG.fail" ]; then exit 1; fi
    ;;
*) log "run$(printf ' <%s>' "$@")"; exit "${EPD_TEST_STATUS:-0}" ;;
esac
"""


class Checkout:
    """A copy of the scripts in a folder with a space in its name, whose Python is the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a checkout"
        shutil.copytree(ROOT / "launch", self.root / "launch")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self.log = folder / "log"
        self.python = folder / "python3"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)

    def start(self, script: str, *args: str, **env: str) -> subprocess.Popen[str]:
        base = {k: v for k, v in os.environ.items() if k != "PYTHON"}
        path = f"{self.python.parent}:{base['PATH']}"
        return subprocess.Popen(
            [self.root / "launch" / script, *args],
            env={**base, "PATH": path, "EPD_TEST_LOG": str(self.log), **env},
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, *args: str, **env: str) -> tuple[int, list[str], str]:
        """(exit status, what the stand-in was asked since the last call, stderr)"""
        before = len(self.lines())
        process = self.start(script, *args, **env)
        _, stderr = process.communicate(timeout=30)
        return process.returncode, self.lines()[before:], stderr

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def made(self) -> list[str]:
        return ["venv", f"pip -r {self.root}/launch/constraints.txt", f"pip -e {self.root}"]

    @property
    def renewed(self) -> list[str]:
        return self.made[1:]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_first_start_makes_it_second_finds_it(checkout: Checkout) -> None:
    status, asked, stderr = checkout.run("setup.sh")
    assert (status, asked) == (0, checkout.made)
    assert [line[:10] for line in stderr.splitlines()] == [f"setup: {n}/4" for n in "1234"] + ["setup: don"]
    assert checkout.run("setup.sh") == (0, [], "")


def test_demo_and_tests_start_after_it(checkout: Checkout) -> None:
    status, asked, _ = checkout.run("demo.sh", "--json", "an answer.json", EPD_TEST_STATUS="3")
    assert (status, asked) == (3, [*checkout.made, "run <-m> <dynamo_epd> <demo> <--json> <an answer.json>"])
    status, asked, _ = checkout.run("test.sh", "-k", "a b", EPD_TEST_STATUS="5")
    assert (status, asked) == (5, ["run <-m> <pytest> <-k> <a b>"])


@pytest.mark.parametrize("changed", ["pyproject.toml", "launch/constraints.txt"])
def test_other_pins_are_installed_over_it(checkout: Checkout, changed: str) -> None:
    checkout.run("setup.sh")
    with (checkout.root / changed).open("a") as file:
        file.write("# changed\n")
    assert checkout.run("setup.sh")[:2] == (0, checkout.renewed)
    assert checkout.run("setup.sh")[:2] == (0, [])


def test_after_a_failure_it_is_made_anew(checkout: Checkout) -> None:
    fail = Path(f"{checkout.log}.fail")
    fail.touch()
    status, asked, _ = checkout.run("test.sh")
    assert (status, asked) == (1, checkout.made[:2])
    fail.unlink()
    assert checkout.run("setup.sh")[:2] == (0, checkout.made)


def test_a_failed_change_of_pins_is_not_taken_for_done(checkout: Checkout) -> None:
    checkout.run("setup.sh")
    pyproject, fail = checkout.root / "pyproject.toml", Path(f"{checkout.log}.fail")
    text = pyproject.read_text()
    pyproject.write_text(text + "# changed\n")
    fail.touch()
    assert checkout.run("setup.sh")[0] == 1
    fail.unlink()
    pyproject.write_text(text)
    assert checkout.run("setup.sh")[:2] == (0, checkout.made)


def test_a_broken_interpreter_is_replaced(checkout: Checkout) -> None:
    checkout.run("setup.sh")
    (checkout.root / ".venv/bin/python").unlink()
    assert checkout.run("setup.sh")[:2] == (0, checkout.made)


def test_a_moved_checkout_gets_its_own(checkout: Checkout) -> None:
    checkout.run("setup.sh")
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    assert checkout.run("setup.sh")[:2] == (0, checkout.made)


def test_python_names_the_interpreter(checkout: Checkout) -> None:
    other = checkout.python.with_name("other python")
    shutil.copy(checkout.python, other)
    checkout.python.unlink()
    assert checkout.run("setup.sh", PYTHON=str(other), EPD_TEST_VERSION="3.12")[:2] == (0, checkout.made)
    assert checkout.run("setup.sh", EPD_TEST_VERSION="3.11")[:2] == (0, [])
    assert checkout.run("setup.sh", PYTHON=str(other), EPD_TEST_VERSION="3.12")[:2] == (0, [])
    assert checkout.run("setup.sh", PYTHON=str(other), EPD_TEST_VERSION="3.13")[:2] == (0, checkout.made)


def test_an_unfit_interpreter_is_refused(checkout: Checkout) -> None:
    checkout.run("setup.sh")
    status, asked, stderr = checkout.run("setup.sh", PYTHON=str(checkout.python), EPD_TEST_VERSION="")
    assert (status, asked) == (1, [])
    assert f"no Python 3.10 to 3.13 among {checkout.python}" in stderr
    assert checkout.run("setup.sh")[:2] == (0, []), "the environment that was there is still there"


def test_two_at_once_make_one(checkout: Checkout) -> None:
    hold = Path(f"{checkout.log}.hold")
    hold.touch()
    first = checkout.start("setup.sh")
    while "venv" not in checkout.lines():
        assert first.poll() is None
    second = checkout.start("test.sh")
    assert second.stderr is not None
    assert "waiting" in second.stderr.readline()
    hold.unlink()
    first.communicate(timeout=30)
    second.communicate(timeout=30)
    assert (first.returncode, second.returncode) == (0, 0)
    assert checkout.lines() == [*checkout.made, "run <-m> <pytest>"]


def test_the_range_of_pythons_is_the_packages() -> None:
    version_of = "import sys; v = sys.version_info[:2]"
    script = (ROOT / "launch/setup.sh").read_text()
    line = next(line for line in script.splitlines() if version_of in line)
    out = subprocess.run([sys.executable, "-c", line.split("'")[1]], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "{}.{}".format(*sys.version_info[:2])
    assert 'requires-python = ">=3.10,<3.14"' in (ROOT / "pyproject.toml").read_text()
