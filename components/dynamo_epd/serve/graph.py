# SPDX-License-Identifier: Apache-2.0
"""A graph: services, each one command line, linked in the order in which a request meets them."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType

from .. import graphs
from ..contract.errors import ConfigError
from .names import did_you_mean


@dataclass(eq=False)
class Service:
    """What ``python -m module args...`` runs, and what the launcher must know about it.

    Attributes:
        name: the service's section in the YAML file.
        module: run with ``python -m``.
        args: flags that make the module this service; the YAML file cannot change them.
        parser: ``package.module:function`` of a function that gives the module's ``ArgumentParser``: its flags are the
            keys of the section. Empty: every key is passed on unchecked.
        aliases: further names of keys, as old YAML files have them.
        gpus: GPUs of one worker where the YAML file does not say; a fraction shares a GPU.
        entry: it takes the users' HTTP requests, at the port of its ``http-port``. It starts only when the services
            that it links to are ready, and one host runs one.
        health: it answers ``/health`` at the port that ``DYN_SYSTEM_PORT`` names, as all Dynamo workers do. A service
            that has neither this nor ``entry`` counts as ready as soon as it runs.
    """

    name: str
    module: str
    args: tuple[str, ...] = ()
    parser: str = ""
    aliases: dict[str, str] = field(default_factory=dict)
    gpus: Fraction = Fraction(0)
    entry: bool = False
    health: bool = False
    links: list[Service] = field(default_factory=list, repr=False)

    def link(self, other: Service) -> Service:
        """Say that this service sends requests to ``other``. Returns ``other``, so that links can be chained."""
        self.links.append(other)
        return other


@dataclass(frozen=True)
class Graph:
    """A loaded graph.

    Attributes:
        target: its name, ``module:Name``.
        path: the file that it came from.
        services: each one after those that send to it: the order in which they are stopped, the reverse of the order
            in which they become ready.
    """

    target: str
    path: Path
    services: tuple[Service, ...]


def load(target: str, working_dir: Path) -> Graph:
    """Import ``module:Name`` and follow the links from there.

    The module is looked for below ``working_dir`` first, then among the graphs of this package (``graphs.epd`` is
    ``dynamo_epd.graphs.epd``), then wherever Python finds it.

    Raises:
        ConfigError: there is no such module or service, or the links run in a circle.
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name or not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"graph {target!r}: expected module:Name, for example graphs.epd:Frontend")
    module = _import(module_name, working_dir)
    found = {key: value for key, value in vars(module).items() if isinstance(value, Service)}
    if name not in found:
        raise ConfigError(f"graph {target!r}: {module.__file__} has no service {name!r}; {did_you_mean(name, found)}")
    return Graph(target, Path(str(module.__file__)), order(found[name]))


def order(head: Service) -> tuple[Service, ...]:
    """All services that ``head`` reaches, each after those that link to it.

    Raises:
        ConfigError: a circle of links, or two services of one name.
    """
    by_name: dict[str, Service] = {}
    waiting = [head]
    while waiting:
        service = waiting.pop()
        known = by_name.setdefault(service.name, service)
        if known is not service:
            raise ConfigError(f"the graph has two services named {service.name}: give each its own name")
        waiting += [other for other in service.links if by_name.get(other.name) is not other]
    try:
        needs_first = TopologicalSorter({n: [o.name for o in s.links] for n, s in by_name.items()}).static_order()
        return tuple(by_name[name] for name in reversed(list(needs_first)))
    except CycleError as error:
        raise ConfigError(f"the graph's links run in a circle: {' -> '.join(reversed(error.args[1]))}") from None


def ready_made() -> Sequence[str]:
    """The module names of the graphs that come with this package."""
    return sorted(f"graphs.{module.name}" for module in pkgutil.iter_modules(graphs.__path__))


def _import(name: str, working_dir: Path) -> ModuleType:
    place = working_dir.joinpath(*name.split("."))
    local = place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()
    if str(working_dir) not in sys.path:
        sys.path.insert(0, str(working_dir))
    own = f"{__package__.rpartition('.')[0]}.{name}"
    for candidate in (name,) if local else (own, name):
        try:
            return importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            # Only the absence of the module itself is ours to report: what it imports in turn may be missing too.
            if not (error.name and f"{candidate}.".startswith(f"{error.name}.")):
                raise
    raise ConfigError(
        f"graph module {name!r} is neither below {working_dir} nor installed; {did_you_mean(name, ready_made())}"
    )
