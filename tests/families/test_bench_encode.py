# SPDX-License-Identifier: Apache-2.0
"""``dynamo-epd bench encode``: that it measures a real worker and prints one object. How fast is not asserted."""

from __future__ import annotations

import json

import pytest

from dynamo_epd.cli import main

SMALL = ["bench", "encode", "--requests", "6", "--repeat", "1", "--concurrency", "3", "--side", "56"]


def test_one_object_with_the_three_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"batched_items_per_s", "single_items_per_s", "ratio"}
    assert found["ratio"] == pytest.approx(found["batched_items_per_s"] / found["single_items_per_s"], abs=0.02)
    assert found["single_items_per_s"] > 0


@pytest.mark.parametrize("change", [["--requests", "0"], ["--model", "nowhere"], ["--side", "1", "--requests", "-1"]])
def test_what_cannot_be_measured_is_one_line(change: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *change]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
