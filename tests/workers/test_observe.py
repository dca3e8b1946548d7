# SPDX-License-Identifier: Apache-2.0
"""What is counted and written of a request."""

from __future__ import annotations

import json
import logging

import pytest
from dynamo._core import Context

from dynamo_epd.contract.errors import DeadlineExceeded, InvalidMetadata, InvalidRequest, TransferError, Unavailable
from dynamo_epd.workers import faults
from dynamo_epd.workers.observe import Observer


def samples(observer, name):
    """The samples of a metric that are not 0, by the values of their labels."""
    return {
        tuple(sample.labels.values()): sample.value
        for metric in observer.registry.collect()
        for sample in metric.samples
        if sample.name == f"dynamo_component_mm_{name}" and sample.value
    }


@pytest.fixture
def observer():
    return Observer()


@pytest.fixture
def line(observer, caplog):
    """Ends a request, and gives its line."""
    caplog.set_level(logging.INFO)

    def end(*arguments, fault=()):
        seen = observer.request(Context("r-1"))
        with seen.stage("fetch"):
            pass
        seen.item("image", "kept")
        seen.item("image", "encoded")
        seen.note(bytes=7)
        if fault:
            seen.fault(*fault)
        seen.end(*arguments)
        return caplog.messages[-1]

    return end


def test_a_line_of_words(line, monkeypatch):
    monkeypatch.delenv("DYN_LOGGING_JSONL", raising=False)
    assert line("ok").startswith("request=r-1 items=2 kept=1 bytes=7 fetch_ms=0.")
    assert line("invalid", "item", 'image 1: is "bad"\nvery').endswith(
        "outcome=invalid reason=item error='image 1: is \"bad\"\\nvery'"
    )


@pytest.mark.parametrize("name, value", [("DYN_LOGGING_JSONL", "1"), ("DYN_LOGGING_CONSOLE_FORMAT", "jsonl")])
def test_a_line_of_json(line, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    found = json.loads(line("invalid", "item", 'image 1: is "bad"\nvery'))
    assert found.pop("total_ms") >= found.pop("fetch_ms") >= 0
    assert found == {
        "request": "r-1",
        "items": 2,
        "kept": 1,
        "bytes": 7,
        "outcome": "invalid",
        "reason": "item",
        "error": 'image 1: is "bad"\nvery',
    }


def test_a_fault_in_an_answer_is_what_the_request_ends_with(line, observer):
    assert "outcome=failed reason=internal error='KeyError'" in line("ok", fault=("failed", "internal", "KeyError"))
    assert samples(observer, "requests_total") == {("failed", "internal"): 1.0}


def test_keys_are_counted_by_what_kept_them_from_being_exact(observer):
    seen = observer.request(Context("r"))
    for kind, reason in (
        ("exact", ""),
        ("content", "the engine's form 'four' cannot say these runs exactly"),
        ("uncacheable", "multimodal_lengths[1]: is 3, must be 4"),
    ):
        seen.keyed(kind, reason)
    assert samples(observer, "keys_total") == {
        ("exact", ""): 1.0,
        ("content", "engine"): 1.0,
        ("uncacheable", "multimodal_lengths"): 1.0,
    }


def test_the_queue_is_not_counted_twice(observer):
    seen = observer.request(Context("r"))
    with seen.stage("prefill") as stage:
        stage.waited(100.0)
        stage.then("decode")
        stage.then("decode")
    assert samples(observer, "stage_seconds_sum")["queue",] == 100.0
    assert samples(observer, "stage_seconds_sum").get(("prefill",), 0.0) == 0.0
    assert samples(observer, "stage_seconds_count") == {("queue",): 1.0, ("prefill",): 1.0, ("decode",): 1.0}


@pytest.mark.parametrize(
    "error, reason",
    [
        (InvalidRequest("bad", item="image 1"), "item"),
        (InvalidRequest("bad"), "request"),
        (InvalidMetadata("f", "bad"), "metadata"),
        (Unavailable("gone"), "unavailable"),
        (Unavailable("gone", reason="no_handoff"), "no_handoff"),
        (DeadlineExceeded("late"), "deadline"),
        (TransferError("peer_lost", "gone"), "peer_lost"),
        (KeyError("x"), "internal"),
    ],
)
def test_reasons_are_from_a_closed_list(error, reason):
    assert faults.reason(error) == reason


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("bad"),
        InvalidRequest("bad", item="image 1"),
        InvalidMetadata("digests", "too few"),
        Unavailable("gone"),
        Unavailable("gone", reason="other_model"),
        TransferError("arena_full", "full"),
        DeadlineExceeded("late"),
        ValueError("a bug"),
    ],
)
def test_the_first_fault_of_its_kind_has_a_zero_before_it(error):
    observer = Observer()
    counted = {(s.labels["outcome"], s.labels["reason"]) for m in observer.requests.collect() for s in m.samples}
    assert (faults.outcome(error), faults.reason(error)) in counted
