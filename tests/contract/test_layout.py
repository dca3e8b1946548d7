# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_epd.contract.errors import InvalidMetadata
from dynamo_epd.contract.groups import compress, flat_from_groups, groups_from_flat
from dynamo_epd.contract.handoff import Group, Replacement, Segment
from dynamo_epd.contract.layout import PromptLayout, expand

IMG, START, END, BREAK = 900, 901, 902, 903


def image(item: int, rows: int, width: int) -> tuple[Group, ...]:
    slot, stop = Segment(IMG, width, item), Segment(BREAK, 1, item, True)
    return (
        Group(1, (Segment(START, 1, item, True),)),
        Group(rows, (slot, stop)),
        Group(1, (Segment(END, 1, item, True),)),
    )


def video(item: int, frames: int) -> tuple[Group, ...]:
    return tuple(
        Group(1, (Segment(70 + f, 1), Segment(71, 2), Segment(START, 1, item, True), Segment(IMG, 2, item)))
        for f in range(frames)
    )


def test_items_at_both_ends() -> None:
    layout = expand([IMG, 7, IMG], [Replacement(0, 1, image(0, 2, 3)), Replacement(2, 1, image(1, 1, 1))], 2)
    row = [IMG] * 3 + [BREAK]
    assert layout.token_ids.tolist() == [START, *row, *row, END, 7, START, IMG, BREAK, END]
    assert layout.token_ids.dtype == np.int32
    assert [layout.runs(0), layout.runs(1)] == [[(0, 10)], [(11, 4)]]
    assert layout.rows.tolist() == [6, 1]
    assert layout.special_offsets(0).tolist() == [0, 4, 8, 9]
    assert layout.row_cumsum.tolist() == [0, 1, 2, 3, 3, 4, 5, 6, 6, 6, 6, 6, 7, 7, 7]
    assert layout.slot_row[:5].tolist() == [-1, 0, 1, 2, -1]
    assert layout.slot_item[10:].tolist() == [-1, -1, 1, -1, -1]


def test_gap_text_is_in_neither_runs_nor_rows() -> None:
    layout = expand([5, IMG, 6], [Replacement(1, 1, video(0, 3))], 1)
    assert layout.runs(0) == [(4, 3), (10, 3), (16, 3)] == [(4 + 6 * i, 3) for i in range(3)]
    assert layout.rows.tolist() == [6]
    mm = layout.multimodal_input(["ab" * 32], ["mine"])
    assert mm is not None
    assert mm.multimodal_lengths == (9,)
    assert mm.multimodal_positions == (4,)
    assert mm.multimodal_item_run_cu_offsets == (0, 3)
    assert mm.multimodal_uuids == ("mine",)
    assert mm.digests[0].hex() == "ab" * 32


def test_interleaved_items_take_their_own_rows() -> None:
    both = Group(2, (Segment(IMG, 2, 0), Segment(800, 1, 1), Segment(IMG, 1, 0)))
    layout = expand([1, IMG], [Replacement(1, 1, (both,))], 2)
    assert layout.runs(0) == [(1, 2), (4, 3), (8, 1)]
    assert layout.runs(1) == [(3, 1), (7, 1)]
    assert layout.slot_row.tolist() == [-1, 0, 1, 0, 2, 3, 4, 1, 5]


def test_text_only() -> None:
    layout = PromptLayout.text([1, 2, 3])
    assert layout.multimodal_input([]) is None
    assert layout.row_cumsum.tolist() == [0, 0, 0]
    assert layout.run_cu_offsets.tolist() == [0]
    assert len(PromptLayout.text([])) == 0
    assert expand([1, 2], [], 0).token_ids.tolist() == [1, 2]


def test_arrays_are_read_only() -> None:
    layout = expand([IMG, 7], [Replacement(0, 1, image(0, 2, 3))], 1)
    names = ["token_ids", "member_item", "row_cumsum", "run_cu_offsets", "run_starts", "run_lengths", "rows"]
    for name in [*names, "slot_item", "slot_row", "framing"]:
        with pytest.raises(ValueError, match="read-only"):
            getattr(layout, name)[0] = 1


