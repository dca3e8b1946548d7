# SPDX-License-Identifier: Apache-2.0
"""Chooses the next token of each sequence from its logits.

What is drawn depends on the request alone (its seed and the number of the token), never on the batch around it, so
that a step can be repeated and gives the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...contract.errors import InvalidRequest
from ..base import Logprob, SamplingParams

_SEED_MASK = (1 << 64) - 1


class Draw(NamedTuple):
    """One token to choose: the request's parameters, its seed, and how many tokens it has generated before."""

    params: SamplingParams
    seed: int
    number: int


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise ``InvalidRequest`` for sampling parameters outside their range."""
    if params.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {params.max_tokens}, must be at least 1")
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise InvalidRequest(f"temperature is {params.temperature}, must be 0 or more")
    if not 0 < params.top_p <= 1:
        raise InvalidRequest(f"top_p is {params.top_p}, must be above 0 and at most 1")
    if params.top_k < 0:
        raise InvalidRequest(f"top_k is {params.top_k}, must be 0 (all) or more")
    if params.min_tokens < 0:
        raise InvalidRequest(f"min_tokens is {params.min_tokens}, must be 0 or more")
    if params.logprobs is not None and not 0 <= params.logprobs <= vocab_size:
        raise InvalidRequest(f"logprobs is {params.logprobs}, must be between 0 and {vocab_size}")
    if len(params.stop_token_ids) >= vocab_size and params.min_tokens:
        raise InvalidRequest("min_tokens cannot hold when every token is a stop token")


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[Logprob | None]]:
    """The next token for each row of ``logits`` (``[rows, vocab]``), and its log probability where asked for.

    Log probabilities are those of the model, before temperature, top_k and top_p.
    """
    greedy = logits.argmax(-1).tolist()
    if all(_plain(draw) for draw in draws):
        return greedy, [None] * len(draws)
    tokens = [
        t if _plain(d) else _choose(logits[i].float(), d) for i, (t, d) in enumerate(zip(greedy, draws, strict=True))
    ]
    logprobs = [
        None if d.params.logprobs is None else _logprob(logits[i].float(), t, d.params.logprobs)
        for i, (t, d) in enumerate(zip(tokens, draws, strict=True))
    ]
    return tokens, logprobs


def _plain(draw: Draw) -> bool:
    """Whether the most likely token is the answer and nothing else is asked for."""
    p = draw.params
    return p.temperature == 0 and p.logprobs is None and draw.number >= p.min_tokens


def _choose(logits: torch.Tensor, draw: Draw) -> int:
    params = draw.params
    if draw.number < params.min_tokens and params.stop_token_ids:
        stop = [t for t in params.stop_token_ids if 0 <= t < len(logits)]
        logits = logits.index_fill(0, torch.tensor(stop, device=logits.device), -math.inf)
    if params.temperature == 0:
        return int(logits.argmax())
    # Stable, so that equal logits keep one order on every device and at every batch size.
    values, ids = torch.sort(logits.double().cpu(), descending=True, stable=True)
    values = (values - values[0]) / params.temperature
    if params.top_k:
        values, ids = values[: params.top_k], ids[: params.top_k]
    mass = torch.softmax(values, 0).cumsum(0).numpy()
    kept = int(np.searchsorted(mass, params.top_p * mass[-1])) + 1 if params.top_p < 1 else len(mass)
    mass = mass[:kept]
    uniform = np.random.Generator(np.random.Philox(key=draw.seed & _SEED_MASK, counter=draw.number)).random()
    return int(ids[min(int(np.searchsorted(mass, uniform * mass[-1], side="right")), len(mass) - 1)])


def _logprob(logits: torch.Tensor, token: int, alternatives: int) -> Logprob:
    logp = torch.log_softmax(logits, 0)
    if not alternatives:
        return Logprob(float(logp[token]))
    values, ids = logp.topk(alternatives)
    return Logprob(float(logp[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
