# SPDX-License-Identifier: Apache-2.0
"""Runs a model whose layers keep more than KV (Mamba layers beside attention): each sequence with a state of its own.

Such a state cannot be cut at a block, so nothing is shared or handed on, and sequences are not packed into one pass.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache

from .batch import embed, positions
from .model import LanguageModel
from .runner import Result
from .sampler import sample
from .scheduler import Chunk
from .sequence import Seq

logger = logging.getLogger(__name__)


class RecurrentRunner:
    """The state lives in transformers' cache and is forgotten with its sequence."""

    def __init__(self, model: LanguageModel):
        self._model = model
        self._states: WeakKeyDictionary[Seq, DynamicCache] = WeakKeyDictionary()
        parameters = inspect.signature(type(model.decoder).forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> list[Result]:
        """One step, as ``PagedRunner.run``; what fails fails alone."""
        results: list[Result] = []
        for chunk in chunks:
            try:
                results.append(self._run(chunk))
            except Exception as error:
                logger.exception("request %s failed", chunk.seq.request.request_id)
                results.append(error)
        return results

    def _run(self, chunk: Chunk) -> Result:
        model = self._model
        state = self._states.get(chunk.seq) or DynamicCache(config=model.config)
        self._states[chunk.seq] = state
        embeds, extra = embed(model, [chunk])
        index = torch.arange(chunk.start, chunk.end, device=model.device)
        out = model.decoder(
            inputs_embeds=embeds[None],
            position_ids=positions(model, [chunk], index),
            use_cache=True,
            **{self._cache_argument: state},
            **extra,
        )
        if not chunk.samples:
            return None
        tokens, logprobs = sample(model.logits(out.last_hidden_state[0, -1:]), [chunk.seq.draw])
        return tokens[0], logprobs[0]
