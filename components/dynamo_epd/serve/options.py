# SPDX-License-Identifier: Apache-2.0
"""From the keys of a YAML section to a command line, checked against the service's own flags."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
from collections.abc import Mapping
from typing import Any

from ..contract.errors import ConfigError
from .graph import Service
from .names import did_you_mean, plain

_SWITCHES = (argparse._StoreTrueAction, argparse._StoreFalseAction, argparse.BooleanOptionalAction)
_BUILT_IN = (argparse._HelpAction, argparse._VersionAction)
_EMPTY: Mapping[str, argparse.Action] = {}


@functools.cache
def flags(parser: str) -> Mapping[str, argparse.Action]:
    """The flags of the parser that ``package.module:function`` gives, without dashes; ``--no-x`` only as ``x``."""
    if not parser:
        return _EMPTY
    module, _, function = parser.partition(":")
    actions = getattr(importlib.import_module(module), function)()._actions
    return {
        option.removeprefix("--"): action
        for action in actions
        if not isinstance(action, _BUILT_IN)
        for option in action.option_strings
        if option.startswith("--")
        and not (isinstance(action, argparse.BooleanOptionalAction) and option[:5] == "--no-")
    }


def key_of(service: Service, key: str) -> str:
    """``key`` as the service's flag spells it.

    Raises:
        ConfigError: the service has no such flag, or its value is not for the YAML file to choose.
    """
    known = flags(service.parser)
    spelled = plain(key)
    spelled = service.aliases.get(spelled, spelled)
    if known and spelled not in known:
        raise ConfigError(f"{service.name}: unknown key {key!r}; {did_you_mean(key, known)}")
    if f"--{spelled}" in service.args:
        raise ConfigError(
            f"{service.name}: {key!r} is what makes it {service.name}; remove it, or link another service"
        )
    return spelled


def command_line(service: Service, options: Mapping[str, Any]) -> tuple[str, ...]:
    """The arguments after ``python -m module``.

    Args:
        options: values by flag name, as ``key_of`` spells it. A mapping becomes JSON; a list gives a flag that takes
            many values many, and becomes JSON otherwise; true and false switch flags without a value on and off.

    Raises:
        ConfigError: a value that the flag does not take, or a required flag that is missing.
    """
    known = flags(service.parser)
    argv = list(service.args)
    for key, value in options.items():
        argv += _arguments(service, key, value, known.get(key))
    fixed = (arg.removeprefix("--") for arg in service.args)
    given = {id(known[key]) for key in (*options, *fixed) if key in known}
    for key, action in known.items():
        if action.required and id(action) not in given:
            raise ConfigError(
                f"{service.name}: {key!r} is missing; set it there, or in Common and list it in common-configs"
            )
    return tuple(argv)


def _arguments(service: Service, key: str, value: Any, action: argparse.Action | None) -> list[str]:
    where = f"{service.name}: {key!r}"
    if value is None:
        raise ConfigError(f"{where} has no value; remove the line, or give it one")
    if isinstance(action, _SWITCHES) or (action is None and isinstance(value, bool)):
        if not isinstance(value, bool):
            raise ConfigError(f"{where} is a switch: true or false, not {value!r}")
        if value:
            return [f"--{key}"]
        return [f"--no-{key}"] if isinstance(action, argparse.BooleanOptionalAction) else []
    if isinstance(value, list) and action is not None and action.nargs in ("*", "+"):
        return [f"--{key}", *(_checked(where, _text(item), action) for item in value)]
    text = _checked(where, _text(value), action)
    return [f"--{key}={text}"] if text.startswith("-") else [f"--{key}", text]


def _checked(where: str, text: str, action: argparse.Action | None) -> str:
    if action is None:
        return text
    if callable(action.type):
        try:
            value = action.type(text)
        except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
            raise ConfigError(f"{where} cannot be {text!r}: {error}") from None
    else:
        value = text
    if action.choices is not None and value not in action.choices:
        raise ConfigError(f"{where} cannot be {text!r}; {did_you_mean(text, map(str, action.choices))}")
    return text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
