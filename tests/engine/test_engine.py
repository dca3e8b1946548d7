# SPDX-License-Identifier: Apache-2.0
"""What the engine shares, counts and frees."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dynamo_epd.contract.errors import Unavailable
from dynamo_epd.engine.base import BlocksRemoved, BlocksStored, RemoteKV, SamplingParams
from dynamo_epd.engine.reference.runner import PagedRunner
from dynamo_epd.engine.reference.scheduler import Chunk

from .conftest import FOUR, ONE, Item, MakeEngine, Prompt, Toy, ask, prefill, text


def tokens_in(steps: list[list[Chunk]]) -> int:
    return sum(c.end - c.start for chunks in steps for c in chunks)


async def test_what_is_shared_is_what_the_keys_allow(toy: Toy, pictures: list[Item], make_engine: MakeEngine) -> None:
    engine = await make_engine()
    a, b, _ = pictures
    begin, q1, q2 = text(0, 11), text(1, 7), text(2, 7)
    first = toy.prompt([begin, a, q1])
    n = len(first.layout)

    async def cached(name: str, prompt: Prompt, **options: Any) -> int:
        return (await ask(engine, prompt.request(name, ONE, **options))).cached

    assert await cached("cold", first) == 0
    assert await cached("again", first) == n - 1
    assert await cached("another question", toy.prompt([begin, a, q2])) == 11 + 1 + 16 + 1
    assert await cached("another picture", toy.prompt([begin, b, q1])) == 11 + 1
    assert await cached("two pictures", toy.prompt([begin, a, b, q1])) == 11 + 1 + 16 + 1
    assert await cached("swapped", toy.prompt([begin, b, a, q1])) == 11 + 1 + 16 + 1
    assert await cached("a salt", first, cache_salt="s") == 0
    assert await cached("the same salt", first, cache_salt="s") == n - 1
    assert await cached("an adapter", first, lora_id=0) == 0
    assert await cached("not to be shared", first, reuse=False) == 0
    assert await cached("still there", first) == n - 1


async def test_generated_tokens_are_shared_with_the_next_turn(toy: Toy, make_engine: MakeEngine) -> None:
    engine = await make_engine()
    prompt = toy.prompt([text(0, 13)])
    answer = await ask(engine, prompt.request("a", SamplingParams(max_tokens=9)))
    following = toy.prompt([text(0, 13), answer.tokens, text(1, 4)])
    # The last generated token was never fed back, so its KV does not exist.
    assert (await ask(engine, following.request("b", ONE))).cached == 13 + 9 - 1


async def test_what_other_requests_left_in_the_pool_is_seen_by_nobody(toy: Toy, make_engine: MakeEngine) -> None:
    """Values that are not finite are left by a request that had such; a mask alone would let them through."""
    prompts = [toy.prompt([text(i, length)]) for i, length in enumerate((9, 30, 13, 17))]
    answers = []
    for rest in (0.0, float("nan")):
        engine = await make_engine()
        engine._runner._pool[:, :, :, 8:] = rest  # block 0 is nobody's
        sent = [p.request(str(i), SamplingParams(max_tokens=12)) for i, p in enumerate(prompts)]
        found = [(await asyncio.gather(*(ask(engine, request) for request in sent)))]
        found.append([await ask(engine, p.request("again" + str(i), FOUR)) for i, p in enumerate(prompts)])
        answers.append([answer.tokens for batch in found for answer in batch])
    assert answers[0] == answers[1]


async def test_requests_that_arrive_together_compute_a_shared_prefix_once(
    toy: Toy, pictures: list[Item], make_engine: MakeEngine, computed: list[list[Chunk]]
) -> None:
    engine = await make_engine(enable_chunked_prefill=True, max_num_tokens=32)
    prompts = [toy.prompt([text(0, 30), pictures[0], text(i, 5)]) for i in range(1, 7)]
    answers = await asyncio.gather(*(ask(engine, p.request(str(i), ONE)) for i, p in enumerate(prompts)))
    full_blocks = (30 + 18) // 8 * 8
    assert sorted(a.cached for a in answers) == [0] + [full_blocks] * 5
    assert tokens_in(computed) == full_blocks + sum(len(p.layout) - full_blocks for p in prompts)


async def test_whoever_waits_for_a_prefix_goes_on_when_its_owner_is_cancelled(
    toy: Toy, make_engine: MakeEngine, computed: list[list[Chunk]]
) -> None:
    engine = await make_engine(enable_chunked_prefill=True, max_num_tokens=16)
    prompt = toy.prompt([text(0, 90)])
    owner = asyncio.create_task(ask(engine, prompt.request("owner", ONE)))
    waiter = asyncio.create_task(ask(engine, prompt.request("waiter", ONE)))
    while len(computed) < 2:
        await asyncio.sleep(0)
    owner.cancel()
    answer = await waiter
    assert 8 <= answer.cached < 88
    assert tokens_in(computed) <= 90 + 16


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("topology", ["agg", "disagg"])
async def test_nothing_is_left_after_cancellations_at_any_point(
    toy: Toy, pictures: list[Item], make_engine: MakeEngine, computed: list[list[Chunk]], topology: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    config = {"enable_chunked_prefill": True, "max_num_tokens": 24, "max_tokens": 400, "max_batch_size": 4}
    engine, source = await make_engine(**config), await make_engine()
    prompts = [toy.prompt([text(i % 3, 20), pictures[i % 3], text(i, 9)]) for i in range(40)]
    imports = {i: (await prefill(source, p.request(str(i), FOUR)))[0] for i, p in enumerate(prompts[:20])}

    async def one(i: int) -> None:
        request = prompts[i].request(str(i), SamplingParams(max_tokens=6))
        if topology == "disagg" and i in imports:
            request = replace(request, remote_kv=imports[i], embeddings=())
        elif topology == "disagg":
            request = replace(request, prefill_only=True)
        async with AsyncExitStack() as stack:
            async for output in engine.generate(request):
                if output.kv is not None:
                    stack.callback(output.kv.release)

    tasks = [asyncio.create_task(one(i)) for i in range(40)]
    for i in rng.permutation(40)[:25]:
        steps = len(computed) + int(rng.integers(0, 3))
        while len(computed) < steps and not all(task.done() for task in tasks):
            await asyncio.sleep(0)
        for _ in range(int(rng.integers(0, 5))):
            await asyncio.sleep(0)
        tasks[i].cancel()
        if rng.random() < 0.3:
            await asyncio.sleep(0)
            tasks[i].cancel()
        engine.check()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(r) for r in results} == {type(None), asyncio.CancelledError}
    engine.check()
    assert not engine._seqs and not engine._busy and not engine.scheduler.running and not engine.scheduler.exported
    assert engine.cache.available == engine.info.total_blocks
    # And what was cancelled left no wrong block behind.
    for i, prompt in enumerate(prompts[:6]):
        want = (await ask(source, prompt.request(f"w{i}", FOUR, reuse=False))).tokens
        assert (await ask(engine, prompt.request(f"g{i}", FOUR))).tokens == want


async def test_closing_waits_for_the_thread_that_reads_the_embeddings(
    toy: Toy, pictures: list[Item], make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embeddings may be gone as soon as the iterator is closed; and meanwhile the event loop runs on."""
    engine = await make_engine()
    entered, go_on = threading.Event(), threading.Event()
    run = PagedRunner.run

    def slow(self: PagedRunner, chunks: Sequence[Chunk]) -> Any:
        entered.set()
        assert go_on.wait(30)
        return run(self, chunks)

    monkeypatch.setattr(PagedRunner, "run", slow)
    task = asyncio.create_task(ask(engine, toy.prompt([text(0, 5), pictures[0]]).request("a", FOUR)))
    while not entered.is_set():
        await asyncio.sleep(0)
    task.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.used_blocks() == 0


