# SPDX-License-Identifier: Apache-2.0
"""What the engine shares, counts, refuses and frees."""

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

from dynamo_epd.contract.errors import ConfigError, InvalidRequest, TransferError, Unavailable
from dynamo_epd.contract.layout import PromptLayout
from dynamo_epd.demo.toy_data import TOY_MODEL
from dynamo_epd.engine import create_engine
from dynamo_epd.engine.base import BlocksRemoved, BlocksStored, EngineRequest, RemoteKV, SamplingParams
from dynamo_epd.engine.reference.runner import PagedRunner
from dynamo_epd.engine.reference.scheduler import Chunk

from .conftest import Item, MakeEngine, Prompt, Toy, ask, prefill

ONE = SamplingParams(max_tokens=1)
FOUR = SamplingParams(max_tokens=4)


def text(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, Toy.TEXT, n).tolist()


@pytest.fixture(scope="module")
def pictures(toy: Toy) -> list[Item]:
    """Three pictures with 16 rows each."""
    rng = np.random.default_rng(5)
    found: list[Item] = []
    while len(found) < 3:
        item = toy.item(rng)
        if len(item.embedding) == 16:
            found.append(item)
    return found


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


async def test_stopping_after_a_failed_start(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="not a model directory"):
        create_engine("reference", model_dir=tmp_path)
    with pytest.raises(ConfigError, match="no engine 'vllm'"):
        create_engine("vllm", model_dir=tmp_path)
    with pytest.raises(ConfigError, match="keys is 'none'"):
        create_engine("reference", model_dir=TOY_MODEL, keys="none")
    for options, problem in (({"device": "abacus"}, "device 'abacus'"), ({"dtype": "float7"}, "dtype 'float7'")):
        engine = create_engine("reference", model_dir=TOY_MODEL, **options)
        with pytest.raises(ConfigError, match=problem):
            await engine.start()
        assert engine.used_blocks() == 0
        await engine.stop()
        await engine.stop()


async def test_placeholder_keys_say_so_loudly(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        await make_engine(keys="placeholder")
    assert "KEYED BY PLACEHOLDER TOKENS" in caplog.text


def broken(toy: Toy, pictures: list[Item]) -> dict[str, tuple[EngineRequest, str]]:
    """Requests that must not run, with what the error must say."""
    a, b, _ = pictures
    good = toy.prompt([text(0, 9), a, text(1, 9), b, text(2, 9)])
    request = good.request("x", FOUR)
    one = toy.prompt([text(0, 9), a, text(1, 9)])
    moved = toy.prompt([text(0, 10), a, text(1, 8), b, text(2, 9)])
    mm = good.multimodal_input
    sampling = request.sampling

    async def fetch(first_block: int) -> torch.Tensor:
        raise AssertionError

    return {
        "no metadata": (replace(request, multimodal_input=None), "2 media items but no multimodal_input"),
        "metadata for fewer items": (replace(request, multimodal_input=one.multimodal_input), "has 1 items"),
        "metadata of another layout": (
            replace(request, multimodal_input=moved.multimodal_input),
            "item 1: .*places it",
        ),
        "metadata on text": (replace(toy.prompt([text(0, 9)]).request("x", FOUR), multimodal_input=mm), "has 2 items"),
        "an embedding missing": (replace(request, embeddings=[a.embedding]), "1 embeddings for 2 media items"),
        "too few rows": (replace(request, embeddings=[a.embedding, b.embedding[1:]]), r"item 2: .*shape \(15, 128\)"),
        "another width": (replace(request, embeddings=[a.embedding[:, 1:], b.embedding]), "16 slots of width 128"),
        "not floats": (replace(request, embeddings=[a.embedding.int(), b.embedding]), "item 1: .*int32"),
        "no positions": (replace(request, position_ids=None), "needs position_ids"),
        "positions too short": (replace(request, position_ids=good.position_ids[:, 1:]), "shape"),
        "empty": (EngineRequest("x", PromptLayout.text([]), FOUR), "empty"),
        "too long": (toy.prompt([text(0, 512)]).request("x", FOUR), "512 tokens"),
        "unknown id": (toy.prompt([[5, 400]]).request("x", FOUR), "400 is not in the vocabulary"),
        "KV of another prompt": (replace(request, remote_kv=RemoteKV(3, 8, 0, fetch)), "of 3 tokens"),
        "no tokens wanted": (replace(request, sampling=replace(sampling, max_tokens=0)), "max_tokens"),
        "temperature": (replace(request, sampling=replace(sampling, temperature=-1.0)), "temperature"),
        "top_p": (replace(request, sampling=replace(sampling, top_p=0.0)), "top_p"),
        "top_k": (replace(request, sampling=replace(sampling, top_k=-1)), "top_k"),
        "logprobs": (replace(request, sampling=replace(sampling, logprobs=-1)), "logprobs"),
    }


async def test_requests_that_cannot_be_run_are_refused_and_leave_nothing(
    toy: Toy, pictures: list[Item], make_engine: MakeEngine
) -> None:
    engine = await make_engine()
    for name, (request, message) in broken(toy, pictures).items():
        with pytest.raises(InvalidRequest, match=message):
            await ask(engine, request)
            pytest.fail(name)
    assert engine.used_blocks() == 0 and not engine._seqs
    small = await make_engine(max_num_tokens=32)
    with pytest.raises(InvalidRequest, match="enable_chunked_prefill"):
        await ask(small, toy.prompt([text(0, 40)]).request("x", ONE))


async def test_a_request_id_is_used_once_at_a_time(toy: Toy, make_engine: MakeEngine) -> None:
    engine = await make_engine()
    request = toy.prompt([text(0, 20)]).request("same", FOUR)
    answers = await asyncio.gather(ask(engine, request), ask(engine, request), return_exceptions=True)
    assert isinstance(answers[1], InvalidRequest) and not isinstance(answers[0], BaseException)
    await ask(engine, request)
