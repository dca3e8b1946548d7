# SPDX-License-Identifier: Apache-2.0
"""What the engine refuses, and what it says then."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from dynamo_epd.contract.errors import ConfigError, InvalidRequest
from dynamo_epd.contract.layout import PromptLayout
from dynamo_epd.demo.toy_data import TOY_MODEL
from dynamo_epd.engine import create_engine
from dynamo_epd.engine.base import EngineRequest, RemoteKV

from .conftest import FOUR, ONE, Item, MakeEngine, Toy, ask, text


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
