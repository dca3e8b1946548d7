# SPDX-License-Identifier: Apache-2.0
"""Runs the real launcher on the fake services, and finds what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import yaml

FAKES = Path(__file__).parent / "fakes"
DEADLINE = 30.0
PROGRAM = """
import argparse, sys
from dynamo_epd.commands import serve
from dynamo_epd.contract.errors import EpdError
parser = argparse.ArgumentParser()
serve.add_parser(parser.add_subparsers())
args = parser.parse_args()
try:
    sys.exit(args.run(args))
except EpdError as error:
    sys.exit(f"error: {error}")
"""


class Launcher:
    """One ``serve`` of the graph of fakes; a context manager that kills what a failed test leaves."""

    def __init__(self, folder: Path, sections: dict, *args: str, read_lines: int | None = None):
        self.journal_path = folder / "journal"
        self.journal_path.touch()
        self.tmp = folder / "tmp"
        self.tmp.mkdir(exist_ok=True)
        path = folder / "config.yaml"
        for name in ("Front", "Middle", "Back"):
            sections.setdefault(name, {}).setdefault("journal", str(self.journal_path))
        path.write_text(yaml.safe_dump(sections))
        self.output = ""
        self._marker = f"EPD_TEST_MARKER={folder}"
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                PROGRAM,
                "serve",
                "fakes:Front",
                "-f",
                str(path),
                "--working-dir",
                str(FAKES),
                *args,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TMPDIR": str(self.tmp), "EPD_TEST_MARKER": str(folder)},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(read_lines,))
        self._reader.start()

    def _read(self, limit: int | None) -> None:
        for number, line in enumerate(self.process.stdout, 1):
            self.output += line
            if number == limit:
                break
        self.process.stdout.close()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()

    def until(self, condition, what: str) -> None:
        """Wait for ``condition``."""
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, f"no {what}\n{self.output}\n{self.journal()}"
            time.sleep(0.02)

    def until_said(self, text: str) -> None:
        self.until(lambda: text in self.output, text)

    def until_journal(self, line: str) -> None:
        self.until(lambda: line in self.journal(), line)

    def end(self, sig: signal.Signals | None = None) -> int:
        """Send ``sig``, wait for the launcher and all its output, and return its exit status."""
        if sig is not None:
            self.process.send_signal(sig)
        status = self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        return status

    def journal(self) -> list[str]:
        return self.journal_path.read_text().splitlines()

    def supervisor(self) -> int:
        """The process under the guard, which runs the services."""
        for pid in self.left():
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(stat[1]) == self.process.pid:
                return pid
        raise AssertionError("the guard has no child")

    def left(self) -> list[int]:
        """Processes that descend from this launcher, whoever their parent is now: they have its environment."""
        found = []
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and self._marker.encode() in Path(f"/proc/{entry}/environ").read_bytes().split(
                    b"\0"
                ):
                    found.append(int(entry))
            except OSError:
                continue
        return found
