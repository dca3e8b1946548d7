# SPDX-License-Identifier: Apache-2.0
"""The data plane on NIXL with UCX. Memory is registered once; there is no progress thread.

Small moves are posted on the event loop, which drives them for a moment between its other work. What is large, or takes
longer, is left to one thread, so that the loop never runs a large copy and never waits for a peer that has stopped.
That thread sleeps while nothing is in flight, and naps where the fabric has nothing to do: an idle process costs
nothing, and a thread that spins would keep the interpreter's lock from the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..contract.errors import ConfigError
from .device import only
from .memory import SCRATCH_WORDS, Region
from .plane import Ended, Move, Place

logger = logging.getLogger(__name__)

_SEGMENT = {"host": "DRAM", "cuda": "VRAM"}
_INLINE_BYTES = 2 << 20
"""Moves up to this size are posted on the event loop (half a millisecond over TCP)."""
_SPIN_S = 0.001
"""For this long the event loop drives what is in flight; then the thread does."""
_WAKE_S = 60e-6
"""For this long after a move was posted, or bytes moved, the loop looks without a break. Then it yields the core
after each look, for the peer may need it."""
_WORK_S = 10e-6
"""A call that makes progress and takes longer than this has moved bytes: more are likely to come at once."""
_FLOW_S = 200e-6
"""For this long after bytes moved the thread looks without a break: a nap while more come lets the sockets fill up."""
_NAP_S = (30e-6, 0.02)
# A dead peer's moves end by themselves as soon as its sockets are seen to be closed.
_LEAVE_S = 2.0
_CLOSE_S = 10.0
_PR_SET_TIMERSLACK = 29


@dataclass(eq=False)
class _Job:
    number: int
    move: Move
    ended: Ended
    handle: Any = None
    scratch: int = -1
    checking: bool = False
    cancelled: bool = False


class NixlPlane:
    """A ``DataPlane``. Made on the event loop's thread or another; used from the event loop only.

    Args:
        device: the only network device that UCX may use; None for all.

    Raises:
        ConfigError: NIXL or its UCX backend cannot be used.
    """

    def __init__(self, name: str, region: Region, loop: asyncio.AbstractEventLoop, device: str | None = None):
        self.noted: Callable[[str, bytes], None] = lambda agent, note: None
        self.driven = 0
        self._loop = loop
        self._loop_thread = 0
        self._region = region
        self._agent_lock = threading.Lock()  # for the agent and everything below but the queue
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._jobs: dict[int, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._scratch = list(range(SCRATCH_WORDS))
        self._loaded: dict[str, int] = {}
        self._leaving: dict[str, float] = {}
        self._expected = 0
        self._stopping = False
        self._spin_until = 0.0
        self._wake_until = 0.0
        self._spinning = False
        self._untold: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()  # on the event loop only
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            with only(device):
                self._agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False))
            self._registered = [
                self._agent.register_memory([(address, nbytes, device, "")], _SEGMENT[kind])
                for address, nbytes, device, kind in _regions(region)
            ]
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:  # NIXL raises several unrelated types, RuntimeError and its own among them
            raise ConfigError(f"NIXL cannot be used for transfers: {error}") from error
        self._thread = threading.Thread(target=self._run, name="epd-transfer", daemon=True)
        self._thread.start()
        loop.call_soon_threadsafe(self._begin)

    def load(self, agent: str, metadata: bytes, ended: Ended) -> None:
        self._commands.put(lambda: self._load(agent, metadata, ended))

    def forget(self, agent: str) -> None:
        self._commands.put(lambda: self._forget(agent))

    def move(self, move: Move, ended: Ended) -> int:
        job = _Job(next(self._numbers), move, ended)
        self._do(lambda: self._accept(job), move.nbytes)
        return job.number

    def cancel(self, number: int) -> None:
        self._commands.put(lambda: self._cancel(number))

    def expect(self, nbytes: int) -> None:
        self._do(lambda: self._expect(1), nbytes)

    def unexpect(self, nbytes: int) -> None:
        self._do(lambda: self._expect(-1), nbytes)

    def close(self) -> None:
        self._stopping = True
        self._commands.put(_look)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            # It ends with the process; its memory stays registered until then.
            logger.error("the data plane did not stop in %.0f s", _CLOSE_S)

    # On the event loop.

    def _begin(self) -> None:
        self._loop_thread = threading.get_ident()
        _sleep_exactly()

    def _do(self, command: Callable[[], None], nbytes: int) -> None:
        """Run ``command`` here and now where it is small and the thread is not at work, else on the thread."""
        if self._stopping or nbytes > _INLINE_BYTES or not self._agent_lock.acquire(blocking=False):
            self._commands.put(command)
            return
        try:
            command()
            if self._jobs:
                self._progress()  # what is small has often arrived by now
        finally:
            self._agent_lock.release()
        if self._untold:
            self._loop.call_soon(self._tell_all)
        now = time.monotonic()
        self._spin_until = now + _SPIN_S
        if self._jobs:
            self._wake_until = now + _WAKE_S
        if not self._spinning and self._busy:
            self._spinning = True
            self._loop.call_soon(self._spin)

    def _spin(self) -> None:
        now = time.monotonic()
        if self._stopping:
            return
        if self._busy and now < self._spin_until:
            if self._agent_lock.acquire(blocking=False):
                try:
                    self._progress()
                finally:
                    self._agent_lock.release()
                self._tell_all()
            end = time.monotonic()
            if end - now > _WORK_S:
                self._wake_until = end + _WAKE_S
            elif self._busy and now > self._wake_until:
                os.sched_yield()
            self._loop.call_soon(self._spin)
            return
        self._spinning = False
        if self._busy:
            self._commands.put(_look)

    def _tell_all(self) -> None:
        # Whoever is told may start something new here, which needs the lock.
        while self._untold:
            told, words = self._untold.popleft()
            told(*words)

    @property
    def _busy(self) -> bool:
        return bool(self._jobs or self._expected or self._leaving)

    # On the thread, or with the lock on the event loop.

    def _run(self) -> None:
        _sleep_exactly()
        nap, awake_until = _NAP_S[0], 0.0
        while not self._stopping:
            try:
                if not self._busy or self._spinning:
                    command = self._commands.get()
                elif time.monotonic() < awake_until:
                    os.sched_yield()
                    command = self._commands.get_nowait()
                else:
                    nap = min(nap * 1.2, _NAP_S[1])
                    command = self._commands.get(timeout=nap)
            except queue.Empty:
                pass
            else:
                with self._agent_lock:
                    command()
                nap, awake_until = _NAP_S[0], time.monotonic() + _FLOW_S
            if self._busy:
                begun = time.monotonic()
                with self._agent_lock:
                    self._progress()
                    if self._leaving:
                        self._leave(begun)
                end = time.monotonic()
                if end - begun > _WORK_S:
                    nap, awake_until = _NAP_S[0], end + _FLOW_S
        with self._agent_lock:
            self._shut()

    def _progress(self) -> None:
        self.driven += 1  # before and after: one that is under way counts as well
        for job in list(self._jobs.values()):
            try:
                state = self._agent.check_xfer_state(job.handle)
            except Exception as error:
                self._finish(job, f"transfer failed: {error}")
                continue
            if state == "DONE":
                self._advance(job)
            elif state != "PROC":
                self._finish(job, f"transfer failed in state {state}")
        # Asking for notifications drives the UCX worker. None are kept.
        for agent, notes in self._agent.get_new_notifs().items():
            for note in notes:
                self._tell(self.noted, agent, note)
        self.driven += 1

    def _accept(self, job: _Job) -> None:
        if job.move.word:
            if not self._scratch:
                self._waiting.append(job)
                return
            job.scratch = self._scratch.pop()
        self._post(job, job.move.local, job.move.remote, job.move.nbytes)

    def _post(self, job: _Job, local: Place, remote: Place, nbytes: int) -> None:
        agent = self._agent
        self._jobs[job.number] = job
        self.driven += 1
        try:
            job.handle = agent.initialize_xfer(
                job.move.op.upper(),
                agent.get_xfer_descs([(local.address, nbytes, local.device)], _SEGMENT[local.kind]),
                agent.get_xfer_descs([(remote.address, nbytes, remote.device)], _SEGMENT[remote.kind]),
                job.move.agent,
                job.move.note if job.move.op == "write" else b"",
            )
            state = agent.transfer(job.handle, job.move.note) if job.move.note else agent.transfer(job.handle)
        except Exception as error:
            self._finish(job, f"transfer failed: {error}")
            return
        if state == "DONE":
            self._advance(job)
        elif state != "PROC":
            self._finish(job, f"transfer failed in state {state}")

    def _advance(self, job: _Job) -> None:
        move = job.move
        if not move.word:
            self._finish(job, "")
        elif job.checking:
            self._finish(job, "" if int(self._region.scratch[job.scratch]) == move.generation else "generation")
        else:
            job.checking = True
            self._release(job)
            word = self._region.scratch[job.scratch :]
            self._post(job, Place(word.ctypes.data), Place(move.word), 8)

    def _finish(self, job: _Job, error: str) -> None:
        self._jobs.pop(job.number, None)
        self._release(job)
        if job.scratch >= 0:
            self._scratch.append(job.scratch)
            job.scratch = -1
        self._tell(job.ended, error)
        if self._waiting and self._scratch:
            self._accept(self._waiting.popleft())

    def _release(self, job: _Job) -> None:
        handle, job.handle = job.handle, None
        if handle is not None:
            with contextlib.suppress(Exception):  # NIXL keeps a handle that it cannot release yet, and says so itself
                handle.release()

    def _cancel(self, number: int) -> None:
        for job in self._waiting:
            if job.number == number:
                self._waiting.remove(job)
                self._tell(job.ended, "cancelled")
                return

    def _expect(self, count: int) -> None:
        self._expected += count

    def _load(self, agent: str, metadata: bytes, ended: Ended) -> None:
        error = ""
        if agent in self._leaving:
            # Its connections may be broken: begin anew.
            self._leaving[agent] = 0.0
            self._leave(time.monotonic())
        if not self._loaded.get(agent):
            try:
                name = self._agent.add_remote_agent(metadata)
                if (name.decode() if isinstance(name, bytes) else name) != agent:
                    error = f"metadata of agent {name!r} came from {agent!r}"
                    self._agent.remove_remote_agent(name)
                else:
                    self._agent.make_connection(agent)
            except Exception as fault:
                error = f"cannot connect the data plane to {agent}: {fault}"
        if not error:
            self._loaded[agent] = self._loaded.get(agent, 0) + 1
        self._tell(ended, error)

    def _forget(self, agent: str) -> None:
        count = self._loaded.get(agent, 0)
        if count > 1:
            self._loaded[agent] = count - 1
        elif count:
            self._leaving[agent] = time.monotonic() + _LEAVE_S

    def _leave(self, now: float) -> None:
        """Drop the peers that are to be forgotten, once nothing is in flight with them."""
        active = {job.move.agent for job in self._jobs.values()}
        for agent, deadline in list(self._leaving.items()):
            if agent in active and now < deadline:
                continue
            del self._leaving[agent], self._loaded[agent]
            with contextlib.suppress(Exception):  # NIXL may have dropped a dead peer by itself
                self._agent.remove_remote_agent(agent)
            # Closing its endpoint took the memory from whatever was still in flight.
            for job in [job for job in self._jobs.values() if job.move.agent == agent]:
                self._finish(job, "the peer is gone")

    def _tell(self, told: Callable[..., None], *words: Any) -> None:
        if threading.get_ident() == self._loop_thread:
            self._untold.append((told, words))
            return
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            self._loop.call_soon_threadsafe(told, *words)

    def _shut(self) -> None:
        for job in [*self._jobs.values(), *self._waiting]:
            self._finish(job, "the transfer layer was closed")
        for agent in self._loaded:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(agent)
        for descriptors in self._registered:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(descriptors)
        del self._agent


def _sleep_exactly() -> None:
    """Have this thread's sleeps end within a microsecond of their time; by default it is 50."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)


def _look() -> None:
    """Nothing to do but to look at what is in flight."""


def _regions(region: Region) -> list[tuple[int, int, int, str]]:
    """``(address, bytes, device, kind)`` to register: two where the payload is not in host memory."""
    table = region.table.ctypes.data + region.table.nbytes - region.table_base
    if region.kind == "host":
        return [(region.table_base, region.base + region.size - region.table_base, 0, "host")]
    return [(region.table_base, table, 0, "host"), (region.base, region.size, region.device, region.kind)]
