# SPDX-License-Identifier: Apache-2.0
"""The encode worker: media references in, a handoff and offered embeddings out."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from dynamo._core import Context
from dynamo.common.backend.engine import EngineConfig, GenerateChunk, GenerateRequest
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.multimodal import encoder_terminal_chunk
from dynamo.common.http import close_http_client
from dynamo.common.http.url_validator import UrlValidationPolicy

from .. import models
from ..contract.digest import prompt_digest, value_digest
from ..contract.errors import InvalidRequest
from ..contract.handoff import HANDOFF_VERSION, Handoff, ItemHandoff, Modality, to_json_object
from ..doctor import startup_checks
from ..engine.threads import to_its_end
from ..engine.trtllm.encoder import EncoderItem, TrtllmEncoder
from ..media.embedding import PrecomputedEmbedding
from ..media.fetch import fetch
from ..media.limits import MediaLimits
from ..media.source import MediaReference, parse_request_media
from ..models.base import Expansion, Family, Prepared
from ..transfer.base import Slot, Transfer
from . import items as media_items
from .base import EpdWorker
from .batching import EncodeBatcher
from .canary import CanaryPeer, canary_item
from .embeddings import Description, EmbeddingCache, Encoded, Part, part_key
from .faults import outcome, reason, to_handoff_error
from .observe import Observation

logger = logging.getLogger(__name__)
T = TypeVar("T")

# So many bytes are hashed in less time than a thread takes to answer, least of all one that decodes other items.
_DIGEST_HERE = 1 << 16


class EncodeWorker(EpdWorker):
    """Fetches, digests, and encodes what no request encoded before."""

    async def open(self) -> EngineConfig:
        a = self.args
        if self.transfer is None:
            raise RuntimeError("open() before the transfer layer")
        await asyncio.to_thread(startup_checks, engine="none", model=a.model)
        self._policy = UrlValidationPolicy.from_env()
        if a.allowed_local_media_path is not None:
            self._policy = UrlValidationPolicy(
                allow_http=self._policy.allow_http,
                allow_private_ips=self._policy.allow_private_ips,
                allowed_local_path=str(a.allowed_local_media_path.resolve()),
            )
        self._limits = MediaLimits(max_file_size_bytes=a.max_file_size, max_items=a.max_items)
        own = a.encoder == "hf"
        self._family: Family = await asyncio.to_thread(
            models.load, a.model, tower=own, device=a.device, dtype=None if a.dtype == "auto" else a.dtype
        )
        self._trtllm: TrtllmEncoder | None = None
        if not own:
            self._trtllm = TrtllmEncoder(a.model, a.engine_args, a.engine_overrides)
            await self._trtllm.start()
        self._threads = ThreadPoolExecutor(a.encode_threads, thread_name_prefix="media")
        self._batcher = EncodeBatcher(self._family.encode, a.encode_batch_items)
        self._cache = EmbeddingCache(self.transfer, enabled=a.embedding_cache_bytes > 0)
        self._peer = CanaryPeer(a.transfer)
        return EngineConfig(model=str(a.model), served_model_name=a.served_model_name)

    async def shut(self) -> None:
        if (trtllm := getattr(self, "_trtllm", None)) is not None:
            await trtllm.stop()
        if (batcher := getattr(self, "_batcher", None)) is not None:
            batcher.close()
        if (threads := getattr(self, "_threads", None)) is not None:
            threads.shutdown(wait=True, cancel_futures=True)
        if (peer := getattr(self, "_peer", None)) is not None:
            await peer.close()
        await close_http_client()

    async def health_check_payload(self) -> dict[str, Any]:
        return build_health_check_payload(0)

    async def serve(
        self, request: GenerateRequest, context: Context, seen: Observation
    ) -> AsyncIterator[GenerateChunk]:
        request_id = str(context.id())
        with ExitStack() as undo:
            try:
                handoff = await self._handoff(request, seen, undo)
            except Exception as error:
                # The frontend swallows what this hop raises and goes on without a handoff, so a fault travels in it.
                undo.close()
                seen.fault(outcome(error), reason(error), str(error))
                handoff = Handoff(HANDOFF_VERSION, self._family.identity, error=to_handoff_error(error, request_id))
            undo.pop_all()
            yield _terminal_chunk(handoff, len(request["token_ids"]))

    async def _handoff(self, request: GenerateRequest, seen: Observation, undo: ExitStack) -> Handoff:
        """Encode all media of ``request`` and offer them. ``undo`` withdraws the offers unless it is disarmed."""
        transfer, family = self.transfer, self._family
        if transfer is None:
            raise RuntimeError("the worker is closed")
        token_ids = request["token_ids"]
        refs = parse_request_media(
            request.get("multi_modal_data"), request.get("multi_modal_uuids"), limits=self._limits
        )
        places, ordered = _in_prompt_order(family, token_ids, refs)
        counts = Counter(ref.modality for ref in ordered)
        kwargs, grids = media_items.take_grids(_processor_options(request), ordered)
        options = family.request_options(counts, kwargs)
        salt = (request.get("routing") or {}).get("cache_salt") if self.args.isolate_embedding_cache_by_salt else None
        tasks = [
            asyncio.ensure_future(self._item(ref, token_ids[start : start + length], options, salt, seen, grid))
            for ref, (start, length, _), grid in zip(ordered, places, grids, strict=True)
        ]
        try:
            found = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(result, BaseException):
                    result[2].release()
            raise
        items: list[ItemHandoff] = []
        try:
            replacements = family.replacements(token_ids, places, [e.description.expansion for _, _, e in found])
            with seen.stage("offer") as stage:
                for ref, (digest, key, encoded) in zip(ordered, found, strict=True):
                    for item in self._offer(ref, digest, key, encoded, transfer):
                        undo.callback(transfer.withdraw, item.embedding)
                        items.append(item)
                stage.set(items=len(items), bytes=sum(item.embedding.nbytes for item in items))
        finally:
            for _, _, encoded in found:
                encoded.release()
        return Handoff(HANDOFF_VERSION, family.identity, tuple(items), replacements, prompt_digest(token_ids))

    def _offer(
        self, ref: MediaReference, digest: str, key: str, encoded: Encoded, transfer: Transfer
    ) -> Iterator[ItemHandoff]:
        """Offer the embedding of each part of an item."""
        n = len(encoded.slots)
        for i, (part, slot) in enumerate(zip(encoded.description.parts, encoded.slots, strict=True)):
            shape = (part.rows, part.width)
            embedding = transfer.offer(slot, digest=part_key(key, i, n), shape=shape, dtype=part.dtype)
            positions = dict(part.positions)
            yield ItemHandoff(part.modality, part_key(digest, i, n), part.rows, embedding, ref.uuid, positions)

    async def _item(
        self,
        ref: MediaReference,
        placeholder: Sequence[int],
        options: Mapping[str, Any],
        salt: str | None,
        seen: Observation,
        grid: media_items.GridTHW | None = None,
    ) -> tuple[str, str, Encoded]:
        """(content digest, cache key, embedding) of one item. Decodes and encodes only what is not known.

        Args:
            placeholder: the ids that stand for the item in the unexpanded prompt.
            salt: of the tenant, where tenants must not see each other's embeddings in the time that they take.
            grid: of an embedding file, where the request gives it.
        """
        family, limits = self._family, self._limits
        with seen.stage("fetch", modality=ref.modality) as stage:
            data = await fetch(ref.url, policy=self._policy, limits=limits, label=ref.label)
            stage.set(bytes=len(data))
        seen.note(bytes=len(data))
        made = False
        if ref.kind == "embedding":
            given = await self._in_thread(media_items.read_embedding, family, ref, data, limits, grid)
            digest = await self._in_thread(media_items.embedding_digest, family, ref, given, options)
            work: Callable[[], Awaitable[Encoded]] = partial(self._take, ref, given, options)
        else:
            with seen.stage("digest", bytes=len(data)):
                work_out = partial(media_items.digest, family, ref, data, options, self.args.encoder)
                digest = work_out() if len(data) <= _DIGEST_HERE else await self._in_thread(work_out)
            work = partial(self._encode, ref, data, options, placeholder, seen)

        async def make() -> Encoded:
            nonlocal made
            made = True
            return await work()

        key = digest if salt is None else value_digest([digest, salt])
        encoded = await self._cache.get(key, make)
        seen.item(ref.modality, "kept" if not made else "file" if ref.kind == "embedding" else "encoded")
        return digest, key, encoded

    async def _encode(
        self,
        ref: MediaReference,
        data: bytes,
        options: Mapping[str, Any],
        placeholder: Sequence[int],
        seen: Observation,
    ) -> Encoded:
        """Decode, preprocess and encode one item into the arena; the caller owns the holds."""
        with seen.stage("decode", modality=ref.modality, bytes=len(data)):
            media, prepared = await self._in_thread(media_items.prepare, self._family, ref, data, options, self._limits)
        parts = prepared.parts or (prepared,)
        with seen.stage("queue", modality=ref.modality) as stage:
            begun = partial(stage.then, "encode", modality=ref.modality, items=len(parts))
            if self._trtllm is None:
                tensors = await asyncio.gather(*(self._batcher.submit(part, begun) for part in parts))
            elif prepared.parts:
                raise InvalidRequest("--encoder trtllm takes no video with its own sound", item=ref.label)
            else:
                begun()
                item = EncoderItem(ref.modality, media.data, tuple(placeholder), prepared.rows, options, media.meta)
                tensors = await self._trtllm.encode([item])
            stage.set(bytes=sum(tensor.nbytes for tensor in tensors))
        for tensor in tensors:
            if not await self._in_thread(_finite, tensor):
                raise InvalidRequest(
                    "the encoder gives values that are not finite for it; check mm_processor_kwargs", item=ref.label
                )
        pruned = [self._family.prune(part, tensor) for part, tensor in zip(parts, tensors, strict=True)]
        expansion = prepared.expansion if prepared.parts else pruned[0][0].expansion
        return await self._store(expansion, pruned)

    async def _take(self, ref: MediaReference, given: PrecomputedEmbedding, options: Mapping[str, Any]) -> Encoded:
        """Lay out an embedding that the caller brought, and put it into the arena."""
        prepared, tensor = await self._in_thread(media_items.prepare_embedding, self._family, ref, given, options)
        return await self._store(prepared.expansion, [(prepared, tensor)])

    async def _store(self, expansion: Expansion, made: Sequence[tuple[Prepared, torch.Tensor]]) -> Encoded:
        if self.transfer is None:
            raise RuntimeError("the worker is closed")
        parts = tuple(
            Part(item.modality, item.rows, int(tensor.shape[1]), _dtype(tensor), dict(item.positions))
            for item, tensor in made
        )
        slots: list[Slot] = []
        try:
            for _, tensor in made:
                slot = await self.transfer.allocate(tensor.nbytes)
                slots.append(slot)
                await to_its_end(self._threads, slot.tensor(tensor.shape, _dtype(tensor)).copy_, tensor)
        except BaseException:
            for slot in slots:
                slot.release()
            raise
        return Encoded(Description(expansion, parts), tuple(slots))

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    async def probe(self, context: Context, seen: Observation) -> AsyncIterator[GenerateChunk]:
        """A small item through decoder, processor and encoder, and its embedding to a peer."""
        if self.transfer is None:
            raise RuntimeError("the worker is closed")
        ref, placeholder, data = canary_item(self._family)
        encoded = await self._encode(ref, data, {}, placeholder, seen)
        try:
            shapes = [((part.rows, part.width), part.dtype) for part in encoded.description.parts]
            await self._peer.take(self.transfer, encoded.slots, shapes)
        finally:
            encoded.release()
        yield _terminal_chunk(Handoff(HANDOFF_VERSION, self._family.identity), 0)


def _terminal_chunk(handoff: Handoff, tokens: int) -> GenerateChunk:
    usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
    return encoder_terminal_chunk(to_json_object(handoff), completion_usage=usage)


def _processor_options(request: GenerateRequest) -> Mapping[str, Any]:
    """The request's ``mm_processor_kwargs``, which the frontend passes on whatever they are."""
    options = request.get("mm_processor_kwargs")
    if options is not None and not isinstance(options, Mapping):
        raise InvalidRequest("mm_processor_kwargs must be an object")
    return options or {}


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


def _finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite; also for 8-bit types, for which not every operation exists."""
    return bool(torch.isfinite(tensor.float() if tensor.itemsize == 1 else tensor).all())


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
