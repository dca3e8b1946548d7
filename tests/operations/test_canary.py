# SPDX-License-Identifier: Apache-2.0
"""Health checks of workers in this process: what they do, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import zlib
from contextlib import AsyncExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest
from dynamo._core import Context
from dynamo.llm.exceptions import HttpError, Unknown

from dynamo_epd.contract.errors import TransferError
from dynamo_epd.demo.toy_data import TOY_MODEL
from dynamo_epd.transfer import TransferConfig, open_transfer
from dynamo_epd.workers.args import parse
from dynamo_epd.workers.main import create_worker

from ..families.cases import TAKES
from ..models.tiny import make_weights, write_model_dir

PROBE = {"_HEALTH_CHECK": True}
"""What an operator's DYN_HEALTH_CHECK_PAYLOAD={} leaves of Dynamo's payload."""
ROWS = 4
"""Of the picture, with the toy model."""
MODES = ("auto", "map", "read", "write", "stream")


async def started(role, model, *argv):
    transfer = ("--transfer-host", "127.0.0.1", "--transfer-arena-bytes", str(8 << 20))
    engine = () if role == "encode" else ("--engine", "reference", "--device", "cpu")
    args, _ = parse(["--disaggregation-mode", role, "--model", str(model), *transfer, *engine, *argv])
    worker = create_worker(args)
    await worker.start(1)
    return worker


@pytest.fixture
async def start():
    """Starts workers and stops them."""
    running = []

    async def begin(*args):
        running.append(await started(*args))
        return running[-1]

    yield begin
    for worker in running:
        await worker.cleanup()


async def check(worker, number):
    return [chunk async for chunk in worker.generate(dict(PROBE), Context(f"canary-{number}"))]


def canaries(worker, outcome):
    return worker.observer.canaries.labels(outcome)._value.get()


@pytest.mark.parametrize("mode", MODES)
async def test_encode_encodes_and_moves_a_picture(start, mode):
    worker = await start(
        "encode", TOY_MODEL, "--transfer-mode", mode, "--multimodal-embedding-cache-capacity-gb", "0.001"
    )
    calls, encode = [], worker._batcher._encode
    worker._batcher._encode = lambda items: calls.append([item.rows for item in items]) or encode(items)
    for number in range(3):
        (chunk,) = await check(worker, number)
        assert chunk["finish_reason"]
        peer = worker._peer._endpoint
        assert peer.effects.moved_bytes == (number + 1) * ROWS * worker._family.embedding_width * 4
        assert peer.arena.used_bytes == 0
    assert calls == [[ROWS]] * 3
    assert worker.transfer.arena.used_bytes == 0 and not worker.transfer.offering
    assert len(worker.transfer.store) == 0 and worker.transfer.store.hits + worker.transfer.store.misses == 0
    assert canaries(worker, "ok") == 3
    ended = [sample.value for m in worker.observer.registry.collect() for sample in m.samples if "stage" in sample.name]
    assert not any(ended)


async def test_encode_fails_where_the_embedding_does_not_arrive_and_recovers(start, monkeypatch):
    worker = await start("encode", TOY_MODEL)
    await check(worker, 0)
    first = worker._peer._endpoint
    with monkeypatch.context() as patch:
        patch.setattr(type(worker._peer._endpoint.effects.carrier), "send", lambda *args: None)
        with pytest.raises(HttpError):
            await check(worker, 1)
    assert worker.transfer.arena.used_bytes == 0 and not worker.transfer.offering
    await check(worker, 2)
    assert worker._peer._endpoint is not first
    assert (canaries(worker, "ok"), canaries(worker, "failed")) == (2, 1)


async def test_encode_fails_where_its_encoder_does(start):
    worker = await start("encode", TOY_MODEL)

    def broken(items):
        raise RuntimeError("no tower")

    worker._batcher._encode = broken
    with pytest.raises(Unknown):
        await check(worker, 0)


@pytest.mark.parametrize("role", ["prefill", "decode", "agg"])
async def test_a_language_worker_runs_one_token_and_keeps_no_block(start, role):
    worker = await start(role, TOY_MODEL, "--publish-kv-events")
    told = []
    worker._engine.listen(told.append)
    steps, run = [], worker._engine._runner.run
    worker._engine._runner.run = lambda chunks: steps.append(len(chunks)) or run(chunks)
    for number in range(3):
        chunks = await check(worker, number)
        assert [len(chunk["token_ids"]) for chunk in chunks] == [1] and chunks[-1]["finish_reason"] == "length"
    assert steps == [1, 1, 1]
    assert told == [] and worker._engine.used_blocks() == 0
    assert worker._load.snapshot().kv_cache_hit_rate is None
    worker._engine.check()


async def test_one_that_hangs_is_not_joined_by_others(start):
    worker = await start("agg", TOY_MODEL)
    gate, generate = asyncio.Event(), worker._engine.generate

    async def wedged(request):
        await gate.wait()
        async for output in generate(request):
            yield output

    worker._engine.generate = wedged
    hanging = asyncio.ensure_future(check(worker, 0))
    await asyncio.sleep(0)
    for number in (1, 2):
        with pytest.raises(HttpError, match="has not come back"):
            await check(worker, number)
    gate.set()
    assert (await hanging)[-1]["finish_reason"]
    assert await check(worker, 3)
    assert (canaries(worker, "ok"), canaries(worker, "failed")) == (2, 2)


@pytest.mark.parametrize("needs", [False, True])
async def test_a_dead_peer_is_a_fault_where_the_operator_says_so(start, needs):
    worker = await start("prefill", TOY_MODEL, "--offer-ttl", "60", *(["--health-needs-peers"] if needs else []))
    config = TransferConfig(host="127.0.0.1", arena_bytes=1 << 20)
    peer = await open_transfer(config)
    slot = await peer.allocate(4096)
    item = SimpleNamespace(embedding=peer.offer(slot, digest="d", shape=(4, 128), dtype="float32"))
    await peer.close()
    async with AsyncExitStack() as stack:
        with pytest.raises(TransferError):
            await worker.embeddings(SimpleNamespace(items=[item]), worker._unseen.request(Context("r")), stack)
    if needs:
        with pytest.raises(HttpError, match=item.embedding.endpoint):
            await check(worker, 0)
        peer = await open_transfer(replace(config, port=int(item.embedding.endpoint.rpartition(":")[2])))
    assert await check(worker, 1)
    await peer.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TAKES))
async def test_every_family_has_an_item_to_check_with(start, tmp_path, name):
    path = write_model_dir(name, tmp_path / name)
    make_weights(path, zlib.crc32(name.encode()))
    worker = await start("encode", path, "--device", "cpu")
    assert (await check(worker, 0))[-1]["finish_reason"]
    moved = worker._peer._endpoint.effects.moved_bytes
    assert moved and moved % worker._family.embedding_width == 0
    assert worker.transfer.arena.used_bytes == 0
    agg = await start(
        "agg", path, "--override-engine-args", '{"max_seq_len": 128, "kv_cache_config": {"max_tokens": 1024}}'
    )
    assert (await check(agg, 0))[-1]["finish_reason"] == "length"
