# SPDX-License-Identifier: Apache-2.0
"""From a checked configuration to the processes of this host: command, environment, GPUs, probe."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..contract.errors import ConfigError
from .config import Deployment, ServiceConfig
from .discovery import LOOPBACK, servers, variables
from .graph import Graph, order
from .health import Probe
from .options import flags
from .placement import Need, place

FIRST_SYSTEM_PORT = 8081


@dataclass(frozen=True)
class Instance:
    """One process to run.

    Attributes:
        name: the service's, with a number where there are several workers.
        env: what it gets beyond the launcher's own environment.
        gpus: of this host.
        after: services of this host that must be ready before it is started.
        needs: servers elsewhere, host and port, one of which must be there before it is started.
    """

    name: str
    service: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    probe: Probe
    gpus: tuple[str, ...] = ()
    after: frozenset[str] = frozenset()
    needs: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Launch:
    """All processes of this host, service by service in the order in which they are stopped.

    Attributes:
        url: where requests go; empty where no entry runs here.
        notes: what the user should know.
    """

    instances: tuple[Instance, ...]
    url: str
    notes: tuple[str, ...]


def prepare(
    graph: Graph,
    deployment: Deployment,
    *,
    gpus: tuple[str, ...],
    folder: Path,
    working_dir: Path,
    one_by_one: bool = False,
    environ: Mapping[str, str] = os.environ,
    claim_port: Callable[[int], int],
) -> Launch:
    """Lay out the processes.

    Args:
        gpus: of this host, to hand out.
        folder: private to this launch; discovery by file lives there when the whole graph runs here.
        one_by_one: start each service only when those that it links to are ready, not the entry alone.
        claim_port: gives a free port, the one asked for or a later one.

    Raises:
        ConfigError: too few GPUs, or a discovery that cannot work.
    """
    here = {config.service.name for config in deployment.services}
    whole = len(here) == len(graph.services)
    common = {**variables(deployment.discovery, whole, folder, environ), **deployment.env}
    placed = place(
        [Need(name, c.gpus, c.devices) for c in deployment.services for name in _names(c)],
        gpus,
    )
    needs = tuple(servers(common.get("ETCD_ENDPOINTS", "")))
    port = _port(environ, FIRST_SYSTEM_PORT)
    instances, url = [], ""
    for config in deployment.services:
        service = config.service
        waits = one_by_one or service.entry
        for name in _names(config):
            env = {**common, "CUDA_VISIBLE_DEVICES": ",".join(placed[name]), **config.env}
            probe = Probe("running")
            if service.entry:
                probe = _entry_probe(config, {**environ, **env}, whole)
                # Otherwise Dynamo 1.6.1's frontend writes the whole URL of a picture that it cannot measure.
                log = {**environ, **env}.get("DYN_LOG", "info")
                if "mm_routing" not in log:
                    env["DYN_LOG"] = f"{log},mm_routing=error"
                if probe.port:
                    url = f"{'https' if probe.kind == 'tcp' else 'http'}://{probe.host}:{probe.port}"
            elif service.health:
                port = claim_port(_port(config.env, port))
                env["DYN_SYSTEM_PORT"] = str(port)
                log = {**environ, **env}.get("DYN_LOG", "info")
                if "tower_http" not in log:
                    # Otherwise each question whether it is ready is an error in its log until it is.
                    env["DYN_LOG"] = f"{log},tower_http=off"
                probe = Probe("http", _within({**environ, **env}.get("DYN_SYSTEM_HOST", "")), port)
                port += 1
            instances.append(
                Instance(
                    name,
                    service.name,
                    (sys.executable, "-m", service.module, *config.args),
                    env,
                    working_dir,
                    probe,
                    placed[name],
                    frozenset(s.name for s in order(service)[1:] if s.name in here) if waits else frozenset(),
                    needs,
                )
            )
    ignored = [key for config in deployment.services for key in config.ignored]
    notes = [f"{', '.join(ignored)}: not applied; a process here takes what it needs"] if ignored else []
    return Launch(tuple(instances), url, tuple(notes))


def describe(graph: Graph, launch: Launch) -> str:
    """The launch as a shell script: variables that all share, then a line per process, in the order of starting."""
    shared = dict(set.intersection(*(set(i.env.items()) for i in launch.instances)))
    lines = [
        f"# {graph.target} from {graph.path}",
        *(f"# note: {note}" for note in launch.notes),
        f"cd {shlex.quote(str(launch.instances[0].cwd))}",
        *(f"export {name}={shlex.quote(shared[name])}" for name in sorted(shared)),
    ]
    for instance in reversed(launch.instances):
        facts = [f"GPU {','.join(instance.gpus)}" if instance.gpus else "no GPU"]
        if instance.probe.kind != "running":
            facts.append(f"ready when http://{instance.probe.host}:{instance.probe.port}{instance.probe.path} says so")
        if instance.after:
            facts.append(f"after {', '.join(sorted(instance.after))}")
        own = [f"{k}={shlex.quote(v)}" for k, v in sorted(instance.env.items()) if k not in shared]
        lines += ["", f"# {instance.name}: {'; '.join(facts)}", " ".join([*own, shlex.join(instance.argv)])]
    return "\n".join(lines)


class Ports:
    """Ports that this launcher has claimed for its services until it ends.

    A claim is a name in the kernel's abstract socket space, which other launchers of this host see and which ends with
    the process: between the claim and the moment when the service listens, seconds pass.
    """

    def __init__(self) -> None:
        self._claims: list[socket.socket] = []

    def claim(self, first: int) -> int:
        """The first port from ``first`` that nobody listens on and no launcher has claimed.

        Raises:
            ConfigError: there is none among a thousand.
        """
        for port in range(first, min(first + 1000, 1 << 16)):
            claim = socket.socket(socket.AF_UNIX)
            try:
                claim.bind(f"\0dynamo-epd-port-{port}")
            except OSError:
                claim.close()
                continue
            self._claims.append(claim)
            if is_free(port):
                return port
        raise ConfigError(f"no free port from {first} on; set DYN_SYSTEM_PORT to where there are some")


def is_free(port: int, host: str = "0.0.0.0") -> bool:
    """Whether a server could listen on ``port`` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _names(config: ServiceConfig) -> Iterator[str]:
    name = config.service.name
    return iter([name]) if config.workers == 1 else (f"{name}-{i + 1}" for i in range(config.workers))


