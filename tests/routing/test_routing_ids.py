# SPDX-License-Identifier: Apache-2.0
"""The ids under which a KV-aware router knows a prompt: the frontend's own, and none where the two disagree."""

from __future__ import annotations

import numpy as np
import pytest

from dynamo_epd.contract.handoff import ItemHandoff, TensorRef
from dynamo_epd.contract.layout import PromptLayout
from dynamo_epd.workers.prompt import routing_ids

HASHES = ("7d7a271ab6ff5d96", "f4ef89b5b5c48af6")
# As a 1.6.1 frontend put them into routing_token_ids for images of these hashes.
VALUES = (923705302, 903073078)
SLOT, START, END = 262, 259, 260
TEXT, AFTER = [258, 84, 82], [71, 72]


def item(modality="image"):
    return ItemHandoff(modality, "ab" * 32, 4, TensorRef("h:1", "a", 0, 0, "d", (4, 8), "float32"))


def layout(counts, *, framing=True):
    """Text, then per item its start, its slots and its end, then text."""
    ids, member, frame = [*TEXT], [-1] * 3, [False] * 3
    for i, count in enumerate(counts):
        ids += [START, *[SLOT] * count, END]
        outer = i if framing else -1
        member += [outer, *[i] * count, outer]
        frame += [framing, *[False] * count, framing]
    ids, member, frame = ids + AFTER, member + [-1] * 2, frame + [False] * 2
    return PromptLayout.from_flat(ids, np.array(member), np.array(frame), len(counts))


def frontend(counts, values):
    """The frontend's view: only the placeholder itself is replaced; padded with zeros to whole blocks."""
    ids = [*TEXT]
    for count, value in zip(counts, values, strict=True):
        ids += [START, *[value] * count, END]
    ids += AFTER
    return ids + [0] * (-len(ids) % 8)


def test_text_is_known_by_its_own_ids():
    assert routing_ids(PromptLayout.text([5, 6, 7]), (), None).tolist() == [5, 6, 7]


@pytest.mark.parametrize("framing", [True, False])
def test_images_have_the_frontends_values_and_framing_in_the_prompt_its_own_ids(framing):
    hashed = frontend((4, 6), VALUES)
    ids = routing_ids(layout((4, 6), framing=framing), [item(), item()], HASHES, hashed)
    assert ids.dtype == np.int64
    assert ids.tolist() == hashed[: len(ids)]


def test_framing_that_came_with_the_replacement_has_the_value_of_its_image():
    hashed = [*TEXT, *[VALUES[0]] * 6, *AFTER]
    assert routing_ids(layout((4,)), [item()], HASHES[:1], hashed).tolist() == hashed


def test_without_the_frontends_ids_its_hashes_give_the_values():
    ids = routing_ids(layout((4, 6), framing=False), [item(), item()], HASHES)
    assert ids.tolist() == frontend((4, 6), VALUES)[: len(ids)]


@pytest.mark.parametrize(
    ("modalities", "hashes"),
    [(["image"], None), (["image"], []), (["image", "image"], HASHES[:1]), (["video"], None), (["audio"], HASHES[:1])],
)
def test_nothing_is_known_from_the_first_item_without_a_value_on(modalities, hashes):
    ids = routing_ids(layout((4,) * len(modalities)), [item(m) for m in modalities], hashes)
    assert ids.tolist() == [*TEXT, *[-1] * (len(ids) - 3)]


def test_an_image_before_a_video_is_known():
    ids = routing_ids(layout((4, 4), framing=False), [item(), item("video")], HASHES[:1])
    known = [*TEXT, START, *[VALUES[0]] * 4, END, START]
    assert ids.tolist() == [*known, *[-1] * (len(ids) - len(known))]


@pytest.mark.parametrize("counted", [3, 5])
def test_known_as_far_as_frontend_and_worker_count_the_same_tokens(counted):
    ids = routing_ids(layout((4,), framing=False), [item()], HASHES[:1], frontend((counted,), VALUES[:1]))
    known = [*TEXT, START, *[VALUES[0]] * min(counted, 4)]
    assert ids.tolist() == [*known, *[-1] * (len(ids) - len(known))]


def test_two_images_in_the_other_order_are_other_ids():
    items = [item(), item()]
    a = routing_ids(layout((4, 4)), items, HASHES, frontend((4, 4), VALUES))
    b = routing_ids(layout((4, 4)), items, HASHES[::-1], frontend((4, 4), VALUES[::-1]))
    assert a[4] == b[10] == VALUES[0] and a[10] == b[4] == VALUES[1]


def test_a_frontend_that_begins_otherwise_leaves_the_text_known():
    """It puts a token before a media prompt that the worker does not: requests without media still match."""
    ids = routing_ids(layout((4,)), [item()], HASHES[:1], [1, *frontend((4,), VALUES[:1])])
    assert ids.tolist() == [*TEXT, *[-1] * (len(ids) - 3)]
