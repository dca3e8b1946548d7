# SPDX-License-Identifier: Apache-2.0
"""The encode worker: media references in, a handoff and offered embeddings out."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

from dynamo._core import Context
from dynamo.common.backend.engine import EngineConfig, GenerateChunk, GenerateRequest
from dynamo.common.backend.health_check import build_health_check_payload, is_probe
from dynamo.common.backend.multimodal import encoder_terminal_chunk
from dynamo.common.http import close_http_client
from dynamo.common.http.url_validator import UrlValidationPolicy
from PIL import Image

from .. import models
from ..contract.digest import item_digest, prompt_digest, value_digest
from ..contract.handoff import HANDOFF_VERSION, Handoff, ItemHandoff, Modality, to_json_object
from ..media.fetch import fetch
from ..media.image import ALPHA_BACKGROUND
from ..media.limits import MediaLimits
from ..media.source import MediaReference, parse_request_media
from ..models.base import Family
from .base import EpdWorker
from .batching import EncodeBatcher
from .embeddings import Description, EmbeddingCache, Encoded
from .faults import to_handoff_error
from .items import prepare

logger = logging.getLogger(__name__)


class EncodeWorker(EpdWorker):
    """Fetches, digests, and encodes what no request encoded before."""

    async def open(self) -> EngineConfig:
        a = self.args
        if self.transfer is None:
            raise RuntimeError("open() before the transfer layer")
        self._policy = UrlValidationPolicy.from_env()
        if a.allowed_local_media_path is not None:
            self._policy = UrlValidationPolicy(
                allow_http=self._policy.allow_http,
                allow_private_ips=self._policy.allow_private_ips,
                allowed_local_path=str(a.allowed_local_media_path.resolve()),
            )
        self._limits = MediaLimits(max_file_size_bytes=a.max_file_size, max_items=a.max_items)
        self._family: Family = await asyncio.to_thread(
            models.load, a.model, tower=True, device=a.device, dtype=None if a.dtype == "auto" else a.dtype
        )
        self._threads = ThreadPoolExecutor(a.encode_threads, thread_name_prefix="media")
        self._batcher = EncodeBatcher(self._family.encode, a.encode_batch_items)
        self._cache = EmbeddingCache(self.transfer, enabled=a.embedding_cache_bytes > 0)
        return EngineConfig(model=str(a.model), served_model_name=a.served_model_name)

    async def shut(self) -> None:
        if (batcher := getattr(self, "_batcher", None)) is not None:
            batcher.close()
        if (threads := getattr(self, "_threads", None)) is not None:
            threads.shutdown(wait=True, cancel_futures=True)
        await close_http_client()

    async def health_check_payload(self) -> dict[str, Any]:
        return build_health_check_payload(0)

    async def serve(self, request: GenerateRequest, context: Context) -> AsyncIterator[GenerateChunk]:
        request_id = str(context.id())
        with ExitStack() as undo:
            try:
                handoff = await (self._probe() if is_probe(request) else self._handoff(request, undo))
            except Exception as error:
                # The frontend swallows what this hop raises and goes on without a handoff, so a fault travels in it.
                undo.close()
                handoff = Handoff(HANDOFF_VERSION, self._family.identity, error=to_handoff_error(error, request_id))
            n = len(request["token_ids"])
            tokens = {"prompt_tokens": n, "completion_tokens": 0, "total_tokens": n}
            undo.pop_all()
            yield encoder_terminal_chunk(to_json_object(handoff), completion_usage=tokens)

    async def _handoff(self, request: GenerateRequest, undo: ExitStack) -> Handoff:
        """Encode all media of ``request`` and offer them. ``undo`` withdraws the offers unless it is disarmed."""
        transfer, family = self.transfer, self._family
        if transfer is None:
            raise RuntimeError("the worker is closed")
        token_ids = request["token_ids"]
        refs = parse_request_media(
            request.get("multi_modal_data"), request.get("multi_modal_uuids"), limits=self._limits
        )
        places, ordered = _in_prompt_order(family, token_ids, refs)
        kwargs = request.get("mm_processor_kwargs") or {}
        salt = (request.get("routing") or {}).get("cache_salt") if self.args.isolate_embedding_cache_by_salt else None
        tasks = [asyncio.ensure_future(self._item(ref, kwargs, salt)) for ref in ordered]
        try:
            found = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(result, BaseException):
                    result[2].slot.release()
            raise
        items = []
        try:
            replacements = family.replacements(token_ids, places, [e.description.expansion for _, _, e in found])
            for ref, (digest, key, encoded) in zip(ordered, found, strict=True):
                d = encoded.description
                embedding = transfer.offer(encoded.slot, digest=key, shape=(d.rows, d.width), dtype=d.dtype)
                undo.callback(transfer.withdraw, embedding)
                items.append(ItemHandoff(d.modality, digest, d.rows, embedding, ref.uuid, dict(d.positions)))
        finally:
            for _, _, encoded in found:
                encoded.slot.release()
        return Handoff(HANDOFF_VERSION, family.identity, tuple(items), replacements, prompt_digest(token_ids))

    async def _item(self, ref: MediaReference, kwargs: Mapping[str, Any], salt: str | None) -> tuple[str, str, Encoded]:
        """(content digest, cache key, embedding) of one item. Decodes and encodes only what is not known."""
        data = await fetch(ref.url, policy=self._policy, limits=self._limits, label=ref.label)
        digest = await asyncio.get_running_loop().run_in_executor(
            self._threads, partial(self._digest, ref, data, kwargs)
        )
        key = digest if salt is None else value_digest([digest, salt])
        return digest, key, await self._cache.get(key, partial(self._encode, ref, data, kwargs))

    def _digest(self, ref: MediaReference, data: bytes, kwargs: Mapping[str, Any]) -> str:
        return item_digest(
            modality=ref.modality,
            payload=data,
            model=self._family.identity,
            options=self._family.resolved_options(ref.modality, kwargs),
            alpha_background=ALPHA_BACKGROUND if ref.modality == "image" else None,
            uuid=ref.uuid,
        )

    async def _encode(self, ref: MediaReference, data: bytes, kwargs: Mapping[str, Any]) -> Encoded:
        """Decode, preprocess and encode one item into a slot of the arena; the caller owns the hold."""
        if self.transfer is None:
            raise RuntimeError("the worker is closed")
        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(
            self._threads, partial(prepare, self._family, ref, data, kwargs, self._limits)
        )
        embedding = await self._batcher.submit(prepared)
        if tuple(embedding.shape) != (prepared.rows, self._family.embedding_width):
            raise RuntimeError(f"{ref.label}: encoder gave {tuple(embedding.shape)}, expected {prepared.rows} rows")
        dtype = str(embedding.dtype).removeprefix("torch.")
        slot = await self.transfer.allocate(embedding.nbytes)
        try:
            await loop.run_in_executor(self._threads, slot.tensor(embedding.shape, dtype).copy_, embedding)
        except BaseException:
            slot.release()
            raise
        description = Description(
            modality=prepared.modality,
            expansion=prepared.expansion,
            rows=prepared.rows,
            width=int(embedding.shape[1]),
            dtype=dtype,
            positions=dict(prepared.positions),
        )
        return Encoded(description, slot)

    async def _probe(self) -> Handoff:
        """Dynamo's canary: a tiny image through decoder, processor and encoder."""
        buffer = io.BytesIO()
        Image.new("RGB", (64, 64), (120, 60, 30)).save(buffer, "PNG")
        ref = MediaReference("image", 0, "canary", "")
        encoded = await self._encode(ref, buffer.getvalue(), {})
        encoded.slot.release()
        return Handoff(HANDOFF_VERSION, self._family.identity)


def _in_prompt_order(
    family: Family, token_ids: Sequence[int], refs: Sequence[MediaReference]
) -> tuple[list[tuple[int, int, Modality]], list[MediaReference]]:
    """Placeholders of the prompt, and the media that belong to them: the k-th image to the k-th image placeholder."""
    by_modality: dict[Modality, list[MediaReference]] = {}
    for ref in refs:
        by_modality.setdefault(ref.modality, []).append(ref)
    places = family.placeholders(token_ids, {m: len(items) for m, items in by_modality.items()})
    queues = {m: iter(items) for m, items in by_modality.items()}
    return places, [next(queues[modality]) for _, _, modality in places]
