# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dynamo_epd.contract.convert import four_fields, item_runs, prompt_order, seven_fields, special_token_offsets
from dynamo_epd.contract.errors import InvalidMetadata
from dynamo_epd.contract.layout import PromptLayout
from dynamo_epd.contract.multimodal_input import INT32_MAX, MultimodalInput

HASHES = [[1, 2, 3, 4, 5, 6, 7, 8], [-1, -2, -3, -4, -5, -6, -7, -8]]


def good() -> dict[str, Any]:
    """Item 1 at 1 and at 4..5, item 2 at 7..8."""
    return {
        "multimodal_hashes": [list(words) for words in HASHES],
        "multimodal_positions": [1, 7],
        "multimodal_lengths": [3, 2],
        "multimodal_uuids": None,
        "multimodal_item_run_cu_offsets": [0, 2, 3],
        "multimodal_run_positions": [1, 4, 7],
        "multimodal_run_lengths": [1, 2, 2],
    }


def test_round_trip() -> None:
    mm = MultimodalInput.from_builtins(good())
    assert mm.to_builtins() == good()
    assert mm == MultimodalInput.from_builtins(mm.to_builtins())
    assert mm.item_runs == (((1, 1), (4, 2)), ((7, 2),))
    assert mm.digests[1].hex() == "".join(f"{2**32 - i:08x}" for i in range(1, 9))


@pytest.mark.parametrize("uuids", [["a", None], ["x" * 500, "not hex: é"], [None, None]])
def test_uuids_are_unchanged(uuids: list[str | None]) -> None:
    assert (
        MultimodalInput.from_builtins({**good(), "multimodal_uuids": uuids}).to_builtins()["multimodal_uuids"] == uuids
    )


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("no hashes with two items", {"multimodal_hashes": []}, "multimodal_hashes: is empty"),
    ("fewer hashes than items", {"multimodal_hashes": HASHES[:1]}, "multimodal_positions: has 2 entries"),
    ("hashes missing", {"multimodal_hashes": None}, "multimodal_hashes: is missing"),
    ("hash too short", {"multimodal_hashes": [HASHES[0], [1] * 7]}, r"item 2: multimodal_hashes\[1\]: has 7 words"),
    ("hash too long", {"multimodal_hashes": [[1] * 9, HASHES[1]]}, r"item 1: multimodal_hashes\[0\]: has 9 words"),
    ("hash beyond int32", {"multimodal_hashes": [[2**31] + [0] * 7, HASHES[1]]}, r"hashes\[0\]\[0\]: is 2147483648"),
    ("hash below int32", {"multimodal_hashes": [[-(2**31) - 1] + [0] * 7, HASHES[1]]}, r"hashes\[0\]\[0\]: is -214748"),
    ("hash of bool", {"multimodal_hashes": [[True] + [0] * 7, HASHES[1]]}, "of type bool, must be a plain int"),
    ("hash of strings", {"multimodal_hashes": ["12345678", HASHES[1]]}, r"hashes\[0\]: is str, must be a list"),
    ("positions missing", {"multimodal_positions": None}, "multimodal_positions: is missing"),
    ("too few positions", {"multimodal_positions": [1]}, "multimodal_positions: has 1 entries"),
    ("negative position", {"multimodal_positions": [-1, 7]}, r"positions\[0\]: is -1, must be between 0"),
    ("position beyond int32", {"multimodal_positions": [1, 2**31]}, r"positions\[1\]: is 2147483648"),
    ("position is a bool", {"multimodal_positions": [True, 7]}, "is True of type bool"),
    ("position is a numpy int", {"multimodal_positions": [np.int64(1), 7]}, "of type int64, must be a plain int"),
    ("position is a float", {"multimodal_positions": [1.0, 7]}, "of type float"),
    ("positions are an array", {"multimodal_positions": np.array([1, 7])}, "is ndarray, must be a list"),
    ("position is not the first run", {"multimodal_positions": [4, 7]}, "first run starts at 1"),
    ("zero length", {"multimodal_lengths": [0, 2]}, r"lengths\[0\]: is 0, must be between 1"),
    ("lengths missing", {"multimodal_lengths": None}, "multimodal_lengths: is missing"),
    ("sum differs by one", {"multimodal_lengths": [3, 3]}, r"item 2: multimodal_lengths\[1\]: is 3, .* hold 2"),
    ("runs missing", {"multimodal_run_positions": None}, "multimodal_run_positions: is missing"),
    ("run lengths missing", {"multimodal_run_lengths": None}, "multimodal_run_lengths: is missing"),
    ("offsets missing", {"multimodal_item_run_cu_offsets": None}, "run_cu_offsets: is missing"),
    ("offsets too short", {"multimodal_item_run_cu_offsets": [0, 3]}, "has 2 entries, must have 3"),
    ("offsets do not start at 0", {"multimodal_item_run_cu_offsets": [1, 2, 3]}, r"offsets\[0\]: is 1, must be 0"),
    ("offsets decrease", {"multimodal_item_run_cu_offsets": [0, 3, 2]}, "item 2: .* decreases from 3 to 2"),
    ("offsets end early", {"multimodal_item_run_cu_offsets": [0, 1, 2]}, r"\[2\]: is 2, but there are 3 runs"),
    ("an item without runs", {"multimodal_item_run_cu_offsets": [0, 0, 3]}, "item 1: .* runs hold 0 tokens"),
    ("run counts differ", {"multimodal_run_lengths": [1, 2]}, "has 2 entries but multimodal_run_positions has 3"),
    ("zero run", {"multimodal_run_lengths": [0, 3, 2]}, r"run_lengths\[0\]: is 0"),
    ("negative run", {"multimodal_run_lengths": [-1, 4, 2]}, r"run_lengths\[0\]: is -1"),
    (
        "runs out of order",
        {"multimodal_run_positions": [4, 1, 7], "multimodal_positions": [4, 7]},
        "or precedes the run",
    ),
    ("runs overlap", {"multimodal_run_positions": [4, 4, 7], "multimodal_positions": [4, 7]}, "item 1: .* overlaps"),
    (
        "items overlap",
        {"multimodal_run_positions": [1, 4, 5], "multimodal_positions": [1, 5]},
        "to item 1 and to item 2",
    ),
    ("uuids too short", {"multimodal_uuids": ["a"]}, "multimodal_uuids: has 1 entries"),
    ("uuid is a number", {"multimodal_uuids": ["a", 1]}, r"item 2: multimodal_uuids\[1\]: is int"),
    ("uuids are a string", {"multimodal_uuids": "ab"}, "multimodal_uuids: is str"),
    ("unknown field", {"multimodal_hash": []}, "multimodal_hash: is not a field"),
]


