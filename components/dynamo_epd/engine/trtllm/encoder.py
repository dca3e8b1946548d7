# SPDX-License-Identifier: Apache-2.0
"""``--encoder trtllm``: TensorRT-LLM's stand-alone multimodal encoder, giving tensors that can be copied anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...contract.errors import ConfigError, Unavailable
from .capabilities import probe
from .disagg import take_positions
from .engine_args import load
from .names import Names, load_names

if TYPE_CHECKING:
    import torch

    from ...contract.handoff import Modality

_OPTIONS = ("tensor_parallel_size", "max_batch_size", "max_num_tokens", "trust_remote_code", "model_kwargs", "dtype")
"""The engine keys that mean something to the encoder; it must not be given those of a language model."""


@dataclass(frozen=True)
class EncoderItem:
    """One media item.

    Attributes:
        modality: as in ``Media``.
        data: as in ``Media``: a PIL image, frames, or a waveform.
        placeholder_ids: the tokens that stand for the item in the unexpanded prompt.
        rows: embedding rows that it must give.
        kwargs: processor options of the request.
        meta: as in ``Media``.
    """

    modality: Modality
    data: Any
    placeholder_ids: tuple[int, ...]
    rows: int
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)


class TrtllmEncoder:
    """Encodes items, each by itself, so that an embedding depends on its item alone."""

    def __init__(self, model_dir: Path | str, config_file: Path | str | None = None, overrides: str | None = None):
        self._model_dir = Path(model_dir)
        self._args = load(config_file, overrides)
        self._names: Names = load_names()
        if not probe(self._names).encoder:
            raise ConfigError(
                f"TensorRT-LLM {self._names.version} has no MultimodalEncoder with readable handles: use --encoder hf"
            )
        self._encoder: Any = None

    async def start(self) -> None:
        """Load the encoder. Raises ``ConfigError``."""
        options = {name: self._args.values[name] for name in _OPTIONS if name in self._args.values}
        try:
            self._encoder = self._names.MultimodalEncoder(model=str(self._model_dir), **options)
        except Exception as error:
            raise ConfigError(f"TensorRT-LLM's encoder does not start for {self._model_dir}: {error}") from error

    async def encode(self, items: Sequence[EncoderItem]) -> list[torch.Tensor]:
        """One tensor ``[rows, width]`` per item, on the encoder's device. The caller copies it and lets it go.

        Raises:
            Unavailable: the encoder is not running, failed, or gave something else.
        """
        if self._encoder is None:
            raise Unavailable("the encoder is not running")
        prompts = [
            {
                "prompt_token_ids": list(item.placeholder_ids),
                "multi_modal_data": {item.modality: [self._data(item)]},
                "mm_processor_kwargs": dict(item.kwargs),
            }
            for item in items
        ]
        try:
            results = await asyncio.to_thread(self._encoder.generate, prompts, use_tqdm=False)
        except Exception as error:
            raise Unavailable(f"TensorRT-LLM's encoder failed: {type(error).__name__}: {error}") from error
        if len(results) != len(items):
            raise Unavailable(f"TensorRT-LLM's encoder gave {len(results)} answers for {len(items)} items")
        return [self._tensor(result, item, i) for i, (result, item) in enumerate(zip(results, items, strict=True))]

    async def stop(self) -> None:
        encoder, self._encoder = self._encoder, None
        if encoder is not None:
            await asyncio.to_thread(encoder.shutdown)

    def _data(self, item: EncoderItem) -> Any:
        """The item as TensorRT-LLM's own loaders give it: a video is an object with PIL frames."""
        if item.modality != "video" or self._names.VideoData is None:
            return item.data
        from PIL import Image

        total, fps = item.meta.get("total_frames", len(item.data)), item.meta.get("fps")
        metadata = {
            "total_num_frames": total,
            "frames_indices": list(item.meta.get("frame_indices", range(len(item.data)))),
        }
        if fps:
            metadata |= {"fps": fps, "duration": total / fps}
        return self._names.VideoData(frames=[Image.fromarray(frame) for frame in item.data], metadata=metadata)

    def _tensor(self, result: Any, item: EncoderItem, index: int) -> torch.Tensor:
        params = getattr(result, "disaggregated_params", None)
        take_positions(params, self._names)
        handles = getattr(params, "multimodal_embedding_handles", None) or []
        if len(handles) != 1:
            raise Unavailable(f"item {index + 1}: TensorRT-LLM's encoder gave {len(handles)} embeddings for one item")
        tensor = self._names.SharedTensorContainer.from_dict(handles[0]).get_local_view()
        if tensor.ndim != 2 or tensor.shape[0] != item.rows:
            raise Unavailable(
                f"item {index + 1}: TensorRT-LLM's encoder gave shape {tuple(tensor.shape)}, the processor says "
                f"{item.rows} rows: its image processing differs from transformers'; use --encoder hf"
            )
        return tensor
