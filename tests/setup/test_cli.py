# SPDX-License-Identifier: Apache-2.0
"""The ``dynamo-epd`` command: what it imports, where it sends its arguments, what its exit status says."""

from __future__ import annotations

import argparse
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from dynamo_epd import __version__, cli
from dynamo_epd.contract.errors import InvalidRequest

HEAVY = {"torch", "torchvision", "transformers", "nixl", "dynamo", "numpy", "PIL"}

LEAVES = [
    (path, command)
    for name, entry in cli.COMMANDS.items()
    for path, command in (
        [(f"{name} {sub}", c) for sub, c in entry.items()] if isinstance(entry, Mapping) else [(name, entry)]
    )
]


def install(monkeypatch: pytest.MonkeyPatch, module: str, **members: object) -> None:
    """Puts a module of these members where ``cli`` looks for ``dynamo_epd.<module>``."""
    fake = types.ModuleType(f"dynamo_epd.{module}")
    vars(fake).update(members)
    parent = module.rpartition(".")[0]
    if parent:
        package = types.ModuleType(f"dynamo_epd.{parent}")
        package.__path__ = []
        monkeypatch.setitem(sys.modules, f"dynamo_epd.{parent}", package)
    monkeypatch.setitem(sys.modules, f"dynamo_epd.{module}", fake)


def command(name: str, run: Callable[[argparse.Namespace], int]) -> Callable[[argparse._SubParsersAction], None]:
    """An ``add_parser`` that adds ``name`` with one option, ``--n``."""

    def add_parser(subparsers: argparse._SubParsersAction) -> None:
        parser = subparsers.add_parser(name)
        parser.add_argument("--n", type=int, default=0)
        parser.set_defaults(run=run)

    return add_parser


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["bench", "--help"]])
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    code = (
        "import sys\nfrom dynamo_epd.cli import main\n"
        f"try:\n    main({argv})\nexcept SystemExit as e:\n    status = e.code\n"
        "print(status, *sorted({m.partition('.')[0] for m in sys.modules}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    status, *imported = out.splitlines()[-1].split()
    assert status == "0"
    assert HEAVY.isdisjoint(imported)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["-h"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name in [cli.WORKER, *cli.COMMANDS]:
        assert f"    {name} " in text


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["-V"])
    assert capsys.readouterr().out.split() == ["dynamo-epd", __version__]


@pytest.mark.parametrize("path", [path for path, _ in LEAVES])
def test_every_command_adds_its_own_parser(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([*path.split(), "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: dynamo-epd {path} ")


def test_no_command_is_left_out() -> None:
    package = Path(cli.__file__).parent
    files = [*package.glob("commands/*.py"), *package.glob("bench/*.py"), *package.glob("demo/*.py")]
    offering = {f"{f.parent.name}.{f.stem}" for f in files if "\ndef add_parser(" in f.read_text()}
    assert offering == {entry.module for _, entry in LEAVES}


@pytest.mark.parametrize("path, entry", LEAVES, ids=[path for path, _ in LEAVES])
def test_arguments_reach_the_command(path: str, entry: cli.Command, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, entry.module, add_parser=command(path.split()[-1], lambda args: args.n))
    assert cli.main([*path.split(), "--n", "7"]) == 7


@pytest.mark.parametrize("prefix", [[], ["worker"]])
def test_options_alone_are_a_workers(prefix: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    install(monkeypatch, "workers.main", main=lambda argv: seen.append(argv) or 3)
    options = ["--disaggregation-mode", "encode", "--model", "demo"]
    assert cli.main([*prefix, *options]) == 3
    assert seen == [options]


def test_worker_help_is_the_workers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    install(monkeypatch, "workers.main", main=lambda argv: seen.append(argv) or 0)
    assert cli.main(["worker", "--help"]) == 0
    assert seen == [["--help"]]


@pytest.mark.parametrize("argv", [[], ["nope"], ["bench"], ["bench", "nope"], ["-x"]])
def test_wrong_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "usage: dynamo-epd" in capsys.readouterr().err


def test_an_error_raised_on_purpose_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise InvalidRequest("not an image\n(it is HTML)", item="image 2")

    install(monkeypatch, "commands.keys", add_parser=command("keys", run))
    assert cli.main(["keys"]) == 2
    assert capsys.readouterr().err == "dynamo-epd: image 2: not an image (it is HTML)\n"


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    install(monkeypatch, "commands.keys", add_parser=command("keys", run))
    assert cli.main(["keys"]) == 130


def test_a_fault_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: argparse.Namespace) -> int:
        raise ZeroDivisionError

    install(monkeypatch, "commands.keys", add_parser=command("keys", run))
    with pytest.raises(ZeroDivisionError):
        cli.main(["keys"])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "keys", cli.Command("contract.no_such_module", ""))
    with pytest.raises(ModuleNotFoundError, match=r"dynamo_epd\.contract\.no_such_module"):
        cli.main(["keys"])


def test_python_dash_m_is_the_same_command() -> None:
    out = subprocess.run([sys.executable, "-m", "dynamo_epd", "-V"], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["dynamo-epd", __version__]
