# SPDX-License-Identifier: Apache-2.0
"""KV that prefill gives away and decode takes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from dynamo_epd.contract.errors import TransferError
from dynamo_epd.engine.base import EngineRequest

from .conftest import FOUR, ONE, Item, MakeEngine, Toy, ask, prefill, text


async def test_only_missing_blocks_are_fetched(toy: Toy, pictures: list[Item], make_engine: MakeEngine) -> None:
    source, target = await make_engine(), await make_engine()
    a, b, _ = pictures
    prompts = [toy.prompt([text(0, 14), a, text(1, 9)]), toy.prompt([text(0, 14), a, b, text(1, 9)])]
    alone = [await ask(source, p.request(f"alone {i}", FOUR)) for i, p in enumerate(prompts)]
    asked = []
    for i, name in ((0, "cold"), (0, "all there"), (1, "a part there"), (1, "all there now")):
        remote, fetch, _ = await prefill(source, prompts[i].request(name, FOUR))
        request = prompts[i].request(name, FOUR, remote_kv=remote, embeddings=())
        assert (await ask(target, request)).tokens == alone[i].tokens
        asked.append(fetch.first_blocks)
    assert asked == [[0], [], [4], []]


async def test_concurrent_imports_of_one_prompt_fetch_it_once(toy: Toy, make_engine: MakeEngine) -> None:
    source, target = await make_engine(), await make_engine()
    prompt = toy.prompt([text(0, 40)])
    remote, fetch, _ = await prefill(source, prompt.request("p", FOUR))
    answers = await asyncio.gather(
        *(ask(target, prompt.request(f"d{i}", FOUR, remote_kv=remote, embeddings=())) for i in range(3))
    )
    assert len({tuple(a.tokens) for a in answers}) == 1
    assert fetch.first_blocks == [0]


@pytest.mark.parametrize("sizes", [(8, 5), (4, 16)])
async def test_prefill_and_decode_may_cut_their_blocks_differently(
    toy: Toy, pictures: list[Item], make_engine: MakeEngine, sizes: tuple[int, int]
) -> None:
    source, target = [await make_engine(tokens_per_block=size) for size in sizes]
    for turn, item in enumerate((pictures[0], pictures[0], pictures[1])):
        prompt = toy.prompt([text(0, 21), item, text(turn, 9)])
        want = (await ask(source, prompt.request(f"alone {turn}", FOUR))).tokens
        remote, _, _ = await prefill(source, prompt.request(f"p {turn}", FOUR))
        answer = await ask(target, prompt.request(f"d {turn}", FOUR, remote_kv=remote, embeddings=()))
        assert answer.tokens == want


async def test_a_fetch_that_fails_fails_its_request_alone(toy: Toy, make_engine: MakeEngine) -> None:
    source, target = await make_engine(), await make_engine()
    prompt = toy.prompt([text(0, 40)])
    remote, fetch, _ = await prefill(source, prompt.request("p", FOUR))

    async def lost(first_block: int) -> torch.Tensor:
        await asyncio.sleep(0)
        raise TransferError("peer_lost", "the prefill worker is gone")

    async def short(first_block: int) -> torch.Tensor:
        return fetch.kv[first_block + 1 :]

    def request(name: str, call: Any) -> EngineRequest:
        return prompt.request(name, FOUR, remote_kv=replace(remote, fetch=call), embeddings=())

    answers = await asyncio.gather(
        ask(target, request("lost", lost)), ask(target, request("waits for it", fetch)), return_exceptions=True
    )
    assert isinstance(answers[0], TransferError) and not isinstance(answers[1], BaseException)
    fresh = await make_engine()
    with pytest.raises(TransferError, match="the KV received is"):
        await ask(fresh, request("short", short))
    assert fresh.used_blocks() == 0


async def test_a_first_token_that_ends_the_answer_needs_no_kv(toy: Toy, make_engine: MakeEngine) -> None:
    source, target = await make_engine(), await make_engine()
    prompt = toy.prompt([text(0, 20)])
    remote, fetch, first = await prefill(source, prompt.request("p", FOUR))
    stop = replace(FOUR, stop_token_ids=frozenset(first.tokens))
    answer = await ask(target, prompt.request("stop", stop, remote_kv=remote, embeddings=()))
    assert (answer.tokens, answer.last.finish_reason) == (first.tokens, "stop")
    answer = await ask(target, prompt.request("length", ONE, remote_kv=remote, embeddings=()))
    assert (answer.tokens, answer.last.finish_reason) == (first.tokens, "length")
    assert fetch.first_blocks == []


async def test_an_export_holds_its_blocks_until_it_is_released(toy: Toy, make_engine: MakeEngine) -> None:
    engine = await make_engine(max_tokens=64, max_seq_len=64)
    await ask(engine, toy.prompt([text(3, 60)]).request("what was in the blocks before", FOUR))
    prompt = toy.prompt([text(0, 41)])
    answer = await ask(engine, prompt.request("p", FOUR, prefill_only=True))
    export = answer.last.kv
    assert export is not None and export.shape == (6, 4, 2, 2, 8, 32)
    other = asyncio.create_task(ask(engine, toy.prompt([text(1, 41)]).request("other", ONE)))
    await asyncio.sleep(0.05)
    assert not other.done()
    kv = torch.full(export.shape, torch.nan)
    export.copy_to(kv)
    assert kv.isfinite().all() and (kv[-1, :, :, :, 1:] == 0).all()
    with pytest.raises(ValueError, match="must be"):
        export.copy_to(kv[1:])
    export.release()
    export.release()
    await other
    engine.check()


async def test_an_export_that_nobody_takes_is_released(toy: Toy, make_engine: MakeEngine) -> None:
    engine = await make_engine()
    outputs = engine.generate(toy.prompt([text(0, 41)]).request("p", FOUR, prefill_only=True))
    waiting = asyncio.ensure_future(anext(outputs))
    while not engine.scheduler.exported:
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await outputs.aclose()
    assert not engine.scheduler.exported
