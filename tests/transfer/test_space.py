# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_epd.transfer.space import Block, FreeSpace

TOTAL = 500


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([0, 1, 60, 300, 1000]),
    st.lists(st.tuples(st.booleans(), st.integers(1, 90), st.integers(0, 10**6)), max_size=120),
)
def test_against_a_map_of_units(cool: int, steps: list[tuple[bool, int, int]]) -> None:
    space = FreeSpace(TOTAL, cool)
    owner: list[Block | None] = [None] * TOTAL
    taken: list[Block] = []
    for take, size, pick in steps:
        if take or not taken:
            block = space.take(size)
            runs = "".join("x" if unit else "." for unit in owner).split("x")
            if block is None:
                assert max(len(run) for run in runs) < size
            else:
                assert block.size == size
                span = range(block.start, block.start + size)
                assert all(owner[unit] is None for unit in span)
                for unit in span:
                    owner[unit] = block
                taken.append(block)
        else:
            block = taken.pop(pick % len(taken))
            for unit in range(block.start, block.start + block.size):
                owner[unit] = None
            space.give(block, read_elsewhere=pick % 3 > 0)
        assert space.free == owner.count(None)
    for block in taken:
        space.give(block, read_elsewhere=True)
    whole = space.take(TOTAL)
    assert whole is not None and (whole.start, whole.size) == (0, TOTAL)


def test_all_of_an_odd_total_can_be_taken() -> None:
    for total in (1, 15, 16, 17, 1023, 1000, 8191):
        space = FreeSpace(total)
        assert space.take(total + 1) is None
        block = space.take(total)
        assert block is not None and space.free == 0
        assert space.take(1) is None


def test_one_block_in_use_leaves_the_rest_usable() -> None:
    space = FreeSpace(400)
    held = space.take(1)
    for _ in range(50):
        blocks = [space.take(100) for _ in range(3)]
        assert all(blocks)
        for block in blocks:
            assert block is not None
            space.give(block, read_elsewhere=True)
    assert held is not None and space.free == 399


def test_what_another_core_has_read_is_handed_out_last() -> None:
    space = FreeSpace(100, cool=30)
    starts = []
    for _ in range(9):
        block = space.take(10)
        assert block is not None
        starts.append(block.start)
        space.give(block, read_elsewhere=True)
    # Three blocks of 10 cool; the one before them is used again.
    assert starts == [0, 10, 20, 30, 0, 10, 20, 30, 0]
    whole = space.take(100)
    assert whole is not None and space.free == 0


def test_what_this_core_alone_has_used_is_handed_out_next() -> None:
    space = FreeSpace(100, cool=30)
    for _ in range(3):
        block = space.take(10)
        assert block is not None and block.start == 0
        space.give(block, read_elsewhere=False)
