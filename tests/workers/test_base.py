# SPDX-License-Identifier: Apache-2.0
"""The life of a request and of a worker, without a frontend."""

import asyncio
from types import SimpleNamespace

import pytest
from dynamo._core import Context
from dynamo.llm.exceptions import InvalidArgument

from dynamo_epd.contract.errors import InvalidRequest
from dynamo_epd.workers.base import EpdWorker


class FakeWorker(EpdWorker):
    """Yields ``chunks``, waits for ever where one is None, raises where one is an exception."""

    def __init__(self, *chunks):
        super().__init__(SimpleNamespace(transfer=SimpleNamespace(offer_ttl=5.0)))
        self.chunks, self.closed = chunks, asyncio.Event()

    async def open(self):
        raise AssertionError

    async def shut(self):
        self.was_shut = True

    async def probe(self, context, seen):
        async for chunk in self.serve({}, context, seen):
            yield chunk

    async def serve(self, request, context, seen):
        try:
            for chunk in self.chunks:
                if chunk is None:
                    await asyncio.Event().wait()
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
        finally:
            self.closed.set()


def chunk(token, finish=None):
    return {"token_ids": [token], "index": 0, **({"finish_reason": finish} if finish else {})}


def counted(worker):
    return {
        sample.labels["outcome"]: sample.value
        for metric in worker.observer.registry.collect()
        if metric.name == "dynamo_component_mm_requests"
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.value
    }


async def test_chunks_pass_and_the_request_is_closed():
    worker = FakeWorker(chunk(1), chunk(2, "stop"))
    got = [c async for c in worker.generate({"token_ids": [1]}, Context("r"))]
    assert [c["token_ids"] for c in got] == [[1], [2]]
    assert worker.closed.is_set() and not worker._steps
    assert counted(worker) == {"ok": 1.0}


async def test_an_abort_interrupts_a_request_wherever_it_waits():
    worker, context = FakeWorker(chunk(1), None), Context("r")
    chunks = worker.generate({"token_ids": [1]}, context)
    assert (await anext(chunks))["token_ids"] == [1]
    waiting = asyncio.ensure_future(anext(chunks))
    await asyncio.sleep(0)
    assert not await worker.is_quiescent()
    context.stop_generating()
    await worker.abort(context)
    assert (await asyncio.wait_for(waiting, 5))["finish_reason"] == "cancelled"
    with pytest.raises(StopAsyncIteration):
        await anext(chunks)
    assert worker.closed.is_set() and await worker.is_quiescent()
    assert counted(worker) == {"cancelled": 1.0}


async def test_a_request_whose_client_is_gone_already_does_nothing():
    worker, context = FakeWorker(chunk(1, "stop")), Context("r")
    context.stop_generating()
    got = [c async for c in worker.generate({"token_ids": [1]}, context)]
    assert [c["finish_reason"] for c in got] == ["cancelled"]


async def test_errors_become_statuses_and_close_the_request():
    worker = FakeWorker(chunk(1), InvalidRequest("bad", item="image 1"))
    chunks = worker.generate({"token_ids": [1]}, Context("r"))
    await anext(chunks)
    with pytest.raises(InvalidArgument, match="image 1: bad"):
        await anext(chunks)
    assert worker.closed.is_set() and counted(worker) == {"invalid": 1.0}


async def test_a_worker_that_ends_lets_its_requests_finish(monkeypatch):
    monkeypatch.setenv("DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT", "10.2")
    finishing, stuck = FakeWorker(chunk(1), chunk(2, "stop")), FakeWorker(chunk(1), None)
    for worker, patient in ((finishing, True), (stuck, False)):
        chunks = worker.generate({"token_ids": [1]}, Context("r"))
        assert (await anext(chunks))["token_ids"] == [1]
        ending = asyncio.ensure_future(worker.cleanup())
        await asyncio.sleep(0)
        if patient:
            assert not hasattr(worker, "was_shut")
            assert [c["token_ids"] async for c in chunks] == [[2]]
        else:
            with pytest.raises(asyncio.CancelledError):
                await anext(chunks)
        await asyncio.wait_for(ending, 5)
        assert worker.was_shut
    assert (counted(finishing), counted(stuck)) == ({"ok": 1.0}, {"cancelled": 1.0})


async def test_a_worker_that_ends_keeps_its_offers_until_they_are_taken():
    worker, log = FakeWorker(), []

    class Offering:
        offering = True

        async def close(self):
            log.append("closed")

    worker.transfer = transfer = Offering()
    ending = asyncio.ensure_future(worker.cleanup())
    await asyncio.sleep(0.1)
    assert not log
    transfer.offering = False
    await asyncio.wait_for(ending, 5)
    assert log == ["closed"] and worker.was_shut
    await worker.cleanup()
    assert log == ["closed"]
