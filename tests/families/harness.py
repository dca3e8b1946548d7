# SPDX-License-Identifier: Apache-2.0
"""Real encode, prefill, decode and agg workers of one model in this process, with NIXL between their arenas.

No frontend: ``Stack`` sends what a 1.6.1 frontend sends to each role, in the order in which it does, and everything
that goes from one worker to the next passes through JSON as it does on Dynamo's request plane.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dynamo._core import Context

from dynamo_epd.contract.handoff import Handoff, parse_handoff
from dynamo_epd.contract.layout import PromptLayout, expand
from dynamo_epd.models import Media
from dynamo_epd.workers.args import parse
from dynamo_epd.workers.main import create_worker
from dynamo_epd.workers.prompt import Prompt, build_prompt, usable_handoff

from .media_files import url_of

T = TypeVar("T")

TOP = 20
"""Alternatives asked for at every position: the most that a request may ask for."""

_KEYS = {"image": "image_url", "video": "video_url", "audio": "audio_url"}
_numbers = itertools.count()


@dataclass(frozen=True)
class Source:
    """A media item that is given by a URL; ``Media`` become one by ``url_of``."""

    modality: str
    url: str
    uuid: str | None = None


Item = Media | Source


@dataclass
class Answer:
    """What the workers said to one request.

    Attributes:
        tokens: the answer.
        top: per token its most likely alternatives, token id -> log probability.
        cached: prompt tokens from the cache, as usage has it.
        prompt_tokens: likewise.
        handoff: encode's, None for text.
        layout: the expanded prompt.
    """

    tokens: list[int] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    cached: int = -1
    prompt_tokens: int = -1
    handoff: Handoff | None = None
    layout: PromptLayout | None = None

    @property
    def digests(self) -> list[str]:
        return [item.digest for item in self.handoff.items] if self.handoff else []


class Stack:
    """The workers of one model, started; ``close`` stops them.

    ``prefill``, ``decode`` and ``agg`` reuse blocks, ``forgetful`` is an agg worker that does not. A model with a
    recurrent state has agg workers only.

    Args:
        model_dir: the checkpoint.
        pair: whether prefill and decode can be started.
        engine: engine keys over the defaults here.
    """

    def __init__(self, model_dir: Path, *, pair: bool = True, engine: Mapping[str, Any] | None = None):
        self.model_dir = model_dir
        self._engine = {"max_batch_size": 16, **(engine or {})}
        self._loop = asyncio.new_event_loop()
        self._workers: list[Any] = []
        try:
            self.encode = self.start("encode", "--multimodal-embedding-cache-capacity-gb", "0.004")
            self.forgetful = self.start("agg", *self.engine_args(enable_block_reuse=False))
            self.agg = self.start("agg", *self.engine_args())
            if pair:
                self.prefill = self.start("prefill", *self.engine_args())
                self.decode = self.start("decode", *self.engine_args())
        except BaseException:
            self.close()
            raise
        self.pair = pair
        self.family = self.encode._family

    def engine_args(self, **kv: Any) -> tuple[str, ...]:
        """Flags of a worker that runs the language model; ``kv`` are keys of ``kv_cache_config``."""
        nested = {"tokens_per_block": 8, "max_tokens": 8192, **kv}
        overrides = {**self._engine, "kv_cache_config": nested}
        return "--engine", "reference", "--override-engine-args", json.dumps(overrides)

    def start(self, role: str, *argv: str) -> Any:
        """One more worker, which ``close`` stops as well."""
        transfer = ("--transfer-host", "127.0.0.1", "--transfer-mode", "read", "--transfer-arena-bytes", str(16 << 20))
        args, _ = parse(
            [
                *("--disaggregation-mode", role, "--model", str(self.model_dir), "--device", "cpu"),
                *(*transfer, "--verify-transfers", "--transfer-timeout", "20"),
                *argv,
            ]
        )
        worker = create_worker(args)
        self._workers.append(worker)
        self.run(worker.start(1))
        return worker

    def run(self, work: Coroutine[Any, Any, T] | Awaitable[T]) -> T:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        for worker in self._workers:
            self.run(worker.cleanup())
        self._loop.close()

    # Requests

    def request(
        self,
        text: str,
        items: Sequence[Item] = (),
        *,
        kwargs: Mapping[str, Any] | None = None,
        uuids: Sequence[str | None] = (),
        salt: str | None = None,
        max_tokens: int = 6,
    ) -> dict[str, Any]:
        """A chat request as the frontend sends it, its fields without a value left out or null as there.

        Args:
            text: the prompt as the chat template wrote it, with one placeholder per item.
            items: in prompt order.
            uuids: likewise; empty for none.
        """
        tokenizer = self.family.tokenizer
        data: dict[str, list[dict[str, str]]] = {}
        names: dict[str, list[str | None]] = {}
        for item, uuid in itertools.zip_longest(items, uuids):
            key = _KEYS[item.modality]
            data.setdefault(key, []).append({"Url": item.url if isinstance(item, Source) else url_of(item)})
            names.setdefault(key, []).append(uuid)
        sampling = dict.fromkeys(("n", "best_of", "temperature", "top_p", "top_k", "min_p", "seed", "guided_decoding"))
        request: dict[str, Any] = {
            "model": self.model_dir.name,
            "token_ids": tokenizer(text, add_special_tokens=False)["input_ids"],
            "stop_conditions": {
                "max_tokens": max_tokens,
                "stop": None,
                "stop_token_ids_hidden": [],
                "ignore_eos": None,
            },
            "sampling_options": {**sampling, "temperature": 0.0},
            "output_options": {"logprobs": TOP, "prompt_logprobs": None},
            "eos_token_ids": [],
            "annotations": [],
            "extra_args": {"formatted_prompt": text},
        }
        optional = {
            "multi_modal_data": data,
            "multi_modal_uuids": names if any(uuids) else None,
            "mm_processor_kwargs": dict(kwargs or {}),
            "routing": {"cache_salt": salt} if salt else None,
        }
        return request | {name: value for name, value in optional.items() if value}

    def ask(self, *args: Any, on: Any = None, **options: Any) -> Answer:
        """The answer to ``request(*args, **options)``, through prefill and decode, or ``on`` a worker."""
        return self.ask_all([self.request(*args, **options)], on=on)[0]

    def ask_all(self, requests: Sequence[dict[str, Any]], *, on: Any = None) -> list[Answer]:
        """Answers to requests that are in flight together."""

        async def together() -> list[Answer]:
            return list(await asyncio.gather(*(self._serve(request, on) for request in requests)))

        return self.run(together())

    def prompt(self, request: dict[str, Any]) -> Prompt:
        """The request as a worker behind encode understands it; nobody fetches its embeddings."""
        (chunk,) = self.run(_generate(self.encode, request))
        request = request | {"encoder_result": chunk["encoder_result"]}
        handoff = usable_handoff(request, self.family)
        for item in handoff.items if handoff else ():
            self.encode.transfer.withdraw(item.embedding)
        return build_prompt(request, handoff, self.family)

    async def _serve(self, request: dict[str, Any], on: Any) -> Answer:
        answer = Answer(layout=PromptLayout.text(request["token_ids"]))
        if request.get("multi_modal_data"):
            (chunk,) = await _generate(self.encode, request)
            request = request | {"encoder_result": chunk["encoder_result"]}
            answer.handoff = parse_handoff(chunk["encoder_result"])
            if answer.handoff.error is None:
                answer.layout = expand(request["token_ids"], answer.handoff.replacements, len(answer.handoff.items))
        if on is not None or not self.pair:
            return _read(answer, await _generate(on or self.agg, request))
        chunks = await _generate(self.prefill, request)
        first = _read(Answer(), chunks)
        result = {"disaggregated_params": chunks[-1]["disaggregated_params"]}
        result["prompt_tokens_details"] = chunks[-1]["completion_usage"]["prompt_tokens_details"]
        _read(answer, await _generate(self.decode, request | {"prefill_result": result}))
        if (first.tokens, first.top, first.cached) != (answer.tokens[:1], answer.top[:1], answer.cached):
            raise RuntimeError("decode begins with another token than prefill found")
        return answer

    def check(self) -> None:
        """Raise ``RuntimeError`` where bookkeeping contradicts itself, or an offer or memory is left over."""
        self.run(self._settled())
        for worker in self._workers:
            if hasattr(worker, "_engine"):
                worker._engine.check()
            endpoint = worker.transfer
            endpoint.store.clear()
            if endpoint.offers.busy or endpoint.arena.used_bytes:
                raise RuntimeError(f"{worker.args.role}: {endpoint.arena.used_bytes} bytes are still in use")

    async def _settled(self, patience: float = 10.0) -> None:
        """Wait until every offer has been answered: receivers say so after they have served the request."""
        end = asyncio.get_running_loop().time() + patience
        while any(worker.transfer.offers.busy for worker in self._workers):
            if asyncio.get_running_loop().time() > end:
                return
            await asyncio.sleep(0.01)


@contextmanager
def reuse_at_most(worker: Any, tokens: int) -> Iterator[None]:
    """Let the worker's cache find no more than the first ``tokens`` of a prompt, as if the rest had been evicted."""
    cache = worker._engine.cache
    match = cache.match
    cache.match = lambda root, keys, blocks, limit: match(root, keys, blocks, min(limit, tokens))
    try:
        yield
    finally:
        del cache.match


async def _generate(worker: Any, request: Mapping[str, Any]) -> list[dict[str, Any]]:
    context = Context(f"request-{next(_numbers)}")
    chunks = [chunk async for chunk in worker.generate(json.loads(json.dumps(request)), context)]
    return json.loads(json.dumps(chunks))


def _read(answer: Answer, chunks: Sequence[Mapping[str, Any]]) -> Answer:
    for chunk in chunks:
        answer.tokens += chunk["token_ids"]
        answer.top += [{entry["token_id"]: entry["logprob"] for entry in top} for top in chunk["top_logprobs"]]
    usage = chunks[-1]["completion_usage"]
    answer.prompt_tokens = usage["prompt_tokens"]
    answer.cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer
