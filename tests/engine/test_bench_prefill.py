# SPDX-License-Identifier: Apache-2.0
"""``dynamo-epd bench prefill`` measures what it says."""

from __future__ import annotations

import json

import pytest

from dynamo_epd.bench.prefill import make_prompt
from dynamo_epd.cli import main
from dynamo_epd.contract.errors import InvalidRequest


def test_both_sides_in_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "prefill", "--tokens", "600", "--images", "2", "--repeat", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    times = {"reuse_on_ttft_ms", "reuse_off_ttft_ms", "reuse_off_text_ttft_ms"}
    assert set(result) == {*times, "ratio", "metadata_overhead_percent"}
    assert result["ratio"] > 1


def test_the_prompt_has_the_length_asked_for() -> None:
    for tokens, images in ((2000, 4), (2001, 7), (261, 1)):
        prompt = make_prompt(tokens, images)
        assert len(prompt.layout) == prompt.position_ids.shape[1] == tokens
        assert prompt.layout.num_items == images
    with pytest.raises(InvalidRequest, match="too few"):
        make_prompt(500, 2)