@pytest.mark.parametrize("imported", [False, True])
async def test_cancelled_while_a_block_is_copied(
    toy: Toy, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, imported: bool
) -> None:
    engine = await make_engine()
    prompt = toy.prompt([text(0, 21)])
    remote, _, _ = await prefill(engine, prompt.request("a", FOUR))
    entered, go_on = threading.Event(), threading.Event()
    copy = PagedRunner.copy

    def slow(self: PagedRunner, blocks: Sequence[tuple[int, int]]) -> None:
        entered.set()
        assert go_on.wait(30)
        copy(self, blocks)

    monkeypatch.setattr(PagedRunner, "copy", slow)
    request = prompt.request("b", FOUR, remote_kv=remote if imported else None)
    task = asyncio.create_task(ask(engine, request))
    while not entered.is_set():
        await asyncio.sleep(0)
    task.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()
    engine.check()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    engine.check()
    assert (await ask(engine, prompt.request("c", FOUR))).cached == 20


async def test_a_step_that_fails_fails_only_the_requests_at_fault(
    toy: Toy, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await make_engine(enable_chunked_prefill=True, max_num_tokens=64)
    prompts = [toy.prompt([text(i, 20)]) for i in range(4)]
    want = [(await ask(engine, p.request(f"w{i}", FOUR, reuse=False))).tokens for i, p in enumerate(prompts)]
    run = PagedRunner.run

    def faulty(self: PagedRunner, chunks: Sequence[Chunk]) -> Any:
        results = run(self, chunks)
        if any(c.seq.request.request_id == "2" and c.seq.length > c.seq.n for c in chunks):
            raise RuntimeError("out of luck")
        return results

    monkeypatch.setattr(PagedRunner, "run", faulty)
    with caplog.at_level(logging.WARNING):
        answers = await asyncio.gather(
            *(ask(engine, p.request(str(i), FOUR)) for i, p in enumerate(prompts)), return_exceptions=True
        )
    assert isinstance(answers[2], RuntimeError)
    assert [a.tokens for a in answers if not isinstance(a, BaseException)] == [want[0], want[1], want[3]]
    engine.check()


async def test_a_request_waits_for_blocks_and_none_overtakes_it(
    toy: Toy, make_engine: MakeEngine, computed: list[list[Chunk]]
) -> None:
    engine = await make_engine(max_tokens=96, max_seq_len=96)
    done: list[str] = []

    async def one(name: str, n: int, new: int) -> None:
        await ask(engine, toy.prompt([text(n, n)]).request(name, SamplingParams(max_tokens=new)))
        done.append(name)

    await asyncio.gather(one("small", 20, 10), one("large", 80, 10), *(one(f"later {i}", 21 + i, 3) for i in range(4)))
    assert done[:2] == ["small", "large"]
    assert max(len({c.seq for c in chunks}) for chunks in computed) > 1


async def test_decoding_goes_on_while_a_long_prompt_is_computed(
    toy: Toy, make_engine: MakeEngine, computed: list[list[Chunk]]
) -> None:
    engine = await make_engine(enable_chunked_prefill=True, max_num_tokens=16)
    short = asyncio.create_task(ask(engine, toy.prompt([text(0, 10)]).request("s", SamplingParams(max_tokens=30))))
    while len(computed) < 3:
        await asyncio.sleep(0)
    await asyncio.gather(short, ask(engine, toy.prompt([text(1, 100)]).request("l", ONE)))
    mixed = [chunks for chunks in computed if len(chunks) == 2]
    assert len(mixed) >= 6
    assert all(sum(c.end - c.start for c in chunks) <= 16 for chunks in computed)


async def test_events_tell_exactly_what_can_be_reused(toy: Toy, pictures: list[Item], make_engine: MakeEngine) -> None:
    engine = await make_engine(max_tokens=128, max_seq_len=100)
    known: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def listen(event: BlocksStored | BlocksRemoved) -> None:
        if isinstance(event, BlocksRemoved):
            for block in event.block_hashes:
                del known[block]
            return
        parent = event.parent_hash
        for i, block in enumerate(event.block_hashes):
            known[block] = (parent, event.token_ids[8 * i : 8 * i + 8])
            parent = block

    engine.listen(listen)
    prompt = toy.prompt([text(0, 20), pictures[0], text(1, 9)])
    routing = prompt.layout.token_ids.astype(np.int64)
    routing[prompt.layout.slot_item >= 0] = 1_234_567
    answer = await ask(engine, prompt.request("a", SamplingParams(max_tokens=4), routing_token_ids=routing))
    fed = [*routing.tolist(), *answer.tokens[:-1]]
    chain: list[int] = []
    while True:
        following = [h for h, (parent, _) in known.items() if parent == (chain[-1] if chain else None)]
        if not following:
            break
        chain += following
    assert [t for h in chain for t in known[h][1]] == fed[: len(fed) // 8 * 8]
    for i in range(2, 8):
        await ask(engine, toy.prompt([text(i, 70)]).request(str(i), ONE))
    assert not set(chain) & set(known)
    # Where the router has no id for some token, it is told of the blocks before that one.
    before = set(known)
    await ask(engine, prompt.request("c", ONE, routing_token_ids=np.where(np.arange(len(routing)) < 30, routing, -1)))
    told = [tokens for block, (_, tokens) in known.items() if block not in before]
    assert told == [tuple(routing[i : i + 8].tolist()) for i in range(0, 24, 8)]
    for i in range(8, 14):
        await ask(engine, toy.prompt([text(i, 70)]).request(str(i), ONE))
    # Without the router's ids of the media, only what stands before the first item is known to it.
    before = set(known)
    await ask(engine, prompt.request("b", ONE))
    told = [tokens for block, (_, tokens) in known.items() if block not in before]
    assert told == [tuple(routing[i : i + 8].tolist()) for i in range(0, 16, 8)]


async def test_stopping_ends_what_is_in_flight(toy: Toy, make_engine: MakeEngine, computed: list[list[Chunk]]) -> None:
    engine = await make_engine()
    prompt = toy.prompt([text(0, 20)])
    never = asyncio.Event()

    async def fetch(first_block: int) -> torch.Tensor:
        await never.wait()
        raise AssertionError

    remote = RemoteKV(20, 8, 5, fetch)
    requests = [prompt.request("long", SamplingParams(max_tokens=400)), prompt.request("i", FOUR, remote_kv=remote)]
    tasks = [asyncio.create_task(ask(engine, request)) for request in requests]
    while len(computed) < 3:
        await asyncio.sleep(0)
    await engine.stop()
    answers = await asyncio.gather(*tasks)
    assert [a.last.finish_reason for a in answers] == ["cancelled", "cancelled"]
    with pytest.raises(Unavailable):
        await ask(engine, prompt.request("late", ONE))
    await engine.stop()
