# SPDX-License-Identifier: Apache-2.0
"""A prefill that starts anywhere in a prompt: between items, inside one, or in its framing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from .cases import CASES, KV, TAKES, pairs
from .conftest import CLOSE, Tiny, same
from .harness import Source, reuse_at_most
from .media_files import embedding_url, image

SEED = 1
CUTS = 40

BUSIEST = ["video-with-sound", "audio-video-audio", "video-image-video", "audio-image", "image-image", "audio-audio"]
"""Of these each family takes the first that it can."""


def busiest(name: str) -> str:
    able = {case for family, case in pairs(CASES) if family == name}
    return next(case for case in BUSIEST if case in able)


def whole_items(slot_item: np.ndarray, cut: int) -> int:
    """The last place up to ``cut`` that is not inside a stretch of one item's slots."""
    while 0 < cut < len(slot_item) and slot_item[cut] >= 0 and slot_item[cut] == slot_item[cut - 1]:
        cut -= 1
    return cut


def check_cuts(tiny: Tiny, case: str, count: int) -> None:
    expected, salt = tiny.expected(case, SEED), tiny.salt()
    first = tiny.ask(case, SEED, salt=salt)
    same(first, expected)
    assert first.layout is not None
    slots, last = first.layout.slot_item, first.prompt_tokens - 1
    cuts = np.unique(np.linspace(0, last, min(count, last + 1)).round().astype(int)).tolist()
    inside = [cut for cut in cuts if whole_items(slots, cut) != cut]
    assert len(inside) >= 2
    for cut in cuts:
        with reuse_at_most(tiny.stack.prefill, cut):
            answer = tiny.ask(case, SEED, salt=salt, max_tokens=1)
        same(answer, expected)
        assert answer.cached == (whole_items(slots, cut) if tiny.name == "gemma3" else cut)
    for cut in inside[:: max(1, len(inside) // 3)]:
        with reuse_at_most(tiny.stack.prefill, cut), reuse_at_most(tiny.stack.decode, cut):
            same(tiny.ask(case, SEED, salt=salt), expected)


@pytest.mark.parametrize("tiny", KV, indirect=True)
def test_any_cut_gives_the_same_answer(tiny: Tiny) -> None:
    check_cuts(tiny, busiest(tiny.name), CUTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tiny", "case"), [pair for pair in pairs(CASES) if pair[0] in KV], indirect=["tiny"], scope="session"
)
def test_every_cut_of_every_prompt_gives_the_same_answer(tiny: Tiny, case: str) -> None:
    check_cuts(tiny, case, 10_000)


@pytest.mark.parametrize("tiny", KV, indirect=True)
def test_another_question_about_the_same_media(tiny: Tiny) -> None:
    """A follow-up shares all up to the question, also where it then asks about one more item."""
    case = CASES[busiest(tiny.name)]
    parts, media, salt = list(case.parts(SEED)), case.media(SEED), tiny.salt()
    first = tiny.stack.ask(tiny.text(parts), media, kwargs=case.kwargs, salt=salt)
    assert first.layout is not None
    items = int(first.layout.run_starts[-1] + first.layout.run_lengths[-1])
    for more in (["Really?"], ["And ", media[0], "now?"]):
        asked = [*parts[:-1], *more] if isinstance(parts[-1], str) else [*parts, *more]
        wanted = [part for part in asked if not isinstance(part, str)]
        text = tiny.text(asked)
        answer = tiny.stack.ask(text, wanted, kwargs=case.kwargs, salt=salt)
        same(answer, tiny.plainly(asked, case.plain))
        assert items <= answer.cached < answer.prompt_tokens


@pytest.mark.parametrize("tiny", TAKES, indirect=True)
def test_the_next_turn(tiny: Tiny) -> None:
    """What was generated is shared as well, and stands in the next prompt where it stood when it was generated."""
    able = {case for family, case in pairs(CASES) if family == tiny.name}
    case = CASES[next(name for name in ("long-video", "audio", "image") if name in able)]
    text, media = tiny.text(case.parts(SEED)), case.media(SEED)
    question = tiny.family.tokenizer("And then?", add_special_tokens=False)["input_ids"]
    for worker in (None, tiny.stack.agg):
        salt = tiny.salt()
        first = tiny.stack.ask(text, media, salt=salt, on=worker)
        request = tiny.stack.request(text, media, salt=salt)
        request["token_ids"] = [*request["token_ids"], *first.tokens, *question]
        (second,) = tiny.stack.ask_all([request], on=worker)
        same(second, tiny.plain.answer(text, media, more=[*first.tokens, *question]))
        # Prefill has not seen the answer; who generates does not compute the KV of its last token.
        known = first.prompt_tokens + (0 if worker is None else len(first.tokens) - 1)
        assert second.cached == (0 if tiny.hybrid else known)


@pytest.mark.parametrize("tiny", ["gemma3"], indirect=True)
def test_gemma3_is_cut_at_items_only(tiny: Tiny) -> None:
    """Inside an item its tokens see each other in both directions: a cut there would give something else."""
    salt = tiny.salt()
    first = tiny.ask("image", SEED, salt=salt)
    assert first.layout is not None
    start, end = first.layout.positions(0)[[0, -1]].tolist()
    begins = np.flatnonzero(first.layout.slot_item == 0)
    for cut in range(start, end + 1):
        with reuse_at_most(tiny.stack.prefill, cut):
            answer = tiny.ask("image", SEED, salt=salt, max_tokens=1)
        assert answer.cached == (int(begins[0]) if begins[0] < cut <= begins[-1] else cut)


DEEP = ["cosmos3_omni", "qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe"]


@pytest.mark.parametrize("tiny", DEEP, indirect=True)
def test_deepstack_rows_belong_to_their_tokens(tiny: Tiny) -> None:
    """An answer that starts inside an item takes the deepstack features of just the rows from there on."""
    family, media, expected = tiny.family, image(SEED), tiny.expected("image", SEED)
    prepared = family.prepare(media, {})
    (embedding,) = family.encode([prepared])
    assert embedding.shape == (6, family.hidden_size * (1 + family.deepstack_layers())) and family.deepstack_layers()
    text = tiny.text(CASES["image"].parts(SEED))
    begin = int(tiny.ask("image", SEED).layout.positions(0)[0])
    partial = embedding.clone()
    partial[4:, family.hidden_size :] = 0

    def top(values: torch.Tensor, cut: int) -> dict[int, float]:
        """Of the first token, once row ``cut`` of the item and all before it are cached."""
        item, salt = Source("image", embedding_url(values, grid_thw=prepared.positions["grid_thw"])), tiny.salt()
        tiny.stack.ask(text, [item], salt=salt)
        with reuse_at_most(tiny.stack.prefill, begin + cut):
            answer = tiny.stack.ask(text, [item], salt=salt, max_tokens=1)
        assert answer.cached == begin + cut
        return answer.top[0]

    whole, changed = top(embedding, 3), top(partial, 3)
    assert whole == pytest.approx({t: float(expected.logprobs[0, t]) for t in whole}, abs=CLOSE)
    assert changed == pytest.approx(top(partial, 0), abs=CLOSE)
    assert changed.keys() != whole.keys() or changed != pytest.approx(whole, abs=20 * CLOSE)
