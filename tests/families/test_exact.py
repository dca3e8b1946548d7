# SPDX-License-Identifier: Apache-2.0
"""Every family and modality through encode, NIXL, prefill and decode: what plain transformers says."""

from __future__ import annotations

import pytest

from .cases import CASES, TAKES, pairs
from .conftest import CLOSE, Tiny, same

SEED, OTHER = 1, 11

every_case = pytest.mark.parametrize(("tiny", "case"), pairs(CASES), indirect=["tiny"], scope="session")
every_family = pytest.mark.parametrize("tiny", TAKES, indirect=True)


@every_family
def test_the_family_takes_what_the_cases_ask(tiny: Tiny) -> None:
    assert {kind for _, kind in tiny.family.markers()} == TAKES[tiny.name]


@every_case
def test_equals_plain_transformers(tiny: Tiny, case: str) -> None:
    expected = tiny.expected(case, SEED)
    same(tiny.ask(case, SEED, on=tiny.stack.forgetful), expected)
    same(tiny.ask(case, SEED, salt=tiny.salt()), expected)


@every_case
def test_five_times(tiny: Tiny, case: str) -> None:
    salt = tiny.salt()
    answers = [tiny.ask(case, SEED, salt=salt) for _ in range(5)]
    for answer in answers:
        same(answer, tiny.expected(case, SEED))
        assert answer.digests == answers[0].digests
    n = answers[0].prompt_tokens
    assert [answer.cached for answer in answers] == [0] + [0 if tiny.hybrid else n - 1] * 4


@every_case
def test_other_content_of_the_same_shape(tiny: Tiny, case: str) -> None:
    expected, other = tiny.expected(case, SEED), tiny.expected(case, OTHER)
    assert expected.ids == other.ids
    assert float((expected.logprobs[0] - other.logprobs[0]).abs().max()) > 20 * CLOSE
    salt = tiny.salt()
    first = tiny.ask(case, SEED, salt=salt)
    answers = [tiny.ask(case, OTHER, salt=salt), tiny.ask(case, SEED, salt=salt)]
    same(answers[0], other)
    same(answers[1], expected)
    assert not {*first.digests} & {*answers[0].digests} and first.digests == answers[1].digests
    begin = min(int(first.layout.run_starts.min()), first.prompt_tokens)
    assert answers[0].cached == (0 if tiny.hybrid else begin)