def test_the_callers_array_stays_writable() -> None:
    ids = np.array([1, 2, 3], dtype=np.int32)
    layout = PromptLayout.text(ids)
    ids[0] = 9
    assert layout.token_ids[0] == 1


ONE = Group(1, (Segment(IMG, 1, 0),))


@pytest.mark.parametrize(
    ("replacements", "num_items", "message"),
    [
        ([Replacement(2, 2, (ONE,))], 1, r"replacements\[0\]: replaces 2 tokens from 2"),
        ([Replacement(-1, 1, (ONE,))], 1, "from -1"),
        ([Replacement(0, -1, (ONE,))], 1, "replaces -1 tokens"),
        ([Replacement(1, 1, (ONE,)), Replacement(1, 1, (ONE,))], 1, r"replacements\[1\]: .*\(ends at 2\)"),
        ([Replacement(2, 1, (ONE,)), Replacement(0, 1, (ONE,))], 1, r"replacements\[1\]"),
        ([Replacement(0, 1, (Group(0, ONE.segments),))], 1, r"groups\[0\]: times is 0"),
        ([Replacement(0, 1, (Group(-(10**30), ONE.segments),))], 1, "times is -1000"),
        ([Replacement(0, 1, (ONE, Group(1, ())))], 1, r"groups\[1\]: the number of segments is 0"),
        ([Replacement(0, 1, (Group(1, (Segment(IMG, 0, 0),)),))], 1, r"groups\[0\].segments\[0\]: count is 0"),
        ([Replacement(0, 1, (Group(1, (Segment(IMG, 5, 0), Segment(IMG, -4, 0))),))], 1, r"segments\[1\]: count is -4"),
        ([Replacement(0, 1, (Group(1, (Segment(IMG, 10**12, 0),)),))], 1, "count is 1000000000000, must be"),
        ([Replacement(0, 1, (Group(10**12, ONE.segments),))], 1, "times is 1000000000000, must be"),
        ([Replacement(0, 1, (Group(10**30, ONE.segments),))], 1, "times is 1000"),
        ([Replacement(0, 1, (Group(10**4, (Segment(IMG, 10**4, 0),)),))], 1, "makes 100000000 tokens where at most"),
        ([Replacement(0, 1, (Group(1, (Segment(2**31, 1, 0),)),))], 1, "token id is 2147483648, must be"),
        ([Replacement(0, 1, (Group(1, (Segment(2**70, 1, 0),)),))], 1, "does not fit 64 bits"),
        ([Replacement(0, 1, (Group(1, (Segment(-1, 1, 0),)),))], 1, "token id is -1"),
        ([Replacement(0, 1, (Group(1, (Segment(IMG, 1, 1),)),))], 1, "item number is 1, must be between -1 and 0"),
        ([Replacement(0, 1, (Group(1, (Segment(IMG, 1, -2),)),))], 1, "item number is -2"),
        ([Replacement(0, 1, (Group(1, (Segment(IMG, 1, -1, True),)), ONE))], 1, "position 0 is framing but"),
        ([Replacement(0, 1, (Group(1, (Segment(IMG, 1, 0, True),)),))], 1, "item 1: rows: has no embedding slot"),
        ([Replacement(0, 1, (ONE,))], 2, "item 2: rows: has no embedding slot"),
        ([Replacement(0, 1, (Group(1, (Segment(IMG, 1, 1), Segment(IMG, 1, 0))),))], 2, "numbered in prompt order"),
        ([], 1, "replacements: is empty, but the request has 1 media items"),
    ],
)
def test_expand_refuses(replacements: list[Replacement], num_items: int, message: str) -> None:
    with pytest.raises(InvalidMetadata, match=message):
        expand([1, 2, 3], replacements, num_items)


