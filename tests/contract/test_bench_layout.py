# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest

from dynamo_epd.bench.layout import loop_layout, make_layout, make_prompt
from dynamo_epd.cli import main


@pytest.mark.parametrize(("tokens", "runs"), [(200_000, 512), (2_000, 1), (1_030, 3)])
def test_the_prompt_is_what_was_asked_for_and_both_ways_agree(tokens: int, runs: int) -> None:
    prompt, replacements = make_prompt(tokens, runs)
    layout, mm = make_layout(prompt, replacements)
    assert len(layout) == tokens
    assert len(layout.run_starts) == runs
    assert loop_layout(prompt, replacements) == (layout.token_ids.tolist(), layout.row_cumsum.tolist(), mm)


def test_json_has_three_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layout", "--json", "--tokens", "3000", "--runs", "5", "--repeat", "2"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == ["layout_ms", "loop_ms", "ratio"]
    assert all(value > 0 for value in result.values())


def test_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layout", "--tokens", "3000", "--runs", "5", "--repeat", "1"]) == 0
    assert "3,000 tokens, 5 runs" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--tokens", "1000"], ["--runs", "0"], ["--repeat", "0"]])
def test_impossible_sizes(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "layout", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1
