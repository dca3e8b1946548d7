# SPDX-License-Identifier: Apache-2.0
"""``launch/constraints.txt`` against the package's own ranges, and against what the pinned packages require.

``launch/setup.sh`` installs the file with ``--no-deps``: a requirement that is missing from it is missing at run time.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
MACHINES = ["x86_64", "aarch64"]
LEFT_OUT = {"aisimulate"}
"""Required by ai-dynamo, to be had from NVIDIA's own index only, imported by nothing that this package uses."""


def pinned() -> list[Requirement]:
    lines = (ROOT / "launch/constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def applies(marker: Marker | None, python: str, machine: str) -> bool:
    return marker is None or marker.evaluate(
        {
            "python_version": python,
            "python_full_version": f"{python}.20",
            "platform_machine": machine,
            "platform_system": "Linux",
            "sys_platform": "linux",
        }
    )


def declared() -> list[Requirement]:
    """What ``pyproject.toml`` asks for, with the extras that ``launch/setup.sh`` installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [
        Requirement(text)
        for text in [*project["dependencies"], *extras["plots"], *extras["dev"]]
        if not text.startswith(project["name"])
    ]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("python", PYTHONS)
def test_each_package_is_pinned_once(python: str, machine: str) -> None:
    names = [canonicalize_name(r.name) for r in pinned() if applies(r.marker, python, machine)]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"==[\w.]+", str(r.specifier)) for r in pinned())
    assert LEFT_OUT.isdisjoint(names)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("python", PYTHONS)
def test_pins_are_inside_the_declared_ranges(python: str, machine: str) -> None:
    pins = {canonicalize_name(r.name): str(r.specifier)[2:] for r in pinned() if applies(r.marker, python, machine)}
    wanted = [r for r in declared() if applies(r.marker, python, machine)]
    outside = [str(r) for r in wanted if pins.get(canonicalize_name(r.name)) not in r.specifier]
    assert pins and not outside


def missing(wanted: Iterable[Requirement]) -> Iterator[str]:
    """Those of ``wanted``, of what they require and so on, that no installed package meets."""
    todo, seen = deque(r for r in wanted if r.marker is None or r.marker.evaluate()), set()
    while todo:
        requirement = todo.popleft()
        if str(requirement) in seen or requirement.name in LEFT_OUT:
            continue
        seen.add(str(requirement))
        try:
            found = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:
            yield str(requirement)
            continue
        if not requirement.specifier.contains(found.version, prereleases=True):
            yield f"{requirement}, but {found.version} is installed"
        for text in found.requires or ():
            child = Requirement(text)
            if any(child.marker is None or child.marker.evaluate({"extra": e}) for e in requirement.extras or {""}):
                todo.append(child)


def imported() -> set[str]:
    """Top-level modules that any file of the package imports, wherever in the file."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "components").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names


def test_what_is_imported_is_declared() -> None:
    provided = {
        file.parts[0].removesuffix(".py") for r in declared() for file in metadata.files(r.name) or () if file.parts
    }
    foreign = imported() - {"dynamo_epd", "tensorrt_llm"}
    assert foreign and foreign <= provided


def test_nothing_that_is_installed_lacks_a_requirement() -> None:
    assert list(missing(declared())) == []


def test_the_check_sees_what_is_missing() -> None:
    assert list(missing([Requirement("no-such-package")])) == ["no-such-package"]
    assert next(missing([Requirement("numpy<1")])).startswith("numpy<1, but ")
