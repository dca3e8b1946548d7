# SPDX-License-Identifier: Apache-2.0
"""The engine on the stand-in: answers, reuse, prefill and decode, faults."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
import torch

from dynamo_epd.contract.errors import ConfigError, InvalidMetadata, InvalidRequest, Unavailable
from dynamo_epd.contract.layout import PromptLayout
from dynamo_epd.demo.toy_data import COLOUR, QUESTIONS, Picture, random_picture
from dynamo_epd.engine.base import SamplingParams
from dynamo_epd.engine.trtllm.engine_args import load, problems
from dynamo_epd.engine.trtllm.inputs import MediaTokens, drop_handles, preprocessed_inputs
from dynamo_epd.engine.trtllm.keys import decide

from .conftest import running
from .prompts import answer, expected, family, make_request, stops

RED, BLUE = Picture("red", "white", "circle"), Picture("blue", "white", "circle")
ASK = "What colour is the background?"


@pytest.fixture(autouse=True)
def kv_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("DYNAMO_EPD_STANDIN_KV", str(tmp_path))
    return tmp_path


async def test_reuse_gives_the_answer_of_each_image(variant):
    async with running() as engine:
        for picture in (RED, BLUE, RED, BLUE):
            tokens, last = await answer(engine, make_request([picture], COLOUR.text))
            assert tokens == expected([picture], COLOUR.text) and last.finish_reason in ("stop", "length")
        assert last.cached_tokens == len(make_request([BLUE], COLOUR.text).layout) - 1
        tokens, last = await answer(engine, make_request([], "hi"))
        assert tokens == expected([], "hi")


async def test_random_prompts_together_equal_plain_transformers(variant):
    rng = np.random.default_rng(5)
    pool = [random_picture(rng, side) for side in (56, 84, 112) for _ in range(2)]
    asks = []
    for _ in range(12):
        pictures = [pool[int(rng.integers(len(pool)))] for _ in range(int(rng.integers(1, 4)))]
        asks.append((pictures, QUESTIONS[int(rng.integers(len(QUESTIONS)))].text))
    async with running(max_num_tokens=48) as engine:
        got = await asyncio.gather(*(answer(engine, make_request(p, q)) for p, q in asks))
    assert [tokens for tokens, _ in got] == [expected(p, q) for p, q in asks]
    assert any(last.cached_tokens for _, last in got)


async def test_keys_by_placeholder_give_another_images_answer(seven):
    async with running({"keys": "placeholder"}) as engine:
        first, _ = await answer(engine, make_request([RED], ASK))
        second, last = await answer(engine, make_request([BLUE], ASK))
    assert first == second == expected([RED], ASK) != expected([BLUE], ASK) and last.cached_tokens


async def test_callers_with_different_salts_share_nothing(variant):
    async with running() as engine:
        for salt, shared in (("a", False), ("b", False), ("a", True), (None, False)):
            tokens, last = await answer(engine, make_request([RED], ASK, cache_salt=salt))
            assert tokens == expected([RED], ASK) and bool(last.cached_tokens) == shared


async def test_a_request_that_must_not_share_does_not(variant):
    async with running() as engine:
        await answer(engine, make_request([RED], ASK))
        _, last = await answer(engine, make_request([RED], ASK, reuse=False))
        assert last.cached_tokens == 0


def split_in_two(request):
    """The same prompt with a text token in the middle of the image's tokens."""
    layout = request.layout
    at = int(np.flatnonzero(layout.slot_item == 0)[4])
    ids = np.insert(layout.token_ids, at, 5)
    item = np.insert(layout.member_item, at, -1)
    made = PromptLayout.from_flat(ids, item, np.insert(layout.framing, at, False), 1)
    digest = request.multimodal_input.digests[0].hex()
    positions = np.tile(np.arange(len(ids)), (3, 1))
    changes = {"position_ids": positions, "position_delta": 0, "routing_token_ids": None}
    return replace(request, layout=made, multimodal_input=made.multimodal_input([digest]), **changes)