@pytest.mark.parametrize(("change", "message"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_rules(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidMetadata, match=message):
        MultimodalInput.from_builtins({**good(), **change})


def test_one_huge_item_ends_beyond_int32() -> None:
    one = {"multimodal_hashes": HASHES[:1], "multimodal_item_run_cu_offsets": [0, 1]}
    fits = MultimodalInput.from_builtins(
        {
            **one,
            "multimodal_positions": [1],
            "multimodal_lengths": [INT32_MAX],
            "multimodal_run_positions": [1],
            "multimodal_run_lengths": [INT32_MAX],
        }
    )
    with pytest.raises(InvalidMetadata, match="ends beyond the prompt of 100 tokens"):
        fits.check_prompt(100)
    with pytest.raises(InvalidMetadata, match="beyond int32"):
        MultimodalInput.from_builtins(
            {
                **one,
                "multimodal_positions": [2],
                "multimodal_lengths": [INT32_MAX],
                "multimodal_run_positions": [2],
                "multimodal_run_lengths": [INT32_MAX],
            }
        )


@pytest.mark.parametrize("obj", [{}, [], "x", {"multimodal_hashes": []}])
def test_empty_and_partial_objects(obj: object) -> None:
    with pytest.raises(InvalidMetadata):
        MultimodalInput.from_builtins(obj)


def layout_of(drawing: str, num_items: int) -> PromptLayout:
    """``.`` is text, a lower-case letter a slot of item a, b, ..., an upper-case one its framing."""
    item = np.array([-1 if c == "." else ord(c.lower()) - ord("a") for c in drawing])
    framing = np.array([c.isupper() for c in drawing])
    return PromptLayout.from_flat(np.arange(len(drawing)), item, framing, num_items)


DIGESTS = ["11" * 32, "22" * 32]


def mm_of(layout: PromptLayout) -> MultimodalInput:
    mm = layout.multimodal_input(DIGESTS[: layout.num_items])
    assert mm is not None
    return mm


def test_forms_of_contiguous_items() -> None:
    layout = layout_of("..AaaA.bb.", 2)
    mm = mm_of(layout)
    assert seven_fields(mm) == mm.to_builtins()
    four = four_fields(mm)
    assert four is not None
    assert list(four) == ["multimodal_hashes", "multimodal_positions", "multimodal_lengths", "multimodal_uuids"]
    assert (four["multimodal_positions"], four["multimodal_lengths"]) == ([2, 7], [4, 2])
    runs = item_runs(mm, layout)
    assert runs is not None
    assert runs["multimodal_item_runs"] == [[(2, 4, [0, 3])], [(7, 2, [])]]
    assert special_token_offsets(layout) == [0, 3]
    assert prompt_order(layout) is None


def test_forms_of_split_items() -> None:
    layout = layout_of(".Aaa.aA.b", 2)
    mm = mm_of(layout)
    assert four_fields(mm) is None
    runs = item_runs(mm, layout)
    assert runs is not None
    assert runs["multimodal_item_runs"] == [[(1, 3, [0]), (5, 2, [1])], [(8, 1, [])]]
    assert item_runs(mm) is None
    assert special_token_offsets(layout) == [0, 4]


def test_rows_of_interleaved_items_in_prompt_order() -> None:
    order = prompt_order(layout_of("a.Bbaab", 2))
    assert order is not None
    assert order.tolist() == [0, 3, 1, 2, 4]


def test_without_run_fields_nothing_exact_is_said() -> None:
    mm = MultimodalInput(tuple(map(tuple, HASHES)), (1, 7), (3, 2))
    assert mm.item_runs == (((1, 3),), ((7, 2),))
    assert seven_fields(mm) is None
    assert four_fields(mm) is None
    assert item_runs(mm, layout_of(".aaa...bb", 2)) is None