def test_the_limit_counts_what_is_left() -> None:
    replacements = [Replacement(0, 1, (Group(4, ONE.segments),)), Replacement(2, 1, (Group(1, (Segment(9, 3),)),))]
    assert len(expand([1, 2, 3], replacements, 1, max_tokens=8)) == 8
    with pytest.raises(InvalidMetadata, match=r"replacements\[1\].*: count is 3, must be between 1 and 2"):
        expand([1, 2, 3], replacements, 1, max_tokens=7)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, -1], r"prompt_token_ids\[1\]: is -1"),
        ([1, 2**31], r"prompt_token_ids\[1\]: is 2147483648"),
        ([1, 2**80], "prompt_token_ids"),
        ([1.5], "must hold int32"),
        (["a"], "must hold int32"),
        ([[1]], "has 2 dimensions"),
        ([[1], [2, 3]], "is not a list of integers"),
    ],
)
def test_ids_are_checked(ids: Any, message: str) -> None:
    with pytest.raises(InvalidMetadata, match=message):
        PromptLayout.text(ids)
    with pytest.raises(InvalidMetadata, match=message):
        expand(ids, [Replacement(0, 1, (ONE,))], 1)


@pytest.mark.parametrize(
    ("digests", "uuids", "message"),
    [
        ([], None, "digests: there are 0 for 1 items"),
        (["ab" * 32] * 2, None, "digests: there are 2 for 1 items"),
        (["ab" * 31], None, r"item 1: digests\[0\]: .* is not 64 hex digits"),
        (["zz" * 32], None, r"item 1: digests\[0\]: is not hex"),
        (["ab" * 32], [], "multimodal_uuids: has 0 entries for 1 items"),
    ],
)
def test_digests_are_checked(digests: list[str], uuids: list[str | None] | None, message: str) -> None:
    layout = expand([IMG, 7], [Replacement(0, 1, image(0, 2, 3))], 1)
    with pytest.raises(InvalidMetadata, match=message):
        layout.multimodal_input(digests, uuids)