async def test_an_item_of_two_runs(variant):
    from dynamo_epd.demo.toy_data import TOY_MODEL
    from dynamo_epd.engine.reference import create

    requests = [split_in_two(make_request([picture], ASK)) for picture in (RED, BLUE)]
    reference = create(model_dir=TOY_MODEL, overrides='{"max_seq_len": 512}')
    await reference.start()
    want = [(await answer(reference, replace(r, reuse=False)))[0] for r in requests]
    await reference.stop()

    chunked = variant != "four"
    async with running(enable_chunked_prefill=chunked) as engine:
        for request, tokens in zip(requests * 2, want * 2, strict=True):
            got, last = await answer(engine, replace(request, request_id=f"{request.request_id}-again"))
            assert got == tokens
        assert bool(last.cached_tokens) == (variant != "four")
    if variant == "four":
        async with running() as engine:
            with pytest.raises(InvalidRequest, match="enable_chunked_prefill: false"):
                await answer(engine, requests[0])


async def handed_over(prefill, decode, request, **changes):
    tokens, last = await answer(prefill, replace(request, prefill_only=True))
    assert len(tokens) == 1 and last.kv is None
    params = json.loads(json.dumps(last.params))
    forward = replace(request, embeddings=(), disaggregated_params=params, **changes)
    return params, await answer(decode, forward)


async def test_prefill_and_decode_on_two_engines(variant, kv_folder):
    async with running() as prefill, running() as decode:
        for picture in (RED, BLUE, RED, RED):
            request = make_request([picture], COLOUR.text)
            params, (tokens, last) = await handed_over(prefill, decode, request)
            assert tokens == expected([picture], COLOUR.text)
            assert last.cached_tokens == params.get("cached_tokens", 0)
        assert last.cached_tokens == len(request.layout) - 1
        _, (tokens, _) = await handed_over(prefill, decode, make_request([], "hi"))
        assert tokens == expected([], "hi")
        # What decode keeps is keyed as exactly as in prefill: an image is found again, another one is not.
        for picture in (RED, BLUE):
            tokens, last = await answer(decode, make_request([picture], COLOUR.text))
            assert tokens == expected([picture], COLOUR.text) and last.cached_tokens == len(request.layout) - 1
    assert list(kv_folder.iterdir()) == []


def shared() -> dict:
    """What is in shared memory, and nobody has opened yet."""
    from tensorrt_llm._torch.shared_tensor import _TENSORS

    return _TENSORS


@pytest.mark.parametrize("pictures", [[RED], []])
async def test_what_prefills_engine_shares_of_its_positions_is_let_go(seven, pictures):
    async with running() as prefill:
        _, last = await answer(prefill, make_request(pictures, ASK, prefill_only=True))
        assert last.params is not None and "handle" not in json.dumps(last.params)
    assert shared() == {}


async def test_positions_that_cannot_be_opened_do_not_fail_the_request(seven, caplog):
    async with running() as prefill:
        prefill._names = replace(prefill._names, SharedTensorContainer=Unreadable)
        _, last = await answer(prefill, make_request([RED], ASK, prefill_only=True))
    assert last.params is not None and "mrope_position_ids_handle" in caplog.text
    shared().clear()


class Unreadable:
    @staticmethod
    def from_dict(handle):
        raise RuntimeError("invalid device context")


async def test_log_probabilities_cross_from_prefill_to_decode(seven):
    request = make_request([RED], COLOUR.text, sampling=SamplingParams(max_tokens=4, logprobs=2))
    async with running() as prefill, running() as decode:
        _, alone = await answer(prefill, replace(request, sampling=SamplingParams(max_tokens=1, logprobs=2)))
        _, last = await answer(prefill, replace(request, request_id="p", prefill_only=True))
        forward = replace(request, embeddings=(), disaggregated_params=last.params)
        got = [lp async for output in decode.generate(forward) for lp in output.logprobs]
    assert len(got) == 4 and got[0] == last.logprobs[0]
    assert got[0].chosen == pytest.approx(alone.logprobs[0].chosen, abs=1e-4)
    assert len(got[0].top) == 2 and got[0].top[0][1] == got[0].chosen


async def test_an_answer_that_ends_with_its_first_token_needs_no_decode_engine(seven):
    first = expected([RED], COLOUR.text)[0]
    sampling = SamplingParams(max_tokens=8, stop_token_ids=frozenset({first, *stops()}))
    async with running() as prefill, running() as decode:
        request = make_request([RED], COLOUR.text, sampling=sampling)
        params, (tokens, last) = await handed_over(prefill, decode, request)
        assert tokens == [first] and last.finish_reason == "stop" and params["finished"] == "stop"


