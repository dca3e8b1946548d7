# SPDX-License-Identifier: Apache-2.0
"""Reads ``--extra-engine-args`` and ``--override-engine-args`` as keys and values, for any engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ..contract.errors import ConfigError


def read(path: Path | str | None, override_json: str | None) -> dict[str, Any]:
    """An engine YAML with a JSON object laid over it, key by key down to the values.

    Args:
        path: the engine YAML, or None.
        override_json: a JSON object of the same form, or None.

    Raises:
        ConfigError: one of them cannot be read, or holds no keys and values.
    """
    return overlaid(_read_yaml(path), override_json)


def overlaid(base: Mapping[str, Any], override_json: str | None) -> dict[str, Any]:
    """``base`` with a JSON object laid over it. Raises ``ConfigError``."""
    return _merge(base, _read_json(override_json))


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _read_yaml(path: Path | str | None) -> Mapping[str, Any]:
    if path is None:
        return {}
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"engine configuration {path} cannot be read: {error}") from error
    return _mapping(content, str(path))


def _read_json(text: str | None) -> Mapping[str, Any]:
    if not text:
        return {}
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"engine override {text!r} is not JSON: {error}") from error
    return _mapping(content, "engine override")


def _mapping(content: Any, where: str) -> Mapping[str, Any]:
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where} holds a {type(content).__name__}, must hold keys and values")
    section = content.get("kv_cache_config")
    if section is not None and not isinstance(section, Mapping):
        raise ConfigError(f"{where}: kv_cache_config is {section!r}, must be a mapping")
    return content
