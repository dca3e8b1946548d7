# SPDX-License-Identifier: Apache-2.0
"""``bench plan``: the prediction that it compares with."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dynamo_epd.bench.plan import Measured, compare
from dynamo_epd.cli import main

ALONE = Measured(requests=30, encode_ms=10.0, prefill_ms=50.0, ttft_ms=65.0, ttft_std_ms=0.0, seconds=2.0)


def test_constant_times_wait_as_the_formula_says():
    # Mean wait of a queue with random arrivals and constant times: rho / (2 (1 - rho)) times.
    report = compare(ALONE, replace(ALONE, requests=200, seconds=20.0), qps=10.0)
    encode_wait, prefill_wait = 10 * 0.1 / (2 * 0.9), 50 * 0.5 / (2 * 0.5)
    predicted = report["predicted_from_alone"]["ttft_ms"]
    # Prefill's arrivals are smoothed by encode's queue: a little less than the formula.
    assert 65 + 0.8 * prefill_wait < predicted < 65 + 1.02 * (encode_wait + prefill_wait)
    assert report["ratio"] == pytest.approx(65 / predicted, rel=0.01)
    assert report["predicted_from_alone"]["prefill_utilisation"] == pytest.approx(0.5, rel=0.05)


def test_a_load_that_is_too_much_has_no_time_to_first_token():
    report = compare(ALONE, replace(ALONE, prefill_ms=40.0), qps=21.0)
    assert report["predicted_from_alone"] == {"ttft_ms": math.inf}
    assert report["predicted_from_loaded"]["prefill_utilisation"] == pytest.approx(0.84, rel=0.05)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--utilisation", "1"], "--utilisation must lie between 0 and 1"),
        (["--requests", "1"], "must be at least 2"),
        (["--prompt-tokens", "5000"], "--prompt-tokens"),
    ],
)
def test_options_that_make_no_sense(flags, message, capsys):
    assert main(["bench", "plan", *flags]) == 2
    assert message in capsys.readouterr().err