async def test_without_a_transceiver_nothing_is_handed_over(seven):
    async with running(cache_transceiver_config=None) as engine:
        with pytest.raises(Unavailable, match="cache_transceiver_config"):
            await answer(engine, make_request([RED], ASK, prefill_only=True))
        assert (await answer(engine, make_request([RED], ASK)))[0] == expected([RED], ASK)


async def test_engines_that_do_not_fit_each_other(seven):
    async with running() as engine:
        with pytest.raises(Unavailable, match="same dynamo-epd release and engine"):
            await answer(engine, make_request([RED], ASK, disaggregated_params={"version": 1, "num_tokens": 3}))
        with pytest.raises(Unavailable, match="prefill ran the reference engine"):
            await answer(engine, make_request([RED], ASK, remote_kv=object()))


REFUSED = {
    "no metadata": (dict(multimodal_input=None), InvalidMetadata),
    "no embeddings": (dict(embeddings=()), InvalidMetadata),
    "rows": (dict(embeddings=[torch.zeros(3, 64)]), InvalidMetadata),
    "positions": (dict(position_ids=None), InvalidMetadata),
    "adapter": (dict(lora_id=1), InvalidRequest),
    "sampling": (dict(sampling=SamplingParams(temperature=1.0, top_p=2.0)), InvalidRequest),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_refused_request_does_not_stall_the_next(seven, name):
    changes, error = REFUSED[name]
    async with running() as engine:
        bad = [answer(engine, make_request([RED], ASK, **changes)) for _ in range(3)]
        good = [answer(engine, make_request([picture], ASK)) for picture in (RED, BLUE)]
        *failed, red, blue = await asyncio.gather(*bad, *good, return_exceptions=True)
        assert [type(e) for e in failed] == [error] * 3
        assert red[0] == expected([RED], ASK) and blue[0] == expected([BLUE], ASK)


async def test_what_only_the_engine_can_refuse_is_typed_and_leaves_it_alive(seven):
    async with running() as engine:
        engine._mrope = False
        with pytest.raises(Unavailable, match=r"the engine failed on this request: RequestError: \[mrope\]"):
            await answer(engine, make_request([RED], ASK, position_ids=None))
        assert (await answer(engine, make_request([RED], ASK)))[0] == expected([RED], ASK)


async def test_what_was_shared_for_a_request_that_the_engine_refuses_is_taken_back(seven):
    async with running() as engine:
        real, refusal = engine._llm.generate_async, engine._names.RequestError("it is too long")

        def refuse(inputs, **_):
            assert len(shared()) >= 3
            raise refusal

        engine._llm.generate_async = refuse
        with pytest.raises(InvalidRequest, match="it is too long"):
            await answer(engine, make_request([RED], ASK))
        assert shared() == {}
        engine._llm.generate_async = real
        assert (await answer(engine, make_request([RED], ASK)))[0] == expected([RED], ASK)


async def test_a_prompt_that_does_not_fit_one_step_where_it_must(seven):
    async with running(enable_chunked_prefill=False, max_num_tokens=24) as engine:
        with pytest.raises(InvalidRequest, match="enable_chunked_prefill: true"):
            await answer(engine, make_request([RED], ASK))
        assert shared() == {}
        assert (await answer(engine, make_request([], "hi")))[0] == expected([], "hi")


async def test_in_the_engines_own_process_nothing_is_shared(seven, monkeypatch):
    monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    async with running() as engine:
        assert not engine.capabilities.to_handle
        assert (await answer(engine, make_request([RED], ASK)))[0] == expected([RED], ASK)
    async with running(tensor_parallel_size=2) as engine:
        assert engine.capabilities.to_handle


async def test_an_engine_that_does_not_tell_its_capacity(seven, caplog):
    from tensorrt_llm import LLM

    def silent(self):
        raise NotImplementedError("not with this executor")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLM, "get_kv_cache_capacity", silent)
        async with running() as engine:
            assert (engine._info.tokens_per_block, engine._info.total_blocks) == (8, 256)
    assert "not with this executor" in caplog.text