@st.composite
def flats(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """A random prompt, position by position, with items renumbered in prompt order and a slot in each."""
    item = draw(st.lists(st.integers(-1, 3), max_size=40))
    order = list(dict.fromkeys(i for i in item if i >= 0))
    items = np.array([order.index(i) if i >= 0 else -1 for i in item], dtype=np.int64)
    framing = np.array(draw(st.lists(st.booleans(), min_size=len(item), max_size=len(item))), dtype=bool)
    framing &= items >= 0
    for number in range(len(order)):
        framing[np.flatnonzero(items == number)[-1]] = False
    ids = np.array(draw(st.lists(st.integers(1, 3), min_size=len(item), max_size=len(item))), dtype=np.int64)
    return ids, items, framing, len(order)


@given(flats())
def test_layout_equals_a_plain_loop(flat: tuple[np.ndarray, np.ndarray, np.ndarray, int]) -> None:
    ids, items, framing, num_items = flat
    layout = PromptLayout.from_flat(ids, items, framing, num_items)
    runs: list[list[list[int]]] = [[] for _ in range(num_items)]
    rows = [0] * num_items
    special: list[list[int]] = [[] for _ in range(num_items)]
    tokens = [0] * num_items
    cumsum, slot_item, slot_row, total, before = [], [], [], 0, -1
    for position, (item, frame) in enumerate(zip(items.tolist(), framing.tolist(), strict=True)):
        slot = item >= 0 and not frame
        slot_item.append(item if slot else -1)
        slot_row.append(rows[item] if slot else -1)
        if item >= 0:
            if item == before:
                runs[item][-1][1] += 1
            else:
                runs[item].append([position, 1])
            if frame:
                special[item].append(tokens[item])
            rows[item] += slot
            tokens[item] += 1
        total += slot
        cumsum.append(total)
        before = item
    assert layout.token_ids.tolist() == ids.tolist()
    assert [[list(run) for run in layout.runs(i)] for i in range(num_items)] == runs
    assert layout.rows.tolist() == rows
    assert [layout.special_offsets(i).tolist() for i in range(num_items)] == special
    assert [layout.row_cumsum.tolist(), layout.slot_item.tolist(), layout.slot_row.tolist()] == [
        cumsum,
        slot_item,
        slot_row,
    ]
    mm = layout.multimodal_input(["ab" * 32] * num_items)
    assert (mm is None) == (num_items == 0)
    if mm is not None:
        assert [[list(run) for run in item] for item in mm.item_runs] == runs
        assert list(mm.multimodal_lengths) == tokens


@given(flats())
def test_groups_and_flat_form_are_inverse(flat: tuple[np.ndarray, np.ndarray, np.ndarray, int]) -> None:
    ids, items, framing, _ = flat
    back = flat_from_groups(groups_from_flat(ids, items, framing))
    assert [array.tolist() for array in back] == [ids.tolist(), items.tolist(), framing.tolist()]


SEGMENTS = st.builds(Segment, st.integers(1, 3), st.integers(1, 2), st.just(0), st.booleans())
GROUPS = st.lists(st.builds(Group, st.integers(1, 4), st.lists(SEGMENTS, min_size=1, max_size=3).map(tuple)))


@given(GROUPS)
def test_groups_stay_what_they_stand_for(groups: list[Group]) -> None:
    flat = flat_from_groups(groups)
    again = groups_from_flat(*flat)
    assert [a.tolist() for a in flat_from_groups(again)] == [a.tolist() for a in flat]
    segments = [segment for group in groups for _ in range(group.times) for segment in group.segments]
    spelled = [segment for group in compress(segments) for _ in range(group.times) for segment in group.segments]
    assert spelled == segments


@given(flats(), st.data())
def test_expansion_undone_gives_the_prompt(
    flat: tuple[np.ndarray, np.ndarray, np.ndarray, int], data: st.DataObject
) -> None:
    """Cut an expanded prompt anywhere into kept text and replacements; ``expand`` puts it together again."""
    ids, items, framing, num_items = flat
    n = len(ids)
    cuts = sorted(data.draw(st.sets(st.integers(0, n), max_size=6)) | {0, n})
    unexpanded: list[int] = []
    replacements = []
    for a, b in zip(cuts, cuts[1:], strict=False):
        if (items[a:b] < 0).all() and data.draw(st.booleans()):
            unexpanded += ids[a:b].tolist()
            continue
        length = data.draw(st.integers(0, 2))
        groups = groups_from_flat(ids[a:b], items[a:b], framing[a:b])
        replacements.append(Replacement(len(unexpanded), length, groups))
        unexpanded += [999] * length
    layout = expand(unexpanded, replacements, num_items)
    assert layout.token_ids.tolist() == ids.tolist()
    assert layout.member_item.tolist() == items.tolist()
    assert layout.framing.tolist() == framing.tolist()


def test_rows_of_an_image_compress_to_a_few_numbers() -> None:
    groups = (Group(1, (Segment(START, 1, 0, True),)), Group(63, (Segment(IMG, 64, 0), Segment(BREAK, 1, 0, True))))
    flat = flat_from_groups(groups)
    assert len(flat[0]) == 1 + 63 * 65
    assert groups_from_flat(*flat) == groups


def test_text_without_repetition_is_one_group() -> None:
    segments = tuple(Segment(token, 1) for token in range(20))
    assert compress(segments) == (Group(1, segments),)
    assert compress(()) == ()


@pytest.mark.parametrize("pattern", [[2, 1, 0], [1, 0, 0, 2], [0, 2, 1, 2]])
def test_item_numbers_must_ascend_in_the_prompt(pattern: list[int]) -> None:
    with pytest.raises(InvalidMetadata, match="numbered in prompt order"):
        PromptLayout.from_flat(pattern, np.array(pattern), np.zeros(len(pattern), bool), 3)
