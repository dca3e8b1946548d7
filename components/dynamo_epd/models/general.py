# SPDX-License-Identifier: Apache-2.0
"""The general path: what a family does when transformers' processor and model say all that there is to say.

A family that differs overrides the few methods or attributes in which it does. See ``qwen_vl.py`` for a small one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..contract.errors import InvalidRequest
from ..contract.handoff import ItemHandoff, Modality
from ..contract.layout import PromptLayout
from . import options, text
from .base import Media, Prepared
from .pretrained import PretrainedFamily

if TYPE_CHECKING:
    import torch

_REFUSALS = (
    ValueError,
    TypeError,
    AttributeError,
    IndexError,
    KeyError,
    ZeroDivisionError,
    OverflowError,
    RuntimeError,
)
"""What processors of transformers raise for an item that they cannot take."""


class GeneralFamily(PretrainedFamily):
    """A family served by ``transformers``' own processor and feature methods."""

    # Options and preparation

    def extra_options(self) -> Mapping[str, Any]:
        """Request options that the processor does not declare, with their defaults."""
        return {}

    def _sections(self, kwargs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return options.split(self.processor, kwargs, self.extra_options())

    @cached_property
    def _usual(self) -> dict[str, dict[str, Any]]:
        return options.merge(self.processor, self._sections({}))

    @cached_property
    def _defaults(self) -> dict[Modality, dict[str, Any]]:
        """``resolved_options`` of a request without options, which most are, by modality."""
        taken = [m for m in options.SECTION if options.subprocessor(self.processor, m) is not None]
        return {modality: self._resolved(modality, {}) for modality in taken}

    def resolved_options(self, modality: Modality, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        if kwargs or modality not in self._defaults:
            return self._resolved(modality, kwargs)
        return dict(self._defaults[modality])

    def _resolved(self, modality: Modality, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        sections, section = self._sections(kwargs), options.SECTION[modality]
        merged = options.merge(self.processor, sections)[section]
        chosen = options.resolve(self.processor, modality, merged, self._usual[section])
        return {**self.extra_options(), **sections[""], **chosen, "encoder": self._runtime}

    def _call_options(self, modality: Modality, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What the processor's own ``__call__`` passes on for ``modality``; checked as ``resolved_options`` does."""
        section = options.SECTION[modality]
        merged = options.merge(self.processor, self._sections(kwargs))[section]
        options.resolve(self.processor, modality, merged, self._usual[section])
        return dict(merged)

    def prepare(self, media: Media, kwargs: Mapping[str, Any]) -> Prepared:
        if options.subprocessor(self.processor, media.modality) is None:
            raise InvalidRequest(f"this model takes no {media.modality}")
        try:
            return getattr(self, f"prepare_{media.modality}")(media, kwargs)
        except _REFUSALS as error:
            raise InvalidRequest(f"the model's {media.modality} processor refuses the item: {error}") from error

    def prepare_image(self, media: Media, kwargs: Mapping[str, Any]) -> Prepared:
        inputs, (replacement,) = self.processor._process_images([media.data], **self._call_options("image", kwargs))
        return self.prepared("image", inputs, replacement)

    def prepare_video(self, media: Media, kwargs: Mapping[str, Any]) -> Prepared:
        inputs, (replacement,) = self.processor._process_videos([media.data], **self.video_options(media, kwargs))
        return self.prepared("video", inputs, replacement)

    def prepare_audio(self, media: Media, kwargs: Mapping[str, Any]) -> Prepared:
        inputs, (replacement,) = self.processor._process_audio(
            [self.waveform(media)], **self._call_options("audio", kwargs)
        )
        return self.prepared("audio", inputs, replacement)

    def video_options(self, media: Media, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Options for frames that are sampled already."""
        chosen = self._call_options("video", kwargs)
        for name in ("fps", "num_frames"):
            chosen.pop(name, None)
        return {**chosen, "do_sample_frames": False, "return_metadata": True, "video_metadata": [video_metadata(media)]}

    def waveform(self, media: Media) -> np.ndarray:
        """float32 ``[samples]``. Raises ``InvalidRequest`` for another sampling rate than the model's."""
        given = media.meta.get("sampling_rate", self.sampling_rate)
        if given != self.sampling_rate:
            raise InvalidRequest(f"the waveform has {given} samples a second, the model takes {self.sampling_rate}")
        return np.asarray(media.data, dtype=np.float32)

    def prepared(self, modality: Modality, inputs: Mapping[str, Any], replacement: str) -> Prepared:
        """What the processor's output means.

        Args:
            inputs: the tensors for the feature method, by its parameter names, and whatever else came with them.
            replacement: the text that stands for the item in the prompt.
        """
        slots = [self.slot_id(modality)]
        expansion, (rows,) = text.expansion_of(self.codec, replacement, slots, self._framing_ids)
        if not rows:
            raise InvalidRequest("the item is too small to give a single embedding row")
        return Prepared(
            modality, self.features(modality, inputs), expansion, rows, self.item_positions(modality, inputs)
        )

    def features(self, modality: Modality, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The encoder's inputs among ``inputs``."""
        import torch

        unused = set(self.processor.unused_input_names)
        return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor) and name not in unused}

    def item_positions(self, modality: Modality, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """What ``positions`` will need of the item, JSON-safe."""
        return {}

    @property
    def sampling_rate(self) -> int | None:
        return getattr(options.subprocessor(self.processor, "audio"), "sampling_rate", None)

    def frame_indices(self, total_frames: int, fps: float, kwargs: Mapping[str, Any]) -> list[int]:
        from transformers.video_utils import VideoMetadata

        part: Any = options.subprocessor(self.processor, "video")
        chosen = self._call_options("video", kwargs)
        asked = self._sections(kwargs)["videos_kwargs"]
        by_request = asked.get("fps") is not None or asked.get("num_frames") is not None
        if not chosen.get("do_sample_frames", by_request or getattr(part, "do_sample_frames", False)):
            return list(range(total_frames))
        names = options.known_options(self.processor, "video")
        values = {name: chosen.get(name, getattr(part, name, None)) for name in names}
        if asked.get("num_frames") is not None:
            values["fps"] = asked.get("fps")
        try:
            indices = part.sample_frames(metadata=VideoMetadata(total_num_frames=total_frames, fps=fps), **values)
        except _REFUSALS as error:
            raise InvalidRequest(f"the video cannot be sampled: {error}") from error
        return [int(index) for index in indices]

    def prepare_embedding(
        self, modality: Modality, rows: int, grid: Sequence[int] | None, kwargs: Mapping[str, Any]
    ) -> Prepared:
        if options.subprocessor(self.processor, modality) is None:
            raise InvalidRequest(f"this model takes no {modality}")
        inputs, replacement = self.embedding_text(modality, rows, grid, kwargs)
        prepared = self.prepared(modality, inputs, replacement)
        if prepared.rows != rows:
            raise InvalidRequest(
                f"the embedding has {rows} rows, "
                + (f"its grid {list(grid)} makes {prepared.rows}" if grid else f"the prompt can hold {prepared.rows}")
            )
        return dataclasses.replace(prepared, features={})

    def embedding_text(
        self, modality: Modality, rows: int, grid: Sequence[int] | None, kwargs: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], str]:
        """What the processor would have made for an item of ``rows`` rows: its output, and the replacement text."""
        return {}, self.slot_token(modality) * rows

    # Encoding

    def encode(self, items: Sequence[Prepared]) -> list[torch.Tensor]:
        import torch

        results: list[torch.Tensor | None] = [None] * len(items)
        with torch.inference_mode():
            for modality in dict.fromkeys(item.modality for item in items):
                chosen = [i for i, item in enumerate(items) if item.modality == modality]
                embeddings = self.encode_together(modality, [items[i] for i in chosen])
                for i, embedding in zip(chosen, embeddings, strict=True):
                    if embedding.shape != (items[i].rows, self.embedding_width):
                        raise RuntimeError(
                            f"the encoder gave {tuple(embedding.shape)} for an item of {items[i].rows} rows and width "
                            f"{self.embedding_width}"
                        )
                    results[i] = embedding.contiguous()
        return [embedding for embedding in results if embedding is not None]

    def encode_together(self, modality: Modality, items: Sequence[Prepared]) -> list[torch.Tensor]:
        """Embeddings of items of one modality, by as few calls of the model's own feature method as give the same."""
        groups: dict[object, list[int]] = {}
        for i, item in enumerate(items):
            groups.setdefault(i if modality == "audio" else self.batch_key(item), []).append(i)
        results: list[torch.Tensor | None] = [None] * len(items)
        for group in groups.values():
            chosen = [items[i] for i in group]
            inputs = {name: self._to_encoder([item.features[name] for item in chosen]) for name in chosen[0].features}
            for i, embedding in zip(group, self.embed(modality, inputs, chosen), strict=True):
                results[i] = embedding
        return [embedding for embedding in results if embedding is not None]

    def batch_key(self, item: Prepared) -> object:
        """Images, or videos, with equal keys are encoded in one call: their tensors concatenate without padding.

        Audio clips always go one by one, because padding a clip to the length of another changes its last rows.
        """
        return tuple(value.shape[1:] for value in item.features.values())

    def _to_encoder(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        joined = torch.cat(list(tensors)).to(self.model.device)
        return joined.to(self.model.dtype) if joined.is_floating_point() else joined

    def embed(self, modality: Modality, inputs: Mapping[str, Any], items: Sequence[Prepared]) -> list[torch.Tensor]:
        """Embeddings ``[rows, embedding_width]`` of ``items``, whose features were concatenated into ``inputs``."""
        return self.per_item(getattr(self.model, f"get_{modality}_features")(**inputs), items)

    def per_item(self, output: Any, items: Sequence[Prepared]) -> list[torch.Tensor]:
        """The feature method's output cut into ``[rows, embedding_width]`` per item."""
        import torch

        pooled = getattr(output, "pooler_output", output)
        flat = pooled.flatten(0, -2) if isinstance(pooled, torch.Tensor) else torch.cat(list(pooled))
        deepstack = getattr(output, "deepstack_features", None) or ()
        layers = [layer if isinstance(layer, torch.Tensor) else torch.cat(list(layer)) for layer in deepstack]
        return list(torch.cat([flat, *layers], dim=-1).split([item.rows for item in items]))

    def positions(self, layout: PromptLayout, items: Sequence[ItemHandoff]) -> tuple[np.ndarray | None, float]:
        return None, 0


def whole_grid(grid: Sequence[int] | None, rows: int, merge: int = 1) -> tuple[int, int, int]:
    """The grid of an embedding of ``rows`` rows, as ``(t, h, w)``.

    Args:
        merge: cells per side that become one row; each becomes one row or more where it is 1.

    Raises:
        InvalidRequest: it is missing, is not three positive integers, does not divide, or needs more rows.
    """
    if grid is None:
        raise InvalidRequest(
            "the embedding needs grid_thw: put it into the file, or into mm_processor_kwargs.image_grid_thw or "
            "video_grid_thw"
        )
    if len(grid) != 3 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in grid):
        raise InvalidRequest(f"grid_thw is {list(grid)}, must be three positive integers")
    t, h, w = grid
    if h % merge or w % merge:
        raise InvalidRequest(
            f"grid_thw is {list(grid)}, but its height and width count patches and must be multiples of {merge}: this "
            f"model makes one row of {merge} x {merge} patches"
        )
    # Before the prompt's text is made from it: a grid is a few bytes, its text may be any number of gigabytes.
    least = t * (h // merge) * (w // merge)
    if least > rows:
        raise InvalidRequest(f"the embedding has {rows} rows, its grid {list(grid)} makes at least {least}")
    return t, h, w


def video_metadata(media: Media) -> Any:
    """transformers' description of frames that were sampled from a video.

    ``frame_indices`` count frames of the source at ``fps``; where only ``timestamps`` are known they are derived.
    """
    from transformers.video_utils import VideoMetadata

    count = len(media.data)
    fps = media.meta.get("fps")
    indices = media.meta.get("frame_indices")
    if indices is None and fps and media.meta.get("timestamps") is not None:
        indices = [round(seconds * fps) for seconds in media.meta["timestamps"]]
    indices = list(range(count)) if indices is None else [int(index) for index in indices]
    if len(indices) != count:
        raise InvalidRequest(f"the video has {count} frames and {len(indices)} frame indices")
    total = media.meta.get("total_frames") or max(count, max(indices, default=0) + 1)
    return VideoMetadata(total_num_frames=int(total), fps=float(fps) if fps else None, frames_indices=indices)