@pytest.mark.parametrize("both_ways", [True, False])
async def test_a_model_whose_items_attend_both_ways_is_told_so(seven, both_ways):
    async with running() as engine:
        engine._llm.input_processor.mm_bidirectional_blocks = both_ways
        tokens = MediaTokens.of(engine._llm, engine._info.vocab_size)
        request = make_request([RED], ASK)
        decision = decide(request, engine._policy)
        made = preprocessed_inputs(engine._names, engine._caps, request, decision, tokens)
        assert made.multimodal_params.multimodal_data.get("mm_bidirectional_blocks", False) is both_ways
        drop_handles(made)


def test_a_scheduler_that_computes_prompts_again():
    with pytest.raises(ConfigError, match="GUARANTEED_NO_EVICT"):
        load(None, json.dumps({"scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}))
    assert load(None, json.dumps({"scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"}})).values


@pytest.mark.parametrize(("value", "fits"), [(True, True), ("auto", True), ("bool", False), (1, False), ([], False)])
def test_the_choice_of_a_cache_manager(value, fits):
    assert bool(problems({"kv_cache_config": {"use_kv_cache_manager_v2": value}})) is not fits


async def test_a_prompt_that_is_too_long(seven):
    async with running(max_seq_len=32) as engine:
        with pytest.raises(InvalidRequest, match="max_seq_len"):
            await answer(engine, make_request([RED, BLUE, RED], ASK))


async def test_an_abandoned_request_is_aborted_and_frees_its_blocks(variant):
    async with running() as engine:
        request = make_request([RED], ASK, sampling=SamplingParams(max_tokens=200))
        async with aclosing(engine.generate(request)) as outputs:
            async for _ in outputs:
                break
        inner = engine._llm._engine
        while inner._seqs:
            await asyncio.sleep(0.01)
        tokens, _ = await answer(engine, make_request([BLUE], ASK))
        assert tokens == expected([BLUE], ASK)


class Result:
    """A generation result that gives its first output when told to."""

    def __init__(self):
        self.go, self.aborted = asyncio.Event(), asyncio.Event()

    def __aiter__(self):
        return self

    async def __anext__(self):
        await self.go.wait()
        return self

    def abort(self):
        self.aborted.set()


async def test_an_abandoned_decode_waits_for_its_kv_before_it_is_aborted(seven):
    async with running() as engine:
        _, last = await answer(engine, make_request([RED], ASK, prefill_only=True))
        result = Result()
        engine._llm.generate_async = lambda *_, **__: result
        forward = make_request([RED], ASK, embeddings=(), disaggregated_params=last.params)
        task = asyncio.ensure_future(answer(engine, forward))
        while not result.go._waiters:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not result.aborted.is_set()
        result.go.set()
        await asyncio.wait_for(result.aborted.wait(), 5)


async def test_an_engine_that_dies_mid_request(seven):
    async with running() as engine:
        request = make_request([RED], ASK, sampling=SamplingParams(max_tokens=200))

        async def broken(*_):
            raise MemoryError("CUDA error: an illegal memory access was encountered")

        outputs = engine.generate(request)
        await anext(outputs)
        engine._llm._engine._execute = broken
        with pytest.raises(Unavailable, match="illegal memory access"):
            async for _ in outputs:
                pass
        with pytest.raises(Unavailable, match="not running: MemoryError"):
            await answer(engine, make_request([BLUE], ASK))


async def test_stop_ends_everything_and_may_be_called_twice(seven):
    async with running() as engine:
        await answer(engine, make_request([RED], ASK))
        await engine.stop()
        await engine.stop()
        with pytest.raises(Unavailable, match="not running"):
            await answer(engine, make_request([RED], ASK))


async def test_what_the_engine_tells_of_itself(variant):
    async with running() as engine:
        info = engine._info
        assert (info.tokens_per_block, info.total_blocks, info.max_seq_len) == (8, 256, 512)
        assert (info.max_batch_size, info.max_num_tokens, info.block_reuse) == (8, 96, True)
        assert info.vocab_size == family().vocab_size and info.hidden_size == family().hidden_size
