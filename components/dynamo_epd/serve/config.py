# SPDX-License-Identifier: Apache-2.0
"""The YAML file of a deployment, and what the command line changes in it.

A section per service holds that service's flags as keys. ``Common`` holds keys for several: a section takes those that
it lists in ``common-configs``. ``ServiceArgs`` in a section says how it is run: ``workers``, ``resources: {gpu}``,
``devices``, ``env``. ``Environment`` holds variables for all services, ``Discovery`` how they find each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..contract.errors import ConfigError
from .graph import Graph, Service
from .names import did_you_mean, plain
from .options import command_line, key_of

COMMON, ENVIRONMENT, DISCOVERY = "Common", "Environment", "Discovery"
DISCOVERY_KEYS = ("backend", "directory", "etcd", "host", "nats", "request-plane", "event-plane")
_RESERVED = ("common-configs", "ServiceArgs")
_SERVICE_ARGS = ("workers", "resources", "devices", "env")
_RESOURCES = ("gpu", "cpu", "memory")


class Override(NamedTuple):
    """``--Service.key=value``; ``path`` is ``(section, key, ...)``."""

    path: tuple[str, ...]
    value: Any


@dataclass(frozen=True)
class ServiceConfig:
    """One service as it is to be run here.

    Attributes:
        args: what follows ``python -m module``.
        options: the same by flag name.
        workers: how many processes.
        gpus: GPUs of each; 0 hides all, a fraction shares one.
        devices: the very GPUs, shared by all its processes, instead of ``gpus``.
        env: variables of its processes alone.
        ignored: keys that this launcher has no use for (``resources.cpu``), for a note.
    """

    service: Service
    args: tuple[str, ...]
    options: Mapping[str, Any]
    workers: int
    gpus: Fraction
    devices: tuple[str, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Deployment:
    """A checked YAML file: ``services`` in the graph's order, ``discovery`` with keys of ``DISCOVERY_KEYS``."""

    services: tuple[ServiceConfig, ...]
    env: Mapping[str, str]
    discovery: Mapping[str, str]


def read(path: Path | None) -> dict[str, dict[str, Any]]:
    """The sections of a YAML file; none for None.

    Raises:
        ConfigError: it cannot be read, is no YAML, has a key twice, or has something else than sections.
    """
    if path is None:
        return {}
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from None
    sections = _mapping(content if content is not None else {}, str(path))
    return {
        name: _mapping(section if section is not None else {}, f"{path}: {name}") for name, section in sections.items()
    }


def is_override(flag: str) -> bool:
    """Whether ``flag`` is of the form ``--Service.key``."""
    return re.fullmatch(r"--[A-Za-z_]\w*(\.[\w-]+)+", flag) is not None


def override(flag: str, value: str) -> Override:
    """``--Service.key`` with its value, which is read as YAML, as if it stood in the file."""
    try:
        return Override(tuple(flag[2:].split(".")), yaml.load(value, _StrictLoader))
    except yaml.YAMLError as error:
        raise ConfigError(f"{flag}={value}: {error}") from None


def apply(sections: dict[str, dict[str, Any]], overrides: Sequence[Override]) -> None:
    """Set in ``sections`` what the command line says. A key replaces the same key in another spelling."""
    for path, value in overrides:
        here = sections.setdefault(path[0], {})
        for part in path[1:-1]:
            here = here.setdefault(_same(here, part), {})
            if not isinstance(here, dict):
                raise ConfigError(f"--{'.'.join(path)}: {part} has no keys below it")
        here[_same(here, path[-1])] = value


def resolve(sections: Mapping[str, Mapping[str, Any]], graph: Graph, names: Sequence[str] = ()) -> Deployment:
    """Check ``sections`` against ``graph``.

    Args:
        names: the services that run here; empty for all.

    Raises:
        ConfigError: an unknown service or key, or a value that cannot be used; the message names it.
    """
    services = {service.name: service for service in graph.services}
    for name in names:
        if name not in services:
            raise ConfigError(
                f"--service-name {name}: {graph.target} has no such service; {did_you_mean(name, services)}"
            )
    for name in sections:
        if name not in (*services, COMMON, ENVIRONMENT, DISCOVERY):
            raise ConfigError(f"unknown service {name!r} in the configuration; {did_you_mean(name, services)}")
    discovery = {}
    for key, value in sections.get(DISCOVERY, {}).items():
        discovery[_one_of(key, DISCOVERY_KEYS, DISCOVERY)] = _scalar(value, f"{DISCOVERY}: {key!r}")
    env = _environment(sections.get(ENVIRONMENT, {}), ENVIRONMENT)
    common = sections.get(COMMON, {})
    here = set(names or services)
    # A section of a service that runs elsewhere is checked all the same: one file goes to all hosts.
    checked = {
        name: _service(service, sections.get(name, {}), common)
        for name, service in services.items()
        if name in here or name in sections
    }
    return Deployment(
        tuple(config for name, config in checked.items() if name in here),
        env,
        discovery,
    )


