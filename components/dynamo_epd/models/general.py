# SPDX-License-Identifier: Apache-2.0
"""The general path: what a family does when transformers' processor and model say all that there is to say.

A family that differs overrides the few methods or attributes in which it does. See ``qwen_vl.py`` for a small one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..contract.errors import ConfigError, InvalidRequest
from ..contract.handoff import ItemHandoff, Modality, Replacement
from ..contract.layout import PromptLayout
from . import checkpoint, options, text
from .base import Expansion, Family, Media, Prepared

if TYPE_CHECKING:
    import torch

_REFUSALS = (ValueError, TypeError, IndexError, KeyError, ZeroDivisionError, OverflowError, RuntimeError)
"""What processors of transformers raise for an item that they cannot take."""


class GeneralFamily(Family):
    """A family served by ``transformers``' own processor and feature methods.

    Args:
        model_dir: the checkpoint's directory.
        config: its configuration, as transformers reads it.
        raw_config: the same as JSON.
        tower: whether ``encode`` will be called.
        device, dtype: as in ``models.load``.
    """

    def __init__(
        self,
        model_dir: Path,
        config: Any,
        raw_config: Mapping[str, Any],
        *,
        tower: bool,
        device: str,
        dtype: str | None,
    ):
        self.model_dir = model_dir
        self.config = self.select_config(config)
        self.raw_config = raw_config
        text_config = self.config.get_text_config(decoder=True)
        self.hidden_size = int(text_config.hidden_size)
        self.vocab_size = int(text_config.vocab_size)
        self.embedding_width = self.hidden_size * (1 + self.deepstack_layers())
        self._lock = threading.Lock()
        self._model = self.load_tower(device, dtype) if tower else None

    def select_config(self, config: Any) -> Any:
        """The part of the configuration that describes encoder and language model together."""
        return config

    def deepstack_layers(self) -> int:
        """Feature layers that travel behind the embedding, each ``hidden_size`` wide."""
        return len(getattr(getattr(self.config, "vision_config", None), "deepstack_visual_indexes", None) or ())

    def load_tower(self, device: str, dtype: str | None) -> Any:
        """The model without its language model."""
        return checkpoint.load_tower(
            self.model_dir, self.model_class(), checkpoint.without_language_model(self.config), device, dtype
        )

    def model_class(self) -> Any:
        """The transformers class of the whole model."""
        import transformers

        name = (getattr(self.config, "architectures", None) or [""])[0]
        found = getattr(transformers, name, None)
        if found is None:
            raise ConfigError(
                f"transformers {transformers.__version__} has no class {name!r}, which {self.model_dir} asks for"
            )
        return found

    @property
    def model(self) -> Any:
        """The loaded encoder. Raises ``ConfigError`` where only config and tokenizer were loaded."""
        if self._model is None:
            raise ConfigError("this model was loaded without its encoder (tower=False) and cannot encode")
        return self._model

    @cached_property
    def identity(self) -> str:  # type: ignore[override]
        return checkpoint.identity(self.model_dir, self.raw_config)

    @cached_property
    def processor(self) -> Any:
        with self._lock:
            try:
                return self.load_processor()
            except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
                raise ConfigError(f"the processor of {self.model_dir} could not be loaded: {error}") from error

    def load_processor(self) -> Any:
        """transformers' processor of the checkpoint."""
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(self.model_dir, local_files_only=True)

    @cached_property
    def _runtime(self) -> dict[str, str]:
        """What changes an embedding beside the weights: another dtype, another release of the processors."""
        from transformers import __version__

        dtype = "" if self._model is None else str(self._model.dtype).removeprefix("torch.")
        return {"dtype": dtype, "transformers": __version__}

    @property
    def tokenizer(self) -> Any:  # type: ignore[override]
        return self.processor.tokenizer

    @cached_property
    def codec(self) -> text.Codec:
        return text.Codec(self.tokenizer)

    # Placeholders and the prompt

    def markers(self) -> list[tuple[str, Modality]]:
        """Placeholder text of each modality as the chat template writes it; where two overlap, the longer first."""
        found: list[tuple[str, Modality]] = []
        for modality in options.SECTION:
            token = getattr(self.processor, f"{modality}_token", None)
            if token and options.subprocessor(self.processor, modality) is not None:
                found.append((token, modality))
        return found

    def slot_token(self, modality: Modality) -> str:
        """The token that takes the embedding rows of ``modality`` in an expanded prompt."""
        return getattr(self.processor, f"{modality}_token")

    def slot_id(self, modality: Modality) -> int:
        """The id of ``slot_token``. Raises ``ConfigError`` where the tokenizer does not know it."""
        number = self.codec.token_id(self.slot_token(modality))
        if number is None:
            raise ConfigError(f"the tokenizer of {self.model_dir} has no token {self.slot_token(modality)}")
        return number

    def framing_tokens(self) -> Sequence[str]:
        """Tokens of an expansion that belong to the item but take no embedding row."""
        return ()

    @cached_property
    def _framing_ids(self) -> frozenset[int]:
        ids = {token: self.codec.token_id(token) for token in self.framing_tokens()}
        absent = sorted(token for token, number in ids.items() if number is None)
        if absent:
            raise ConfigError(f"the tokenizer of {self.model_dir} has no token {', '.join(absent)}")
        return frozenset(number for number in ids.values() if number is not None)

    def _find(self, token_ids: Sequence[int]) -> list[tuple[int, int, str, Modality]]:
        taken: list[tuple[int, int, str, Modality]] = []
        for marker, modality in self.markers():
            for start, length in self.codec.find(token_ids, marker):
                if all(start + length <= s or start >= s + n for s, n, _, _ in taken):
                    taken.append((start, length, marker, modality))
        return sorted(taken)

    def placeholders(self, token_ids: Sequence[int], counts: Mapping[Modality, int]) -> list[tuple[int, int, Modality]]:
        places = [(start, length, modality) for start, length, _, modality in self._find(token_ids)]
        for modality in dict.fromkeys([*options.SECTION, *counts]):
            found = sum(1 for place in places if place[2] == modality)
            asked = counts.get(modality, 0)
            if found != asked:
                supported = any(kind == modality for _, kind in self.markers())
                raise InvalidRequest(
                    f"the prompt has {found} {modality} placeholder{'' if found == 1 else 's'} and the request "
                    f"{asked} {modality} item{'' if asked == 1 else 's'}"
                    + ("" if supported else f"; this model takes no {modality}")
                    + ": send one item per placeholder, and no placeholder token in the text"
                )
        return places

    def replacements(
        self, token_ids: Sequence[int], places: Sequence[tuple[int, int, Modality]], expansions: Sequence[Expansion]
    ) -> tuple[Replacement, ...]:
        marker_at = {(start, length): marker for start, length, marker, _ in self._find(token_ids)}
        return text.replacements(
            self.codec, token_ids, places, expansions, [marker_at[start, length] for start, length, _ in places]
        )

    # Options and preparation

    def extra_options(self) -> Mapping[str, Any]:
        """Request options that the processor does not declare, with their defaults."""
        return {}

    def _sections(self, kwargs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return options.split(self.processor, kwargs, self.extra_options())

    @cached_property
    def _usual(self) -> dict[str, dict[str, Any]]:
        return options.merge(self.processor, self._sections({}))

    def resolved_options(self, modality: Modality, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
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
        wanted = getattr(options.subprocessor(self.processor, "audio"), "sampling_rate", None)
        given = media.meta.get("sampling_rate", wanted)
        if given != wanted:
            raise InvalidRequest(f"the waveform has {given} samples a second, the model takes {wanted}: resample it")
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
        """Embeddings of items of one modality, by as few calls of the model's own feature method as give the same.

        Audio clips go one by one: padding a clip to the length of another changes its last rows. Images whose
        tensors cannot be concatenated without padding go in groups that can.
        """
        groups: dict[object, list[int]] = {}
        for i, item in enumerate(items):
            shapes = tuple(value.shape[1:] for value in item.features.values())
            groups.setdefault(i if modality == "audio" else shapes, []).append(i)
        results: list[torch.Tensor | None] = [None] * len(items)
        for group in groups.values():
            chosen = [items[i] for i in group]
            inputs = {name: self._to_encoder([item.features[name] for item in chosen]) for name in chosen[0].features}
            for i, embedding in zip(group, self.embed(modality, inputs, chosen), strict=True):
                results[i] = embedding
        return [embedding for embedding in results if embedding is not None]

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

    def positions(self, layout: PromptLayout, items: Sequence[ItemHandoff]) -> tuple[np.ndarray | None, int]:
        return None, 0


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
