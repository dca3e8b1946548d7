# SPDX-License-Identifier: Apache-2.0
"""KV that another model, or another prompt, left is refused before any of it is in decode's cache."""

from types import SimpleNamespace

import pytest

from dynamo_epd.contract.digest import prompt_digest
from dynamo_epd.contract.errors import Unavailable
from dynamo_epd.contract.handoff import (
    HANDOFF_VERSION,
    PrefillHandoff,
    TensorRef,
    parse_prefill_handoff,
    to_json_object,
)
from dynamo_epd.contract.layout import PromptLayout
from dynamo_epd.workers.decode import DecodeWorker

IDS = [1, 2, 3]
KV = TensorRef("h:1", "agent", 5, 1, "kv:r", (1, 2, 2, 2, 8, 4), "float32")


def handoff(**changes):
    fields = {
        "version": HANDOFF_VERSION,
        "model": "weights-a",
        "prompt_digest": prompt_digest(IDS),
        "num_tokens": 3,
        "tokens_per_block": 8,
        "first_token": 7,
        "kv": KV,
        **changes,
    }
    return parse_prefill_handoff(to_json_object(PrefillHandoff(**fields)))


def check(prefill):
    worker = DecodeWorker(SimpleNamespace())
    worker._running = SimpleNamespace(weights="weights-a")
    worker._check(prefill, {"token_ids": IDS}, SimpleNamespace(layout=PromptLayout.text(IDS)))


def test_the_right_kv_is_taken():
    check(handoff())


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model": "weights-b"}, "other weights"),
        ({"num_tokens": 4}, "another prompt"),
        ({"prompt_digest": prompt_digest([1, 2, 4])}, "another prompt"),
    ],
)
def test_any_other_kv_is_unavailable(change, words):
    with pytest.raises(Unavailable, match=words):
        check(handoff(**change))
