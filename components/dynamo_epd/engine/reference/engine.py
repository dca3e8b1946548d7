# SPDX-License-Identifier: Apache-2.0
"""The reference engine: continuous batching over a paged KV cache with prefix reuse, on one torch device.

The event loop plans and books; one worker thread computes. A step is planned, run in the thread, and applied before
the next one is planned, so nothing but the running step ever touches tensors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

from ...contract.errors import ConfigError, InvalidRequest, Unavailable
from ..base import EngineInfo, EngineOutput, EngineRequest, KVEventListener, Logprob
from ..threads import to_its_end
from .block_cache import BlockCache
from .config import ReferenceConfig, load_engine_config
from .memory import fit
from .model import load_language_model
from .recurrent import RecurrentRunner
from .runner import Export, PagedRunner, Result
from .scheduler import Chunk, Scheduler
from .sequence import Limits, Seq

logger = logging.getLogger(__name__)

Keys = Literal["exact", "placeholder"]
T = TypeVar("T")


def create(
    *,
    model_dir: Path | str,
    config_file: Path | str | None = None,
    overrides: str | None = None,
    keys: Keys = "exact",
    device: str = "auto",
    dtype: str = "auto",
) -> ReferenceEngine:
    """A reference engine for a Hugging Face checkpoint.

    Args:
        config_file: engine YAML with TensorRT-LLM's keys.
        overrides: JSON object that overrides it.
        keys: ``placeholder`` leaves the media out of the block keys, as engines do that get embeddings without exact
            metadata. It gives WRONG ANSWERS and exists to show them.

    Raises:
        ConfigError: the configuration or the model directory cannot be used.
    """
    config = load_engine_config(config_file, overrides, model_dir)
    return ReferenceEngine(Path(model_dir), config, keys=keys, device=device, dtype=dtype)


class ReferenceEngine:
    """See ``engine.base.Engine`` for the methods."""

    def __init__(
        self,
        model_dir: Path,
        config: ReferenceConfig,
        *,
        keys: Keys = "exact",
        device: str = "auto",
        dtype: str = "auto",
    ):
        if keys not in ("exact", "placeholder"):
            raise ConfigError(f"keys is {keys!r}, must be exact or placeholder")
        self._model_dir, self._config, self._keys = model_dir, config, keys
        self._device, self._dtype = device, dtype
        self._thread: ThreadPoolExecutor | None = None
        self._runner: PagedRunner | RecurrentRunner | None = None
        self._loop: asyncio.Task[None] | None = None
        self._listeners: list[KVEventListener] = []
        self._wake = asyncio.Event()
        self._busy: set[Seq] = set()  # touched by the worker thread now
        self._seqs: dict[str, Seq] = {}
        self._leaving: set[asyncio.Future[None]] = set()

    async def start(self) -> EngineInfo:
        if self._keys == "placeholder":
            logger.warning(
                "KV BLOCKS ARE KEYED BY PLACEHOLDER TOKENS: requests with different media share blocks and are "
                "answered from each other's media. This is for demonstration only; use --keys exact."
            )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reference-engine")
        model = await self._in_thread(
            load_language_model, self._model_dir, self._device, self._dtype, self._config.max_seq_len
        )
        config, total = fit(self._config, model)
        if model.attention is None:
            self._runner = RecurrentRunner(model)
        else:
            size = config.tokens_per_block
            self._runner = await self._in_thread(PagedRunner, model, model.attention, total, size)
        self.cache = BlockCache(total, config.tokens_per_block)
        self.cache.listeners = self._listeners
        self.scheduler = Scheduler(self.cache, config)
        self._limits = Limits(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            deepstack=model.deepstack,
            mrope=model.mrope,
            atomic_items=model.atomic_items,
            max_seq_len=config.max_seq_len,
            max_num_tokens=config.max_num_tokens,
            chunked_prefill=config.enable_chunked_prefill,
            tokens_per_block=config.tokens_per_block,
            reuse=config.enable_block_reuse,
            plain_keys=self._keys == "placeholder",
            kv=model.attention is not None,
        )
        self._loop = asyncio.create_task(self._run(), name="reference-engine")
        self.info = EngineInfo(
            tokens_per_block=config.tokens_per_block,
            total_blocks=total,
            max_seq_len=config.max_seq_len,
            max_batch_size=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            block_reuse=config.enable_block_reuse,
        )
        return self.info

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        if self._loop is None or self._loop.done():
            raise Unavailable("the engine is not running")
        if request.request_id in self._seqs:
            raise InvalidRequest(f"request id {request.request_id!r} is in flight already")
        seq = Seq(request, self._limits)
        self._seqs[request.request_id] = seq
        try:
            remote = request.remote_kv
            if remote is not None and seq.finish_reason(remote.first_token):
                self._emit(seq, remote.first_token, remote.first_logprob)
            else:
                self.scheduler.add(seq)
                self._wake.set()
            while True:
                output = await seq.outputs.get()
                if isinstance(output, BaseException):
                    raise output
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            # A task of its own, because the caller may be cancelled once more while this waits.
            leaving = asyncio.ensure_future(self._leave(seq))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            await asyncio.shield(leaving)

    def listen(self, listener: KVEventListener) -> None:
        self._listeners.append(listener)

    def used_blocks(self) -> int:
        return self.cache.used if self._loop is not None else 0

    def check(self) -> None:
        """Raise ``RuntimeError`` where the engine's bookkeeping contradicts itself; for tests, between two steps."""
        self.scheduler.check()
        known = {*self.scheduler.waiting, *self.scheduler.running}
        if not known <= set(self._seqs.values()):
            raise RuntimeError("a request runs that nobody waits for")

    async def stop(self) -> None:
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        if loop is not None:
            loop.cancel()
            await asyncio.wait({loop})
        if thread is not None:
            await asyncio.to_thread(thread.shutdown)
        self._runner = None

    async def _run(self) -> None:
        fault: Exception | None = None
        try:
            while True:
                self._wake.clear()
                if not await self._step():
                    await self._wake.wait()
        except Exception as error:
            logger.exception("the engine stopped")
            fault = error
        finally:
            await self._end_all(fault)

    async def _step(self) -> bool:
        """Plan, run and apply one step; False where there was nothing to compute."""
        plan = self.scheduler.schedule()
        seqs = {c.seq for c in plan.chunks}
        self._busy |= seqs.union(plan.imports)
        if plan.copies:
            await self._in_thread(self._paged.copy, plan.copies)
        self._busy.difference_update(plan.imports)
        for seq in plan.imports:
            if seq.cancelled:
                self._drop(seq)
            else:
                seq.fetch = asyncio.create_task(self._import(seq))
        if not plan.chunks:
            return False
        results = await self._execute(plan.chunks)
        self._busy -= seqs
        for chunk, result in zip(plan.chunks, results, strict=True):
            self._apply(chunk, result)
        return True

    async def _execute(self, chunks: list[Chunk]) -> list[Result]:
        """Run a step. Where it fails as a whole, its chunks run one by one, so that only those at fault fail."""
        try:
            if self._runner is None:
                raise Unavailable("the engine is not running")
            return await self._in_thread(self._runner.run, chunks)
        except Exception as error:
            if len(chunks) == 1:
                logger.exception("request %s failed", chunks[0].seq.request.request_id)
                return [error]
            logger.warning("a step of %d requests failed, running each alone", len(chunks), exc_info=error)
        return [result for chunk in chunks for result in await self._execute([chunk])]

    def _apply(self, chunk: Chunk, result: Result) -> None:
        seq = chunk.seq
        if seq.cancelled:
            self._drop(seq)
        elif isinstance(result, Exception):
            self._drop(seq, result)
        else:
            self.scheduler.computed(seq, chunk.end)
            if result is not None:
                self._emit(seq, *result)

    def _emit(self, seq: Seq, token: int, logprob: Logprob | None) -> None:
        """Add a token to the answer. The last one ends the request."""
        output = EngineOutput(
            [token],
            seq.finish_reason(token),
            [logprob] if logprob is not None else [],
            seq.cached_tokens,
            queue_seconds=seq.queue_seconds,
        )
        seq.append(token)
        if seq.request.prefill_only:
            output.kv = Export(self._paged, seq, self._drop)
            self.scheduler.export(seq)
            seq.outputs.put_nowait(output)
        elif output.finish_reason is not None:
            self._drop(seq, output)
        else:
            seq.outputs.put_nowait(output)

    async def _import(self, seq: Seq) -> None:
        """Fetch what is missing of the prompt's KV, and continue with the token that prefill sampled."""
        remote = seq.request.remote_kv
        if remote is None:
            return
        try:
            if seq.computed < seq.n:
                block = seq.computed // remote.tokens_per_block
                kv = await remote.fetch(block)
                self._paged.check_import(kv, -(-seq.n // remote.tokens_per_block) - block, remote.tokens_per_block)
                self._busy.add(seq)
                try:
                    await self._in_thread(self._paged.write, seq, kv, block * remote.tokens_per_block, seq.computed)
                finally:
                    self._busy.discard(seq)
        except Exception as error:
            self._drop(seq, error)
            return
        if seq.cancelled:
            self._drop(seq)
            return
        self.scheduler.computed(seq, seq.n)
        self._emit(seq, remote.first_token, remote.first_logprob)
        self._wake.set()

    async def _end_all(self, fault: Exception | None) -> None:
        """The loop has ended, and so must every request: with ``fault``, or as cancelled."""
        fetches = [seq.fetch for seq in self._seqs.values() if seq.fetch is not None and seq.fetch.cancel()]
        if fetches:
            await asyncio.wait(fetches)
        for seq in self._seqs.values():
            if not seq.left.is_set():
                self._drop(seq, fault or EngineOutput([], "cancelled", cached_tokens=seq.cached_tokens))

    def _drop(self, seq: Seq, last: EngineOutput | Exception | None = None) -> None:
        """Free what the request holds, and let ``last`` be the end of its answer."""
        self.scheduler.release(seq)
        self._wake.set()
        seq.left.set()
        if last is not None:
            seq.outputs.put_nowait(last)

    async def _leave(self, seq: Seq) -> None:
        """The caller is gone or has its answer: free everything, once the worker thread is done with the request."""
        if seq in self._busy:
            seq.cancelled = True
            await seq.left.wait()
        elif seq.fetch is not None and seq.fetch.cancel():
            await asyncio.wait({seq.fetch})
        if seq not in self.scheduler.exported:
            self._drop(seq)
        while not seq.outputs.empty():
            output = seq.outputs.get_nowait()
            if isinstance(output, EngineOutput) and output.kv is not None:
                output.kv.release()
        del self._seqs[seq.request.request_id]

    @property
    def _paged(self) -> PagedRunner:
        if not isinstance(self._runner, PagedRunner):
            raise Unavailable("the engine is not running")
        return self._runner

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        return await to_its_end(self._thread, call, *args)
