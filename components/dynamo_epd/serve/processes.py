# SPDX-License-Identifier: Apache-2.0
"""Processes that cannot outlive what started them. Linux only.

Three things hold whoever dies first:

- a service is killed by the kernel when the supervisor ends (``PR_SET_PDEATHSIG``);
- what a service started itself becomes the supervisor's child when the service ends (``PR_SET_CHILD_SUBREAPER``), even
  if it moved to a session of its own, and is killed then;
- the supervisor runs under a guard, to which all of that passes when the supervisor is killed. A guard that is killed
  makes the supervisor stop in order.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_LAST_DEADLINE = 10.0
_ECHO_S = 0.1
"""A signal that comes again sooner is the same: ``timeout`` and its kin signal their command, then its whole group."""


def spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: Path | None = None,
    output: int | IO[bytes] = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    """Start ``argv`` in a session of its own; it is killed when this process ends.

    The kernel binds the child's life to the thread that forked it: call this in the main thread, or one that lasts.

    Args:
        cwd: where it runs; here by default.
        output: where stdout and stderr go; one pipe by default.

    Raises:
        OSError: it cannot be run.
    """
    parent = os.getpid()
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=env,
        cwd=cwd,
        start_new_session=True,
        preexec_fn=lambda: _end_with(parent, signal.SIGKILL),
    )


def adopt_orphans() -> None:
    """From now on, descendants whose parent ends become children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children(pid: int) -> list[int]:
    """The processes whose parent is ``pid``, ended ones that nobody has waited for included."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as stat:
                # The command name, in parentheses, may hold anything; the parent is the second field after it.
                if int(stat.read().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry))
    return found


def kill_group(leader: int, number: signal.Signals = signal.SIGKILL) -> None:
    """A signal for all that is left of the process group of ``leader``."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def kill_children(but: Collection[int]) -> list[int]:
    """SIGKILL for each child of this process that is not in ``but``. Returns those; nobody has waited for them."""
    strays = [pid for pid in children(os.getpid()) if pid not in but]
    for pid in strays:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return strays


def guard() -> Path | int:
    """Fork: the child goes on as the supervisor, this process only watches it.

    SIGINT, SIGTERM and SIGHUP are passed on; the third ends the supervisor at once. When the supervisor has ended, in
    whatever way, everything that is left of it is killed.

    Returns:
        In the child, a new private folder, which the guard removes. In the guard, once the child has ended, the exit
        status: the child's, or 128 plus the number of the signal that ended it.
    """
    others = children(os.getpid())
    folder = Path(tempfile.mkdtemp(prefix="dynamo-epd-serve-"))
    adopt_orphans()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        # Out of the terminal's process group, so that Ctrl-C arrives once, from the guard.
        os.setsid()
        _end_with(parent, signal.SIGTERM)
        adopt_orphans()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        return folder

    asked = 0
    heard = dict.fromkeys(signals, -math.inf)

    def pass_on(number: int, _: object) -> None:
        nonlocal asked
        now = time.monotonic()
        if now - heard[signal.Signals(number)] < _ECHO_S:
            return
        heard[signal.Signals(number)] = now
        asked += 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL if asked > 2 else number)

    before = {number: signal.signal(number, pass_on) for number in signals}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    try:
        status = _wait_for(child)
        _kill_all(others)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        shutil.rmtree(folder, ignore_errors=True)
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _wait_for(child: int) -> int:
    """Wait for ``child`` and for every orphan that ends before it. Returns the wait status of ``child``."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return status


def _kill_all(but: Collection[int]) -> None:
    """Kill children until there are none: each one killed may leave its own."""
    deadline = time.monotonic() + _LAST_DEADLINE
    while kill_children(but) and time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _end_with(parent: int, number: signal.Signals) -> None:
    """Get ``number`` when the parent ends. To be called by a new process."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(128 + number)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