def _service(service: Service, section: Mapping[str, Any], common: Mapping[str, Any]) -> ServiceConfig:
    own = {key: value for key, value in section.items() if _same(_RESERVED, key) not in _RESERVED}
    rest = {_same(_RESERVED, key): value for key, value in section.items() if key not in own}
    by_name = {plain(key): value for key, value in common.items()}
    options: dict[str, Any] = {}
    wanted = rest.get("common-configs", [])
    if not isinstance(wanted, list):
        raise ConfigError(f"{service.name}: common-configs must be a list of keys, not {wanted!r}")
    for key in wanted:
        if plain(str(key)) not in by_name:
            raise ConfigError(
                f"{service.name}: common-configs: {COMMON} has no {key!r}; {did_you_mean(str(key), common)}"
            )
        options[key_of(service, key)] = by_name[plain(key)]
    seen: dict[str, str] = {}
    for key, value in own.items():
        spelled = key_of(service, str(key))
        if spelled in seen:
            raise ConfigError(f"{service.name}: {key!r} and {seen[spelled]!r} are the same key; remove one")
        seen[spelled] = str(key)
        options[spelled] = value
    run = {
        _one_of(key, _SERVICE_ARGS, f"{service.name}: ServiceArgs"): value
        for key, value in _mapping(rest.get("ServiceArgs", {}), f"{service.name}: ServiceArgs").items()
    }
    where = f"{service.name}: ServiceArgs"
    resources = {
        _one_of(key, _RESOURCES, f"{where}.resources"): value
        for key, value in _mapping(run.get("resources", {}), f"{where}.resources").items()
    }
    workers = run.get("workers", 1)
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise ConfigError(f"{where}.workers must be a whole number from 1, not {workers!r}")
    if service.entry and workers > 1:
        raise ConfigError(f"{where}.workers: one host runs one {service.name}, because it has one port")
    devices = run.get("devices")
    return ServiceConfig(
        service,
        command_line(service, options),
        options,
        workers,
        _gpus(resources.get("gpu", service.gpus), f"{where}.resources.gpu"),
        None if devices is None else _devices(devices, f"{where}.devices"),
        _environment(run.get("env", {}), f"{where}.env"),
        tuple(f"{where}.resources.{key}" for key in ("cpu", "memory") if key in resources),
    )


def _gpus(value: Any, where: str) -> Fraction:
    try:
        gpus = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        gpus = Fraction(-1)
    if isinstance(value, bool) or gpus < 0 or (gpus > 1 and gpus.denominator != 1):
        raise ConfigError(f"{where} must be 0, a whole number, or a fraction of one GPU, not {value!r}")
    return gpus


def _devices(value: Any, where: str) -> tuple[str, ...]:
    devices = value if isinstance(value, list) else _scalar(value, where).split(",")
    return tuple(_scalar(device, where).strip() for device in devices)


def _environment(section: Any, where: str) -> dict[str, str]:
    return {str(key): _scalar(value, f"{where}.{key}") for key, value in _mapping(section, where).items()}


def _scalar(value: Any, where: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str | int | float):
        raise ConfigError(f"{where} must be one value, not {value!r}")
    return str(value)


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{where} must hold named keys, not {value!r}")
    return value


def _one_of(key: str, known: Sequence[str], where: str) -> str:
    spelled = _same(known, key)
    if spelled not in known:
        raise ConfigError(f"{where}: unknown key {key!r}; {did_you_mean(key, known)}")
    return spelled


def _same(known: Mapping[str, Any] | Sequence[str], key: str) -> str:
    """The spelling of ``key`` in ``known``; ``key`` where it is not there."""
    return next((k for k in known if plain(k) == plain(key)), key)


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping: the second would silently win."""


def _unique(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        if key_node.tag != "tag:yaml.org,2002:merge" and key_node.value in seen and isinstance(key_node.value, str):
            raise yaml.MarkedYAMLError(
                problem=f"the key {key_node.value!r} stands twice", problem_mark=key_node.start_mark
            )
        seen.add(str(key_node.value))
    loader.flatten_mapping(node)
    return dict(loader.construct_pairs(node, deep=True))


_StrictLoader.add_constructor("tag:yaml.org,2002:map", _unique)
