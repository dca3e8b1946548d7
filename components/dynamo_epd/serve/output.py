# SPDX-License-Identifier: Apache-2.0
"""Many processes' lines in one stream, each with its process's name in front."""

from __future__ import annotations

import asyncio
import os
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

LAUNCHER = "serve"
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_LONGEST = 64 << 10


class Output:
    """Writes whole lines to ``stream``, and each process's own lines to a file too where there is a folder for it.

    Args:
        names: of the processes; lines are indented to the longest.
        stream: where to, usually stdout. Once it is closed at the other end, lines are dropped: the services do not
            depend on who reads them.
        log_dir: each process's output is appended to ``<name>.log`` there, as it came.
    """

    def __init__(self, names: Sequence[str], stream: IO[bytes] | None = None, log_dir: Path | None = None):
        self._stream: IO[bytes] | None = stream or sys.stdout.buffer
        width = max(map(len, (*names, LAUNCHER)))
        colours = self._stream.isatty() and "NO_COLOR" not in os.environ
        self._prefixes = {
            name: _paint(f"{name:<{width}} | ", name if colours else None).encode() for name in (*names, LAUNCHER)
        }
        if log_dir:
            log_dir.mkdir(parents=True, exist_ok=True)
        self._files = {name: (log_dir / f"{name}.log").open("ab", buffering=0) for name in names} if log_dir else {}

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        self._write(LAUNCHER, [text.encode()])

    def lines(self, name: str, lines: Sequence[bytes]) -> None:
        """Whole lines of a process, without their ends."""
        if name in self._files:
            try:
                self._files[name].write(b"".join(line + b"\n" for line in lines))
            except OSError as error:
                # A full disk must not take the service with it.
                self._files.pop(name).close()
                self.say(f"{name}: its log file ends here: {error}")
        self._write(name, lines)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _write(self, name: str, lines: Sequence[bytes]) -> None:
        if self._stream is None:
            return
        prefix = self._prefixes[name]
        try:
            self._stream.write(b"".join(prefix + line + b"\n" for line in lines))
            self._stream.flush()
        except BlockingIOError:
            # A terminal or pipe that somebody else made non-blocking, and that is full: what did not fit is lost.
            return
        except BrokenPipeError:
            self._stream = None
            # Python flushes stdout once more at exit, which would fail in the same way.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class LineReader(asyncio.Protocol):
    """Cuts what a process writes into lines. One longer than 64 KiB is cut in pieces.

    Attributes:
        done: set when the last line is out.
    """

    def __init__(self, name: str, output: Output):
        self._name = name
        self._output = output
        self._rest = b""
        self.done = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST:
            lines.append(self._rest)
            self._rest = b""
        if lines:
            self._output.lines(self._name, [line.rstrip(b"\r") for line in lines])

    def connection_lost(self, _: Exception | None) -> None:
        if self._rest:
            self._output.lines(self._name, [self._rest])
            self._rest = b""
        self.done.set()


def _paint(text: str, name: str | None) -> str:
    return text if name is None else f"\x1b[{_COLOURS[zlib.crc32(name.encode()) % len(_COLOURS)]}m{text}\x1b[0m"
