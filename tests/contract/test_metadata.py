# SPDX-License-Identifier: Apache-2.0
"""What becomes of a request whose metadata is bad or missing: never placeholder keys, whatever the policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dynamo_epd.contract.block_keys import augmented_tokens, block_keys, root_key
from dynamo_epd.contract.convert import Form
from dynamo_epd.contract.errors import InvalidMetadata
from dynamo_epd.contract.layout import PromptLayout
from dynamo_epd.contract.metadata import KeyDecision, Policy, decide, unique_salt
from dynamo_epd.contract.multimodal_input import INT32_MAX, MultimodalInput

A, B = "aa" * 32, "bb" * 32
POLICIES: tuple[Policy, ...] = ("refuse", "uncacheable")


def layout_of(drawing: str) -> PromptLayout:
    """``.`` is text, a lower-case letter a slot of item a, b, ..., an upper-case one its framing."""
    item = np.array([-1 if c == "." else ord(c.lower()) - ord("a") for c in drawing], dtype=np.int64)
    return PromptLayout.from_flat(
        [9 if c != "." else 1 for c in drawing], item, np.array([c.isupper() for c in drawing], bool), max(item) + 1
    )


def fields(layout: PromptLayout, *digests: str) -> dict[str, Any]:
    mm = layout.multimodal_input(digests)
    assert mm is not None
    return mm.to_builtins()


def shares(a: KeyDecision, b: KeyDecision, layout: PromptLayout) -> int:
    """How many leading blocks of 2 the same prompt shares when keyed by two decisions, as an engine would."""
    if not (a.reuse and b.reuse):
        return 0
    keys = [
        block_keys(augmented_tokens(layout.token_ids, d.multimodal_input, 100), 2, root_key(None, d.cache_salt))
        for d in (a, b)
    ]
    return sum(x == y for x, y in zip(*keys, strict=True))


SPLIT = layout_of("..aA.a.bb.")


def test_exact() -> None:
    decision = decide(2, layout=SPLIT, digests=[A, B], uuids=["u", None], rows=[2, 2], cache_salt="tenant")
    mm = SPLIT.multimodal_input([A, B], ["u", None])
    assert mm is not None
    assert decision == KeyDecision("exact", mm, mm.to_builtins(), "tenant")
    assert decision.reuse


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_text(salt: str | None) -> None:
    layout = PromptLayout.text([1, 2, 3])
    assert decide(0, layout=layout, cache_salt=salt) == KeyDecision("text", None, None, salt)
    assert decide(0, layout=None, cache_salt=salt).kind == "text"


def test_received_metadata_that_agrees_is_exact() -> None:
    exact = decide(2, layout=SPLIT, digests=[A, B])
    received = fields(SPLIT, A, B)
    assert decide(2, layout=SPLIT, digests=[A, B], received=received) == exact
    assert decide(2, layout=SPLIT, received=received) == exact
    assert decide(2, layout=None, received=received, num_tokens=len(SPLIT)) == exact


def test_received_metadata_without_runs_is_completed_where_the_layout_has_one_run_an_item() -> None:
    layout = layout_of(".aa.bb")
    received = fields(layout, A, B)
    four = {name: value for name, value in received.items() if "run" not in name}
    assert decide(2, layout=layout, received=four).engine_fields == received
    with pytest.raises(InvalidMetadata, match="run_positions: is missing"):
        decide(2, layout=None, received=four, num_tokens=6)


def without(obj: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in obj.items() if name not in names}


GOOD = fields(SPLIT, A, B)
BAD: dict[str, dict[str, Any]] = {
    "nothing": {},
    "layout only": {"layout": SPLIT},
    "digests only": {"digests": [A, B]},
    "empty object": {"layout": SPLIT, "received": {}},
    "empty hashes": {"layout": SPLIT, "received": {**GOOD, "multimodal_hashes": []}},
    "one digest for two items": {"layout": SPLIT, "digests": [A]},
    "a digest that is none": {"layout": SPLIT, "digests": [A, "x"]},
    "layout of one item": {"layout": layout_of(".aa"), "digests": [A]},
    "fewer hashes than items": {"layout": SPLIT, "received": fields(layout_of(".aa"), A)},
    "no hashes": {"layout": SPLIT, "received": without(GOOD, "multimodal_hashes")},
    "runs missing": {"layout": None, "received": without(GOOD, "multimodal_run_positions"), "num_tokens": 10},
    "all runs missing": {
        "layout": SPLIT,
        "received": {**GOOD, **{name: None for name in GOOD if "run" in name}},
    },
    "runs out of order": {"layout": SPLIT, "received": {**GOOD, "multimodal_run_positions": [5, 2, 7]}},
    "overlapping": {"layout": SPLIT, "received": {**GOOD, "multimodal_run_positions": [2, 3, 7]}},
    "beyond the prompt": {"layout": None, "received": GOOD, "num_tokens": 8},
    "length unknown": {"layout": None, "received": GOOD},
    "beyond int32": {"layout": SPLIT, "received": {**GOOD, "multimodal_run_positions": [2, 5, 2**31]}},
    "negative": {"layout": SPLIT, "received": {**GOOD, "multimodal_run_positions": [-2, 5, 7]}},
    "sums that differ": {"layout": SPLIT, "received": {**GOOD, "multimodal_lengths": [3, 3]}},
    "bools": {"layout": SPLIT, "received": {**GOOD, "multimodal_item_run_cu_offsets": [False, 2, 3]}},
    "numpy ints": {"layout": SPLIT, "received": {**GOOD, "multimodal_positions": list(np.array([2, 7]))}},
    "one huge item": {
        "layout": SPLIT,
        "received": {**GOOD, "multimodal_lengths": [3, INT32_MAX], "multimodal_run_lengths": [2, 1, INT32_MAX]},
    },
    "runs of another prompt": {"layout": SPLIT, "received": fields(layout_of("..aA..abb."), A, B)},
    "hashes of other content": {"layout": SPLIT, "digests": [A, B], "received": fields(SPLIT, B, A)},
    "interleaved without digests": {
        "layout": layout_of("abab"),
        "received": fields(layout_of("abab"), A, B),
    },
    "uuids of another count": {"layout": SPLIT, "digests": [A, B], "uuids": ["u"]},
}


@pytest.mark.parametrize("name", BAD)
def test_bad_metadata_is_refused_or_not_shared(name: str) -> None:
    bad = {"layout": None, **BAD[name]}
    with pytest.raises(InvalidMetadata):
        decide(2, **bad)
    decision = decide(2, **bad, policy="uncacheable", cache_salt="tenant")
    assert decision.kind in ("content", "uncacheable")
    assert decision.multimodal_input is None
    assert decision.engine_fields is None
    assert decision.reason
    assert decision.cache_salt not in (None, "tenant")
    again = decide(2, **bad, policy="uncacheable", cache_salt="tenant")
    assert (again.cache_salt == decision.cache_salt) == (decision.kind == "content")


KNOWN_CONTENT = {"digests only", "runs missing", "all runs missing", "runs out of order", "overlapping", "negative"}


@pytest.mark.parametrize("name", sorted(KNOWN_CONTENT))
def test_known_content_shares_with_itself_only(name: str) -> None:
    bad = {"layout": None, **BAD[name]}
    one = decide(2, **bad, policy="uncacheable")
    assert one.kind == "content"
    assert one == decide(2, **bad, policy="uncacheable")
    salts = {
        decide(2, layout=None, digests=digests, cache_salt=salt, policy="uncacheable").cache_salt
        for digests in ([A, B], [B, A], [A, A])
        for salt in (None, "x", "y")
    }
    assert len(salts) == 9
    assert one.cache_salt in salts


@pytest.mark.parametrize(
    "name", ["one digest for two items", "a digest that is none", "hashes of other content", "nothing"]
)
def test_content_that_is_not_known_for_sure_is_shared_with_nobody(name: str) -> None:
    assert decide(2, **{"layout": None, **BAD[name]}, policy="uncacheable").kind == "uncacheable"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rows", [[2, 1], [2, 3], [3, 2], [2], []])
def test_rows_that_are_not_the_slots_are_refused_whatever_the_policy(policy: Policy, rows: list[int]) -> None:
    with pytest.raises(InvalidMetadata, match="rows"):
        decide(2, layout=SPLIT, digests=[A, B], rows=rows, policy=policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_media_that_the_request_does_not_have(policy: Policy) -> None:
    for extra in ({"layout": layout_of(".aa"), "digests": [A]}, {"layout": None, "received": {}}):
        if policy == "refuse":
            with pytest.raises(InvalidMetadata):
                decide(0, policy=policy, **extra)
        else:
            assert decide(0, policy=policy, **extra).kind == "uncacheable"


@pytest.mark.parametrize("policy", POLICIES)
def test_the_case_from_the_literature(policy: Policy) -> None:
    """Block of 4, prompt [101, IMG, IMG, 102, 103], contents A then B, offsets [0, 1], run positions missing."""
    layout = PromptLayout.from_flat([1, 9, 9, 2, 3], np.array([-1, 0, 0, -1, -1]), np.zeros(5, bool), 1)
    decisions = []
    for digest in (A, B):
        received = {**fields(layout, digest), "multimodal_run_positions": None}
        assert received["multimodal_item_run_cu_offsets"] == [0, 1]
        if policy == "refuse":
            with pytest.raises(InvalidMetadata, match="multimodal_run_positions: is missing"):
                decide(1, layout=None, received=received, num_tokens=5, policy=policy)
        else:
            decisions.append(decide(1, layout=None, received=received, num_tokens=5, policy=policy))
    if decisions:
        assert shares(*decisions, layout) == 0
        assert shares(decisions[0], decisions[0], layout) == 3


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("drawing", "form", "kind"),
    [
        (".aaa.", "four", "exact"),
        (".aAa.", "item_runs", "exact"),
        ("a.a..", "four", "content"),
        ("a.a..", "item_runs", "exact"),
        ("a.a..", "seven", "exact"),
        (".aaa.", "none", "content"),
    ],
)
def test_what_a_form_cannot_say_is_keyed_by_content(drawing: str, form: Form, kind: str, policy: Policy) -> None:
    layout = layout_of(drawing)
    ours, others = (decide(1, layout=layout, digests=[d], form=form, policy=policy, cache_salt="t") for d in (A, B))
    assert ours.kind == kind
    assert (ours.engine_fields is None) == (ours.multimodal_input is None) == (kind == "content")
    assert shares(ours, ours, layout) == 3
    assert shares(ours, others, layout) == 0


def test_salts_share_nothing() -> None:
    decisions = [decide(2, layout=SPLIT, digests=[A, B], cache_salt=salt) for salt in (None, "x", "y")]
    for i, one in enumerate(decisions):
        for j, other in enumerate(decisions):
            assert shares(one, other, SPLIT) == (5 if i == j else 0)


def test_unique_salts_are_unique() -> None:
    assert len({unique_salt() for _ in range(1000)}) == 1000


def test_a_received_object_may_be_a_multimodal_input() -> None:
    received = MultimodalInput.from_builtins(GOOD)
    assert decide(2, layout=SPLIT, received=received).multimodal_input == received
    assert decide(2, layout=SPLIT, received=received, digests=[B, A], policy="uncacheable").kind == "uncacheable"
    shifted = layout_of("...aA.a.bb")
    assert decide(2, layout=shifted, received=received, policy="uncacheable").kind == "content"
