# SPDX-License-Identifier: Apache-2.0
"""``bench transfer``, as a user runs it; what it measures is for people to judge."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from dynamo_epd.bench import transfer as bench
from dynamo_epd.contract.errors import ConfigError


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["transfer", *words])


SMALL = ("--sizes", "0.25", "--count", "8", "--concurrency", "1", "2")


def test_ours_beside_a_plain_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "results.json"
    args = parse("--ways", "dynamo-epd", "memcpy", *SMALL, "--json", str(target))
    assert args.run(args) == 0
    results = json.loads(target.read_text())["results"]
    assert {(r["way"], r["bytes"], r["concurrency"]) for r in results} == {
        (way, 1 << 18, lanes) for way in ("dynamo-epd", "memcpy") for lanes in (1, 2)
    }
    for result in results:
        assert set(result) == {"way", "bytes", "concurrency", "median_ms", "p99_ms", "requests_per_s"}
        assert 0 < result["median_ms"] <= result["p99_ms"] and result["requests_per_s"] > 0
    shown = capsys.readouterr().out
    assert "dynamo-epd" in shown and "memcpy" in shown and "0.25 MB" in shown


@pytest.mark.slow
@pytest.mark.parametrize("tls", ["unset", "tcp"])
def test_every_way_delivers(tls: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.png"
    extra = ()
    try:
        import matplotlib  # noqa: F401

        extra = ("--plot", str(plot))
    except ImportError:
        pass
    args = parse("--tls", tls, *SMALL, "--json", *extra)
    assert args.run(args) == 0
    shown = capsys.readouterr()
    results = json.loads(shown.out)["results"]
    assert "2 at a time" in shown.err
    assert {r["way"] for r in results} == set(bench.WAYS) and len(results) == 2 * len(bench.WAYS)
    assert not extra or plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [(("--sizes", "65"), "--sizes"), (("--sizes", "0.001"), "--sizes"), (("--count", "1"), "--count")],
)
def test_what_cannot_be_measured_is_said(words: tuple[str, ...], message: str) -> None:
    args = parse(*words)
    with pytest.raises(ConfigError, match=message):
        args.run(args)
