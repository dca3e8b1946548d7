# SPDX-License-Identifier: Apache-2.0
"""Chats of the toy model as engine requests, and what plain transformers answers to them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from dynamo_epd import models
from dynamo_epd.contract.digest import item_digest
from dynamo_epd.contract.handoff import ItemHandoff, TensorRef
from dynamo_epd.contract.layout import PromptLayout, expand
from dynamo_epd.demo.plain import PlainTransformers
from dynamo_epd.demo.toy_data import TOY_MODEL
from dynamo_epd.engine.base import EngineOutput, EngineRequest, SamplingParams
from dynamo_epd.models.base import Media
from dynamo_epd.serve.client import user
from dynamo_epd.workers.prompt import routing_ids

_NUMBERS = itertools.count()
MAX_TOKENS = 8


@cache
def family() -> Any:
    return models.load(TOY_MODEL, tower=True)


@cache
def plain() -> PlainTransformers:
    return PlainTransformers(TOY_MODEL)


def _chat(pictures, text: str) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": picture.draw()} for picture in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def stops() -> frozenset[int]:
    return frozenset({family().tokenizer.eos_token_id})


def expected(pictures, text: str, max_tokens: int = MAX_TOKENS) -> list[int]:
    return plain().answer(_chat(pictures, text), max_tokens)[1]


def make_request(pictures, text: str, *, mm_hashes=None, **changes: Any) -> EngineRequest:
    """The request that the workers would make of a chat with one turn."""
    f = family()
    ids = f.tokenizer.apply_chat_template(
        _chat(pictures, text), add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    sampling = SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=stops())
    items: list[ItemHandoff] = []
    embeddings: list[torch.Tensor] = []
    layout, mm = PromptLayout.text(ids), None
    if pictures:
        places = f.placeholders(ids, {"image": len(pictures)})
        prepared = [f.prepare(Media("image", picture.draw()), {}) for picture in pictures]
        layout = expand(ids, f.replacements(ids, places, [p.expansion for p in prepared]), len(pictures))
        embeddings = f.encode(prepared)
        for picture, p, e in zip(pictures, prepared, embeddings, strict=True):
            digest = item_digest(modality="image", payload=picture.draw(), payload_kind="decoded", model="toy")
            ref = TensorRef("h:1", "a", 0, 0, digest, tuple(e.shape), str(e.dtype).removeprefix("torch."))
            items.append(ItemHandoff("image", digest, p.rows, ref, positions=dict(p.positions)))
        mm = layout.multimodal_input([item.digest for item in items])
    position_ids, delta = f.positions(layout, items)
    request = EngineRequest(
        request_id=f"r{next(_NUMBERS)}",
        layout=layout,
        sampling=sampling,
        multimodal_input=mm,
        embeddings=embeddings,
        position_ids=position_ids,
        position_delta=delta,
        routing_token_ids=routing_ids(layout, items, mm_hashes),
        modalities=tuple(item.modality for item in items),
    )
    return replace(request, **changes)


async def answer(engine: Any, request: EngineRequest) -> tuple[list[int], EngineOutput]:
    """All tokens, and the last output."""
    tokens: list[int] = []
    last = None
    async for output in engine.generate(request):
        tokens += output.token_ids
        last = output
    assert last is not None and last.finish_reason
    return tokens, last


__all__ = ["answer", "expected", "make_request", "plain", "stops", "user"]
