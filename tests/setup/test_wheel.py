# SPDX-License-Identifier: Apache-2.0
"""The wheel: every file of the package is in it, and what it says of itself is true."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import zipfile
from email.parser import BytesParser
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from dynamo_epd import __version__

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built in a copy of the sources, so that nothing is left beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(
        ROOT / "components", folder / "components", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, folder)
    build = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"
    made = subprocess.run(
        [sys.executable, "-c", build, "dist"], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    return zipfile.ZipFile(folder / "dist" / made)


def test_every_file_of_the_package_is_in_it(wheel: zipfile.ZipFile) -> None:
    files = {
        path.relative_to(ROOT / "components").as_posix()
        for path in (ROOT / "components").rglob("*")
        if path.is_file() and not {"__pycache__", "dynamo_epd.egg-info"} & set(path.parts)
    }
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == files


def test_its_commands_can_be_imported(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
    points = configparser.ConfigParser()
    points.read_string(wheel.read(name).decode())
    scripts = dict(points["console_scripts"])
    assert scripts.keys() == {"dynamo", "dynamo-epd"}
    for target in scripts.values():
        assert callable(EntryPoint("", target, "console_scripts").load())


def test_its_metadata(wheel: zipfile.ZipFile) -> None:
    read = {name.partition("/")[2]: wheel.read(name) for name in wheel.namelist() if ".dist-info/" in name}
    fields = BytesParser().parsebytes(read["METADATA"])
    assert fields["Name"] == "dynamo-epd"
    assert fields["Version"] == __version__
    assert fields["License-Expression"] == "Apache-2.0"
    assert set(fields.get_all("Provides-Extra") or ()) == {"dev", "plots", "trtllm"}
    assert read["licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
