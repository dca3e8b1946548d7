# SPDX-License-Identifier: Apache-2.0
"""Decode speed of plain transformers' ``generate`` and of the reference engine, in turns in one process."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText, StoppingCriteria, StoppingCriteriaList

from ..contract.layout import PromptLayout
from ..demo.toy_data import TOY_MODEL
from ..engine.base import EngineRequest, SamplingParams
from ..engine.reference import create

PROMPT_TOKENS = 256
BATCHES = (1, 8)
PLAIN_IDS = 256
"""Ids below this are bytes, not special tokens."""


class _Clock(StoppingCriteria):
    """Notes when each step of ``generate`` ends; stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def decode_speeds(tokens: int, repeat: int, advance: Callable[[], object]) -> dict[str, dict[str, float]]:
    """Tokens per second after the first one of each answer, all requests of a batch together.

    Args:
        tokens: length of the answers, which nothing ends earlier.
        repeat: rounds, in each of which every way is measured once; medians count.

    Returns:
        ``{"transformers": {"1": ..., "8": ...}, "reference": {...}}``.
    """
    return asyncio.run(_decode_speeds(tokens, repeat, advance))


async def _decode_speeds(tokens: int, repeat: int, advance: Callable[[], object]) -> dict[str, dict[str, float]]:
    rng = np.random.default_rng(2)
    prompts = {batch: rng.integers(0, PLAIN_IDS, (batch, PROMPT_TOKENS)) for batch in BATCHES}
    model = AutoModelForImageTextToText.from_pretrained(TOY_MODEL, local_files_only=True).eval()
    found: dict[str, dict[str, list[float]]] = {"transformers": {}, "reference": {}}
    budget = {"max_tokens": 1 << 15, "enable_block_reuse": False}
    engine = create(model_dir=TOY_MODEL, overrides=json.dumps({"kv_cache_config": budget}))
    await engine.start()
    try:
        for _ in range(repeat + 1):  # the first round warms up
            for batch in BATCHES:
                # The engine is idle meanwhile, so nothing minds that the event loop stands still.
                plain = _transformers(model, torch.from_numpy(prompts[batch]), tokens)
                found["transformers"].setdefault(str(batch), []).append(plain)
                own = await _reference(engine, prompts[batch], tokens)
                found["reference"].setdefault(str(batch), []).append(own)
            advance()
    finally:
        await engine.stop()
    return {
        way: {batch: round(statistics.median(speeds[1:]), 1) for batch, speeds in by_batch.items()}
        for way, by_batch in found.items()
    }


@torch.inference_mode()
def _transformers(model: Any, prompts: torch.Tensor, tokens: int) -> float:
    clock = _Clock()
    model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    return len(prompts) * (len(clock.times) - 1) / (clock.times[-1] - clock.times[0])


async def _reference(engine: Any, prompts: np.ndarray, tokens: int) -> float:
    sampling = SamplingParams(max_tokens=tokens, min_tokens=tokens)

    async def times(index: int, prompt: np.ndarray) -> list[float]:
        request = EngineRequest(str(index), PromptLayout.text(prompt), sampling)
        return [time.perf_counter() async for _ in engine.generate(request)]

    all_times = await asyncio.gather(*(times(i, prompt) for i, prompt in enumerate(prompts)))
    start, end = max(t[0] for t in all_times), min(t[-1] for t in all_times)
    decoded = sum(start < moment <= end for answer in all_times for moment in answer)
    return decoded / (end - start)
