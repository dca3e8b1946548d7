# SPDX-License-Identifier: Apache-2.0
"""Block i of two requests has equal keys if and only if everything that determines it is equal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from dynamo_epd.contract.block_keys import augmented_tokens, block_keys, root_key
from dynamo_epd.contract.layout import PromptLayout
from dynamo_epd.contract.multimodal_input import MultimodalInput, interleaved_groups

VOCAB = 50
DIGESTS = ["aa" * 32, "bb" * 32]


@dataclass
class Request:
    """``tokens``: text ids, or item numbers below zero. ``digests``: of each item number that is used."""

    tokens: list[int]
    digests: dict[int, str]
    salt: str | None = None
    lora: int | None = None
    layout: PromptLayout = field(init=False)
    mm: MultimodalInput | None = field(init=False)

    def __post_init__(self) -> None:
        order = list(dict.fromkeys(t for t in self.tokens if t < 0))
        items = np.array([order.index(t) if t < 0 else -1 for t in self.tokens], dtype=np.int64)
        ids = [VOCAB - 1 if t < 0 else t for t in self.tokens]
        self.layout = PromptLayout.from_flat(ids, items, np.zeros(len(ids), bool), len(order))
        self.in_order = [self.digests[t] for t in order]
        self.mm = self.layout.multimodal_input(self.in_order)

    def facts(self) -> list[Any]:
        """Per position the text id, or which item (by its digest and rank), and which of its tokens."""
        local = dict.fromkeys(range(self.layout.num_items), 0)
        facts: list[Any] = []
        for item, token in zip(self.layout.member_item.tolist(), self.tokens, strict=True):
            if item < 0:
                facts.append(token)
                continue
            facts.append((item, self.in_order[item], local[item]))
            local[item] += 1
        return facts

    def keys(self, size: int) -> list[bytes]:
        tokens = augmented_tokens(self.layout.token_ids, self.mm, VOCAB)
        return block_keys(tokens, size, root_key(self.lora, self.salt))

    @property
    def interleaved(self) -> bool:
        return bool(interleaved_groups([self.layout.runs(i) for i in range(self.layout.num_items)]))


@st.composite
def requests(draw: st.DrawFn) -> Request:
    tokens = draw(st.lists(st.sampled_from([1, 2, -1, -2, -3]), max_size=14))
    digests = {number: draw(st.sampled_from(DIGESTS)) for number in (-1, -2, -3)}
    return Request(tokens, digests, draw(st.sampled_from([None, "x"])), draw(st.sampled_from([None, 1])))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Request, Request]:
    """Two requests, most of them alike up to a change somewhere."""
    one = draw(requests())
    tokens, digests, salt, lora = list(one.tokens), dict(one.digests), one.salt, one.lora
    for change in draw(st.lists(st.sampled_from(["token", "tail", "digest", "salt", "lora", "other"]), max_size=2)):
        at = draw(st.integers(0, max(len(tokens) - 1, 0)))
        if change == "token" and tokens:
            tokens[at] = draw(st.sampled_from([1, 2, -1, -2, -3]))
        elif change == "tail":
            tokens[at:] = draw(st.lists(st.sampled_from([1, 2, -1, -2, -3]), max_size=6))
        elif change == "digest":
            digests[draw(st.sampled_from([-1, -2, -3]))] = draw(st.sampled_from(DIGESTS))
        elif change == "salt":
            salt = draw(st.sampled_from([None, "x", "y", ""]))
        elif change == "lora":
            lora = draw(st.sampled_from([None, 1, 2, 0]))
        elif change == "other":
            return one, draw(requests())
    return one, Request(tokens, digests, salt, lora)


@settings(max_examples=500, deadline=None)
@given(pairs(), st.integers(1, 5))
def test_keys_are_equal_exactly_when_what_they_stand_for_is(pair: tuple[Request, Request], size: int) -> None:
    one, other = pair
    scope = (one.salt, one.lora) == (other.salt, other.lora)
    facts = [request.facts() for request in pair]
    alone = not (one.interleaved or other.interleaved)
    for i, (a, b) in enumerate(zip(one.keys(size), other.keys(size), strict=False)):
        end = (i + 1) * size
        equal = scope and facts[0][:end] == facts[1][:end]
        event(f"equal {equal}, items apart {alone}")
        # Where items interleave, the hash of each covers the whole pattern, so equal parts of unequal patterns
        # are not shared; wrong sharing there is none either.
        if alone:
            assert (a == b) == equal
        elif a == b:
            assert equal


@given(requests(), st.integers(1, 5))
def test_interleaved_requests_share_with_themselves(request: Request, size: int) -> None:
    twin = Request(list(request.tokens), dict(request.digests), request.salt, request.lora)
    assert twin.keys(size) == request.keys(size)


def test_two_patterns_of_the_same_items_do_not_share() -> None:
    """A0 B0 A1 B1 and A0 B0 B1 A1 have the same augmented ids unless the pattern is in the hashes."""
    digests = {-1: DIGESTS[0], -2: DIGESTS[1]}
    one, other = (Request(tokens, digests) for tokens in ([-1, -2, -1, -2], [-1, -2, -2, -1]))
    assert one.keys(2)[1] != other.keys(2)[1]
    moved = Request([7, 7, -1, -2, -1, -2, 7], digests)
    assert moved.mm is not None
    assert one.mm is not None
    assert moved.mm.multimodal_hashes == one.mm.multimodal_hashes


@given(requests(), st.integers(0, 14), st.integers(0, 14))
def test_a_slice_of_the_augmented_ids_is_the_augmented_slice(request: Request, start: int, stop: int) -> None:
    tokens = augmented_tokens(request.layout.token_ids, request.mm, VOCAB)
    expected = []
    local = dict.fromkeys(range(request.layout.num_items), 0)
    for position, item in enumerate(request.layout.member_item.tolist()):
        token: int | bytes = request.tokens[position]
        if item >= 0:
            assert request.mm is not None
            token = request.mm.digests[item] if local[item] == 0 else VOCAB + local[item]
            local[item] += 1
        if start <= position < stop:
            expected.append(token)
    assert tokens[start:stop].tolist() == expected