def _port(env: Mapping[str, str], otherwise: int) -> int:
    """``DYN_SYSTEM_PORT``: where to look for free ports. Dynamo's own "off" and "any" mean nothing to a probe."""
    try:
        port = int(env.get("DYN_SYSTEM_PORT", otherwise))
    except ValueError:
        raise ConfigError(f"DYN_SYSTEM_PORT {env['DYN_SYSTEM_PORT']!r} is not a port number") from None
    return port if port > 0 else otherwise


def _entry_probe(config: ServiceConfig, env: Mapping[str, str], whole: bool) -> Probe:
    options = config.options
    host = str(options.get("http-host", env.get("DYN_HTTP_HOST", "0.0.0.0")))
    action = flags(config.service.parser).get("http-port")
    port = int(options.get("http-port", env.get("DYN_HTTP_PORT", action.default if action else 0)) or 0)
    if not port:
        return Probe("running")
    host = _within(host)
    if "tls-cert-path" in options or "DYN_TLS_CERT_PATH" in env:
        return Probe("tcp", host, port, "")
    # Without all workers here, nobody knows when the first model is served.
    return Probe("models", host, port, "/v1/models") if whole else Probe("http", host, port, "/live")


def _within(host: str) -> str:
    """Where this host reaches its own server that listens on ``host``."""
    return LOOPBACK if host in ("0.0.0.0", "::", "[::]", "") else host
