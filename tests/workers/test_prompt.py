# SPDX-License-Identifier: Apache-2.0
"""A media request is never text: what a worker makes of a request and its handoff."""

import numpy as np
import pytest

from dynamo_epd.contract.digest import prompt_digest
from dynamo_epd.contract.errors import InvalidMetadata, InvalidRequest, Unavailable
from dynamo_epd.contract.handoff import (
    HANDOFF_VERSION,
    Group,
    Handoff,
    HandoffError,
    ItemHandoff,
    Replacement,
    Segment,
    TensorRef,
    to_json_object,
)
from dynamo_epd.workers.prompt import build_prompt, media_counts, routing_ids, usable_handoff

IMAGE, IDS = 99, [1, 2, 99, 3]
DIGEST = "ab" * 32


class FakeFamily:
    identity = "model-a"
    embedding_width = 8

    def placeholders(self, token_ids, counts):
        found = list(token_ids).count(IMAGE)
        if found != sum(counts.values()):
            raise InvalidRequest(f"the prompt has {found} image placeholders and the request {sum(counts.values())}")
        return [(i, 1, "image") for i, t in enumerate(token_ids) if t == IMAGE]

    def positions(self, layout, items):
        return None, 0


FAMILY = FakeFamily()


def item(rows=3, digest=DIGEST, width=8):
    ref = TensorRef("h:1", "agent", 5, 1, digest, (rows, width), "float32")
    return ItemHandoff("image", digest, rows, ref)


def handoff(**changes):
    fields = {
        "version": HANDOFF_VERSION,
        "model": "model-a",
        "items": (item(),),
        "replacements": (Replacement(2, 1, (Group(1, (Segment(IMAGE, 3, 0),)),)),),
        "prompt_digest": prompt_digest(IDS),
        **changes,
    }
    return to_json_object(Handoff(**fields))


def request(result=None, media=1, **more):
    data = {"image_url": [{"Url": "data:,x"}] * media} if media else None
    made = {"token_ids": IDS if media else [1, 2, 3], "multi_modal_data": data, **more}
    return made if result is None else {**made, "encoder_result": result}


def test_media_and_handoff_make_an_exact_prompt():
    r = request(handoff(), routing={"cache_salt": "t"})
    prompt = build_prompt(r, usable_handoff(r, FAMILY), FAMILY)
    assert prompt.layout.token_ids.tolist() == [1, 2, 99, 99, 99, 3]
    assert prompt.multimodal_input.multimodal_positions == (2,) and prompt.multimodal_input.multimodal_lengths == (3,)
    assert (prompt.key_kind, prompt.reuse, prompt.cache_salt) == ("exact", True, "t")


def test_text_needs_no_handoff():
    r = request(media=0)
    assert usable_handoff(r, FAMILY) is None
    prompt = build_prompt(r, None, FAMILY)
    assert prompt.multimodal_input is None and prompt.key_kind == "text"


@pytest.mark.parametrize(
    "result, words",
    [
        (None, "not run as text"),
        ({"hello": "world"}, "version None"),
        (handoff(version=HANDOFF_VERSION + 1), f"version {HANDOFF_VERSION + 1}"),
        ({**handoff(), "items": "many"}, "malformed"),
        ({**handoff(), "surprise": 1}, "malformed"),
        (handoff(model="model-b"), "another model"),
        (handoff(prompt_digest=prompt_digest([1, 2, 99, 4])), "another prompt"),
        (handoff(items=(), replacements=()), "0 items for 1"),
        (handoff(items=(), error=HandoffError(503, "encode broke")), "encode broke"),
        ({**handoff(), "items": [{**handoff()["items"][0], "rows": 0}]}, "malformed"),
    ],
)
def test_media_without_a_usable_handoff_are_unavailable(result, words):
    with pytest.raises(Unavailable, match=words):
        usable_handoff(request(result), FAMILY)


def test_a_fault_that_encode_found_is_the_callers():
    with pytest.raises(InvalidRequest, match="image 1: broken"):
        usable_handoff(request(handoff(items=(), error=HandoffError(400, "image 1: broken"))), FAMILY)


def test_placeholders_without_media_are_refused():
    with pytest.raises(InvalidRequest, match="1 image placeholders and the request 0"):
        usable_handoff({"token_ids": IDS}, FAMILY)


@pytest.mark.parametrize("policy", ["refuse", "uncacheable"])
@pytest.mark.parametrize("bad", [item(rows=4), item(rows=2), item(width=16)])
def test_embeddings_that_do_not_fit_the_prompt_are_refused_whatever_the_policy(bad, policy):
    r = request(handoff(items=(bad,)))
    with pytest.raises(InvalidMetadata):
        build_prompt(r, usable_handoff(r, FAMILY), FAMILY, policy)


@pytest.mark.parametrize("start, length", [(4, 1), (-1, 1), (2, 9)])
def test_replacements_outside_the_prompt_are_refused(start, length):
    groups = (Group(1, (Segment(IMAGE, 3, 0),)),)
    r = request(handoff(replacements=(Replacement(start, length, groups),)))
    with pytest.raises(InvalidMetadata):
        build_prompt(r, usable_handoff(r, FAMILY), FAMILY)


def test_a_handoff_cannot_ask_for_endless_memory():
    r = request(handoff(replacements=(Replacement(2, 1, (Group(10**9, (Segment(IMAGE, 10**9, 0),)),)),)))
    with pytest.raises(InvalidMetadata):
        build_prompt(r, usable_handoff(r, FAMILY), FAMILY)


def test_unknown_media_count_as_media():
    assert media_counts({"multi_modal_data": {"scent_url": [{}], "image_url": []}}) == {"scent_url": 1}
    with pytest.raises(Unavailable):
        usable_handoff({"token_ids": [1], "multi_modal_data": {"scent_url": [{}]}}, FAMILY)


def test_routing_ids_are_the_frontends_values_over_the_images_tokens():
    r = request(handoff(), extra_args={"mm_hashes": ["7d7a271ab6ff5d96"]})
    prompt = build_prompt(r, usable_handoff(r, FAMILY), FAMILY)
    value = 1_000_000 + (0x7D7A271AB6FF5D96 & (2**30 - 1))
    assert value == 923705302  # as in the recorded request of a 1.6.1 frontend
    assert prompt.routing_token_ids.tolist() == [1, 2, value, value, value, 3]
    assert np.array_equal(routing_ids(prompt.layout, (), None), prompt.layout.token_ids)
