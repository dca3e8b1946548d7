#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints a ConfigMap with the engine files of a model, for the manifests beside this script.

python3 launch/k8s/configmap.py configs/qwen2.5-vl-7b-instruct | kubectl apply -f -
python3 launch/k8s/configmap.py configs/qwen3-vl-30b-a3b-instruct/gb200 --namespace dynamo | kubectl apply -f -
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, so that the files stay readable."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def name_of(folder: Path) -> str:
    """The ConfigMap's name: the path below ``configs``, as Kubernetes spells names."""
    parts = folder.resolve().parts
    below = parts[len(parts) - parts[::-1].index("configs") :] if "configs" in parts else parts[-1:]
    return re.sub(r"[^a-z0-9]+", "-", "-".join(below).lower()).strip("-")


def config_map(folder: Path, name: str | None = None, namespace: str | None = None) -> str:
    """The manifest as YAML. Each file keeps its text, comments included.

    Raises:
        ValueError: there is no engine file, or one is no YAML mapping.
    """
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise ValueError(f"{folder}: no *.yaml in it; give a folder below configs/ that has engine files")
    data = {}
    for file in files:
        text = file.read_text(encoding="utf-8")
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{file}: {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f"{file}: expected keys and values")
        # A block keeps no blanks at line ends; YAML would quote the whole file instead.
        data[file.name] = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    metadata = {"name": name or name_of(folder), "labels": {"app.kubernetes.io/part-of": "dynamo-epd"}}
    if namespace:
        metadata["namespace"] = namespace
    manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
    return "---\n" + yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=10_000)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Print a ConfigMap with the engine files of a folder.")
    parser.add_argument("folder", type=Path, help="for example configs/qwen2.5-vl-7b-instruct")
    parser.add_argument("--name", help="default: made of the folder's path below configs/")
    parser.add_argument("--namespace")
    args = parser.parse_args(argv)
    try:
        print(config_map(args.folder, args.name, args.namespace), end="")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
