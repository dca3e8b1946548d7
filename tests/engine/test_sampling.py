# SPDX-License-Identifier: Apache-2.0
"""Sampling options mean what they say, and what is drawn does not depend on the batch."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from dynamo_epd.engine.base import SamplingParams
from dynamo_epd.engine.reference.sampler import Draw, sample

from .conftest import MakeEngine, Toy, ask, prefill

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -20.0])


def draws(params: SamplingParams, count: int = 1500) -> Counter[int]:
    tokens, _ = sample(LOGITS.expand(count, -1), [Draw(params, 5, i) for i in range(count)])
    return Counter(tokens)


def expected(logits: torch.Tensor, count: int = 1500) -> list[float]:
    return (torch.softmax(logits, 0) * count).tolist()


def close(seen: Counter[int], want: list[float]) -> bool:
    return all(abs(seen[i] - w) <= 4 * math.sqrt(w) for i, w in enumerate(want))


def test_temperature() -> None:
    assert close(draws(SamplingParams(temperature=1.0)), expected(LOGITS))
    assert close(draws(SamplingParams(temperature=2.0)), expected(LOGITS / 2))
    assert draws(SamplingParams(temperature=0.0)) == Counter({0: 1500})
    assert draws(SamplingParams(temperature=1e-300)) == Counter({0: 1500})


def test_top_k_and_top_p() -> None:
    assert set(draws(SamplingParams(temperature=1.0, top_k=2))) == {0, 1}
    assert close(draws(SamplingParams(temperature=1.0, top_k=2)), expected(LOGITS[:2]))
    # 0.644 and 0.237 of the mass: the token that crosses top_p belongs to it.
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.6))) == {0}
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.65))) == {0, 1}
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.9, top_k=3))) == {0, 1}


def test_seeds() -> None:
    params = SamplingParams(temperature=1.0)

    def tokens(seed: int) -> list[int]:
        return sample(LOGITS.expand(64, -1), [Draw(params, seed, i) for i in range(64)])[0]

    assert tokens(1) == tokens(1) != tokens(2)
    assert tokens(-1) == tokens(-1)
    # A row's draw is its own, whatever stands around it.
    alone = [sample(LOGITS[None], [Draw(params, 1, i)])[0][0] for i in range(64)]
    assert alone == tokens(1)


def test_min_tokens_keeps_stop_tokens_away() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=frozenset({0, 1, 999}))
    tokens, _ = sample(LOGITS.expand(4, -1), [Draw(params, 0, i) for i in range(4)])
    assert tokens == [2, 2, 0, 0]
    tokens, _ = sample(LOGITS[None], [Draw(replace(params, temperature=1.0), 0, 0)])
    assert tokens[0] not in (0, 1)


def test_logprobs_are_the_models() -> None:
    tokens, logprobs = sample(LOGITS[None], [Draw(SamplingParams(temperature=5.0, logprobs=2), 3, 0)])
    want = torch.log_softmax(LOGITS, 0)
    assert logprobs[0] is not None
    assert logprobs[0].chosen == pytest.approx(float(want[tokens[0]]))
    assert [t for t, _ in logprobs[0].top] == [0, 1]
    assert [p for _, p in logprobs[0].top] == pytest.approx(want[:2].tolist())
    _, (bare,) = sample(LOGITS[None], [Draw(SamplingParams(logprobs=0), 3, 0)])
    assert bare is not None and bare.top == () and bare.chosen == pytest.approx(float(want[0]))


async def test_a_batch_draws_what_each_request_draws_alone(toy: Toy, make_engine: MakeEngine) -> None:
    rng = np.random.default_rng(0)
    engine = await make_engine(max_num_tokens=32, enable_chunked_prefill=True)
    prompts = [toy.prompt([rng.integers(1, 256, 12).tolist()]) for _ in range(6)]
    params = [
        SamplingParams(temperature=t, top_p=0.9, top_k=20, seed=i, max_tokens=8, logprobs=1)
        for i, t in enumerate((0.0, 0.5, 1.0, 1.5, 1.0, 0.7))
    ]
    alone = [await ask(engine, p.request("a", s)) for p, s in zip(prompts, params, strict=True)]
    batch = await asyncio.gather(
        *(ask(engine, p.request(str(i), s)) for i, (p, s) in enumerate(zip(prompts, params, strict=True)))
    )
    assert [a.tokens for a in batch] == [a.tokens for a in alone]
    for a, b in zip(alone, batch, strict=True):
        assert [x.chosen for x in a.logprobs] == pytest.approx([x.chosen for x in b.logprobs], abs=1e-4)
    # And a decode engine goes on where prefill stopped.
    source, target = await make_engine(), await make_engine()
    remote, _, _ = await prefill(source, prompts[2].request("p", params[2]))
    answer = await ask(target, prompts[2].request("d", params[2], remote_kv=remote))
    assert answer.tokens == alone[2].tokens
    assert [x.chosen for x in answer.logprobs] == pytest.approx([x.chosen for x in alone[2].logprobs], abs=1e-4)


async def test_unseeded_requests_differ(toy: Toy, make_engine: MakeEngine) -> None:
    engine = await make_engine()
    prompt = toy.prompt([[5, 6, 7]])
    params = SamplingParams(temperature=5.0, max_tokens=12)
    answers = [await ask(engine, prompt.request("x", params)) for _ in range(3)]
    assert len({tuple(a.tokens) for a in answers}) == 3


async def test_where_answers_end(toy: Toy, make_engine: MakeEngine) -> None:
    engine = await make_engine(max_seq_len=32)
    prompt = toy.prompt([list(range(1, 21))])
    free = await ask(engine, prompt.request("free", SamplingParams(max_tokens=6)))
    assert (len(free.tokens), free.last.finish_reason) == (6, "length")
    assert [o.finish_reason for o in free.outputs[:-1]] == [None] * 5
    stop = frozenset({free.tokens[2]})
    first = free.tokens.index(free.tokens[2])
    ended = await ask(engine, prompt.request("stop", SamplingParams(max_tokens=6, stop_token_ids=stop)))
    assert (ended.tokens, ended.last.finish_reason) == (free.tokens[: first + 1], "stop")
    later = SamplingParams(max_tokens=6, stop_token_ids=stop, min_tokens=5)
    longer = await ask(engine, prompt.request("min", later))
    assert len(longer.tokens) >= 6 or longer.tokens[-1] in stop
    assert not stop & set(longer.tokens[:5])
    # The sequence may not grow beyond max_seq_len.
    full = await ask(engine, prompt.request("full", SamplingParams(max_tokens=100)))
    assert (len(full.tokens), full.last.finish_reason) == (12, "length")
