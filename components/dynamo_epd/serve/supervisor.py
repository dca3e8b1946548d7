# SPDX-License-Identifier: Apache-2.0
"""Runs the processes of a launch, keeps them running, and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from . import processes
from .health import reachable, ready
from .launch import Instance
from .output import LineReader, Output

STOPPED, KEPT_FAILING, KILLED = 0, 3, 4
"""Exit statuses: everything ended as asked; a process could not be kept running; one had to be killed."""

_USAGE = 2
_FIRST_POLL, _LAST_POLL = 0.1, 2.0
_DRAIN = 2.0


@dataclass(frozen=True)
class Policy:
    """How hard to try. Seconds.

    Attributes:
        start_timeout: a process that is not ready by then is killed, which counts as a failure.
        stop_timeout: for all services together; each has an equal share of what is left when its turn comes.
        max_restarts: failures in a row after which everything is stopped.
        first_delay, longest_delay: before a restart; doubles with each failure in a row.
        steady: a process that was ready for so long had no failure.
    """

    start_timeout: float = 1800.0
    stop_timeout: float = 60.0
    max_restarts: int = 5
    first_delay: float = 1.0
    longest_delay: float = 30.0
    steady: float = 60.0

    def delay(self, failures: int) -> float:
        """How long to wait before the restart after the ``failures``-th failure in a row."""
        return min(self.longest_delay, self.first_delay * 2.0 ** (failures - 1))


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    ended: asyncio.Future[int]
    lines: LineReader
    pipe: asyncio.Task[tuple[asyncio.ReadTransport, LineReader]]


@dataclass
class Supervisor:
    """``run`` once, in the main thread, where no other child process is waited for.

    Args:
        instances: service by service, in the order of stopping.
        environ: what the processes inherit.
        url: where requests go, for the line that says that all are ready.
    """

    instances: Sequence[Instance]
    policy: Policy
    output: Output
    environ: Mapping[str, str]
    url: str = ""
    _children: dict[str, _Child] = field(default_factory=dict)
    _asked: asyncio.Event = field(default_factory=asyncio.Event)
    _hurry: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> int:
        """Start everything, and return once everything has ended: when asked to by SIGINT, SIGTERM or SIGHUP (a second
        one kills what is left), or when a process fails too often.

        Returns:
            The exit status.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._ask, number)
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        self._not_ready = {instance.name for instance in self.instances}
        self._ready = {instance.service: asyncio.Event() for instance in self.instances}
        keepers = [asyncio.create_task(self._keep(instance)) for instance in self.instances]
        asked = asyncio.create_task(self._asked.wait())
        try:
            await asyncio.wait([asked, *keepers], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (asked, *keepers):
                task.cancel()
            results = await asyncio.gather(*keepers, return_exceptions=True)
            killed = await self._stop_all()
        for result in results:
            if isinstance(result, Exception):
                raise result
        if not self._asked.is_set():
            return KEPT_FAILING
        return KILLED if killed else STOPPED

    def _ask(self, number: signal.Signals) -> None:
        if self._asked.is_set():
            self._hurry.set()
            return
        self._asked.set()
        self.output.say(f"{number.name}: stopping, within {self.policy.stop_timeout:g} s; once more kills at once")

    async def _keep(self, instance: Instance) -> None:
        """Run one process, again after each failure. Returns when it failed too often."""
        loop = asyncio.get_running_loop()
        for service in sorted(instance.after):
            await self._ready[service].wait()
        failures = 0
        while True:
            await self._wait_for_needs(instance)
            started = loop.time()
            child = self._start(instance)
            was_ready = child is not None and await self._wait_ready(instance, child)
            if was_ready:
                self._now_ready(instance, loop.time() - started)
                started = loop.time()
            # Shielded: this task is cancelled when everything is to stop, and the future then still tells of the end.
            code = await asyncio.shield(child.ended) if child is not None else _USAGE
            failures = 1 if was_ready and loop.time() - started >= self.policy.steady else failures + 1
            if code == _USAGE and not was_ready:
                self.output.say(f"{instance.name} cannot run as it is configured; stopping everything")
                return
            if failures > self.policy.max_restarts:
                self.output.say(f"{instance.name} {_how(code)}, time {failures} in a row; stopping everything")
                return
            delay = self.policy.delay(failures)
            self.output.say(f"{instance.name} {_how(code)}; starting it again in {delay:g} s")
            await asyncio.sleep(delay)

    async def _wait_for_needs(self, instance: Instance) -> None:
        """A host that is cut off comes back whenever it does: starts that must fail until then would be counted."""
        waiting = False
        while instance.needs and not await reachable(instance.needs):
            if not waiting:
                where = ", ".join(f"{host}:{port}" for host, port in instance.needs)
                self.output.say(f"{instance.name} waits for etcd, which does not answer at {where}")
            waiting = True
            await asyncio.sleep(_LAST_POLL)

    def _start(self, instance: Instance) -> _Child | None:
        env = {**self.environ, "PYTHONUNBUFFERED": "1", **instance.env}
        try:
            process = processes.spawn(instance.argv, env, instance.cwd)
        except (OSError, subprocess.SubprocessError) as error:
            self.output.say(f"{instance.name}: {error}")
            return None
        loop = asyncio.get_running_loop()
        lines = LineReader(instance.name, self.output)
        pipe = loop.create_task(loop.connect_read_pipe(lambda: lines, process.stdout))
        child = self._children[instance.name] = _Child(process, loop.create_future(), lines, pipe)
        # It may have ended before its pid was known here.
        self._reap()
        return child

    async def _wait_ready(self, instance: Instance, child: _Child) -> bool:
        """Whether it became ready; it has ended, or is killed, otherwise."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.policy.start_timeout
        pause = _FIRST_POLL
        while not child.ended.done():
            if await ready(instance.probe):
                return not child.ended.done()
            if loop.time() >= end:
                self.output.say(f"{instance.name} was not ready after {self.policy.start_timeout:g} s; killing it")
                processes.kill_group(child.process.pid)
                await asyncio.wait([child.ended])
            await asyncio.wait([child.ended], timeout=pause)
            pause = min(_LAST_POLL, pause * 1.3)
        return False

    def _now_ready(self, instance: Instance, seconds: float) -> None:
        pid = self._children[instance.name].process.pid
        self.output.say(f"{instance.name} is ready after {seconds:.1f} s (pid {pid})")
        if instance.name not in self._not_ready:
            return
        self._not_ready.remove(instance.name)
        if not any(i.service == instance.service and i.name in self._not_ready for i in self.instances):
            self._ready[instance.service].set()
        if not self._not_ready:
            self.output.say(f"all are ready{f': {self.url}' if self.url else ''}")

    def _reap(self) -> None:
        """Take the exit status of every child that has ended: services, and orphans of services."""
        by_pid = {child.process.pid: child for child in self._children.values() if not child.ended.done()}
        ended = False
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if info is None:
                break
            child = by_pid.get(info.si_pid)
            if child is None:
                os.waitpid(info.si_pid, 0)
            else:
                # While nobody has waited for it, its number cannot be another group's.
                processes.kill_group(info.si_pid)
                child.ended.set_result(child.process.wait())
                ended = True
        if ended:
            self._kill_strays()

    def _kill_strays(self) -> None:
        processes.kill_children({c.process.pid for c in self._children.values() if not c.ended.done()})

    async def _stop_all(self) -> bool:
        """Stop service after service. Returns whether one had to be killed."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.policy.stop_timeout
        stages = [list(group) for _, group in groupby(self.instances, key=lambda i: i.service)]
        hurry = asyncio.create_task(self._hurry.wait())
        killed = False
        for number, stage in enumerate(stages):
            running = {i.name: self._children[i.name] for i in stage if i.name in self._children}
            running = {name: child for name, child in running.items() if not child.ended.done()}
            for child in running.values():
                child.process.terminate()
            ends = asyncio.gather(*(child.ended for child in running.values()))
            share = max(0.0, end - loop.time()) / (len(stages) - number)
            either: set[asyncio.Future[Any]] = {ends, hurry}
            await asyncio.wait(either, timeout=share, return_when=asyncio.FIRST_COMPLETED)
            for name, child in running.items():
                if not child.ended.done():
                    killed = True
                    self.output.say(f"{name} did not stop in time; killing it")
                    processes.kill_group(child.process.pid)
            await ends
            for name, child in running.items():
                self.output.say(f"{name} {_how(child.ended.result())}")
        hurry.cancel()
        self._kill_strays()
        for child in self._children.values():
            await self._drain(child)
        self.output.close()
        return killed

    async def _drain(self, child: _Child) -> None:
        """Let the last lines through, but don't wait for a pipe that somebody else still holds open."""
        transport, _ = await child.pipe
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(child.lines.done.wait(), _DRAIN)
        transport.close()
        await child.lines.done.wait()


def _how(code: int) -> str:
    """In words: how a process ended."""
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
