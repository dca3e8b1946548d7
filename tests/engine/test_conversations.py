# SPDX-License-Identifier: Apache-2.0
"""Greedy answers equal plain transformers' token for token, however blocks are shared, cut, evicted and handed on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from dynamo_epd.contract.block_keys import AugmentedTokens, extend_key
from dynamo_epd.engine.base import SamplingParams
from dynamo_epd.engine.reference import ReferenceEngine, sequence

from .conftest import GAP, Item, MakeEngine, Prompt, Toy, ask, prefill

ANSWER = 6


@dataclass
class Conversation:
    """Turns with the answers of plain transformers."""

    prompts: list[Prompt] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)


def conversations(toy: Toy, seed: int, count: int) -> list[Conversation]:
    """Random chats of one to three turns with one to three pictures, many of which begin alike.

    Where two logits are so close that rounding decides, the turn is left out and the chat ends before it.
    """
    rng = np.random.default_rng(seed)
    pictures = [toy.item(rng) for _ in range(5)]
    texts = [rng.integers(1, toy.TEXT, n).tolist() for n in (1, 3, 8, 13, 21)]
    chats = []
    while len(chats) < count:
        parts: list[list[int] | Item] = [texts[rng.integers(2)]]
        chat = Conversation()
        left = int(rng.integers(1, 4))
        for turn in range(int(rng.integers(1, 4))):
            for _ in range(min(left, int(rng.integers(turn == 0, 3)))):
                parts.append(pictures[rng.integers(len(pictures))])
                left -= 1
            parts.append(texts[rng.integers(len(texts))])
            prompt = toy.prompt(parts)
            answer, gap = toy.plain(prompt, ANSWER)
            if gap < GAP:
                break
            chat.prompts.append(prompt)
            chat.answers.append(answer)
            parts.append(answer)
        if chat.prompts:
            chats.append(chat)
    return chats


@pytest.fixture(scope="module")
def chats(toy: Toy) -> list[Conversation]:
    return conversations(toy, 1, 50)


PARAMS = SamplingParams(max_tokens=ANSWER, stop_token_ids=frozenset({Toy.END}))


@dataclass
class Held:
    """How all chats went: prompt tokens taken from a cache, and which turns were answered wrongly."""

    cached: int = 0
    wrong: list[str] = field(default_factory=list)


async def hold_all(
    chats: list[Conversation], engines: list[ReferenceEngine], concurrency: int = 8, **options: object
) -> Held:
    """Run all chats, some at a time, on one engine or on a prefill and a decode engine."""
    gate = asyncio.Semaphore(concurrency)
    held = Held()

    async def hold(number: int, chat: Conversation) -> None:
        for turn, (prompt, want) in enumerate(zip(chat.prompts, chat.answers, strict=True)):
            async with gate:
                request = prompt.request(f"{number}.{turn}", PARAMS, **options)
                if len(engines) == 2:
                    remote, _, answer = await prefill(engines[0], request)
                    held.cached += answer.cached
                    request = replace(request, remote_kv=remote, embeddings=())
                answer = await ask(engines[-1], request)
                held.cached += answer.cached
                if answer.tokens != want:
                    held.wrong.append(f"chat {number}, turn {turn}: {answer.tokens}, not {want}")
                for engine in engines:
                    engine.check()

    await asyncio.gather(*(hold(i, chat) for i, chat in enumerate(chats)))
    return held


CONFIGS = {
    "chunked": {"enable_chunked_prefill": True, "max_num_tokens": 24, "max_batch_size": 8},
    "whole": {"max_num_tokens": 2048, "max_batch_size": 8},
    "odd blocks, evicting": {
        "enable_chunked_prefill": True,
        "max_num_tokens": 37,
        "tokens_per_block": 5,
        "max_tokens": 340,
    },
    "no partial reuse": {"max_num_tokens": 512, "enable_partial_reuse": False, "max_tokens": 600},
}


@pytest.mark.parametrize("name", CONFIGS)
async def test_one_engine(chats: list[Conversation], make_engine: MakeEngine, name: str) -> None:
    engine = await make_engine(**CONFIGS[name])
    held = await hold_all(chats, [engine])
    assert not held.wrong
    assert held.cached > 500


@pytest.mark.parametrize("name", CONFIGS)
async def test_prefill_and_decode(chats: list[Conversation], make_engine: MakeEngine, name: str) -> None:
    engines = [await make_engine(**CONFIGS[name]) for _ in range(2)]
    held = await hold_all(chats, engines)
    assert not held.wrong
    assert held.cached > 500


@pytest.mark.parametrize("chunked", [False, True])
async def test_without_reuse(chats: list[Conversation], make_engine: MakeEngine, chunked: bool) -> None:
    """By configuration, and by request: then nothing is shared, and nothing stays behind."""
    budget = 32 if chunked else 1024
    off = await make_engine(enable_block_reuse=False, max_num_tokens=budget, enable_chunked_prefill=chunked)
    assert await hold_all(chats, [off]) == Held()
    assert off.used_blocks() == 0
    on = await make_engine()
    assert await hold_all(chats[:8], [on], reuse=False) == Held()
    assert on.used_blocks() == 0


async def test_keys_without_digests_give_wrong_answers(chats: list[Conversation], make_engine: MakeEngine) -> None:
    """What every other test here would not notice if the digests were dropped from the keys."""
    engine = await make_engine(keys="placeholder")
    held = await hold_all(chats, [engine])
    assert len(held.wrong) > 5


@pytest.mark.parametrize("engines", [1, 2])
async def test_keys_that_collide_cost_reuse_and_no_answer(
    chats: list[Conversation], make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, engines: int
) -> None:
    """With keys of two bits, most blocks have the key of another one."""
    collided = 0

    def short(parent: bytes, tokens: AugmentedTokens) -> bytes:
        return bytes([extend_key(parent, tokens)[0] & 3])

    def chain(tokens: AugmentedTokens, size: int, root: bytes) -> list[bytes]:
        keys = [root]
        for start in range(0, len(tokens), size):
            keys.append(short(keys[-1], tokens[start : start + size]))
        return keys[1:]

    running = [await make_engine(**CONFIGS["chunked"]) for _ in range(engines)]
    commit = running[0].cache.commit

    def counted(*args: Any) -> Any:
        nonlocal collided
        node = commit(*args)
        collided += node is None
        return node

    monkeypatch.setattr(sequence, "extend_key", short)
    monkeypatch.setattr(sequence, "block_keys", chain)
    monkeypatch.setattr(running[0].cache, "commit", counted)
    held = await hold_all(chats, running)
    assert not held.wrong
    assert collided > 20 and held.cached > 100


@pytest.mark.slow
@pytest.mark.parametrize("engines", [1, 2])
async def test_200_conversations(toy: Toy, make_engine: MakeEngine, engines: int) -> None:
    many = conversations(toy, 2, 200)
    running = [
        await make_engine(max_tokens=700, max_num_tokens=40, enable_chunked_prefill=True) for _ in range(engines)
    ]
    held = await hold_all(many, running)
    assert not held.wrong
    assert held.cached > 5000
