# SPDX-License-Identifier: Apache-2.0
"""What a model family must say: how its media becomes embeddings, and how its prompt grows around them.

A family is one class in one file of this folder; ``models.load`` finds it by ``model_type``. The classes here hold
no Dynamo, NIXL or engine type.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..contract.errors import InvalidRequest
from ..contract.handoff import Group, ItemHandoff, Modality, Replacement
from ..contract.layout import PromptLayout

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Media:
    """One decoded media item.

    Attributes:
        modality: ``image``, ``video`` or ``audio``.
        data: a PIL image; or frames, uint8 ``[frames, height, width, 3]``; or a waveform, float32 ``[samples]``.
        meta: what the decoder knows of it: ``fps`` and ``total_frames`` of the source, ``timestamps`` (seconds) and
            ``frame_indices`` of the frames, ``sampling_rate``; ``audio``: a video's own sound, as ``Media``.
    """

    modality: Modality
    data: Any
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Expansion:
    """What replaces one placeholder: the item's tokens, with ``Segment.item == 0`` for the item's own.

    Families whose one placeholder stands for two items (a video and its own sound) use 0 and 1.
    """

    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Prepared:
    """One item after the processor: everything known before the encoder runs.

    Attributes:
        modality: as in ``Media``.
        features: the encoder's inputs, by name.
        expansion: the tokens that stand for the item in the prompt.
        rows: embedding rows that the encoder will give.
        positions: what ``Family.positions`` needs of the item; plain values, JSON-safe.
        parts: where one placeholder stands for two items, both of them, numbered as in ``expansion``; they are what
            is encoded, digested and handed on then. Empty for every other item.
    """

    modality: Modality
    features: Mapping[str, torch.Tensor]
    expansion: Expansion
    rows: int
    positions: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[Prepared, ...] = ()


class Family(ABC):
    """A model family, made from a model directory by ``models.load``.

    ``tower=False`` (prefill, decode) loads config and tokenizer only; ``encode`` then raises ``ConfigError``.
    """

    model_types: tuple[str, ...]
    """The values of ``config.model_type`` that the class serves."""

    identity: str
    """Digest (hex) of the configuration and encoder weights; part of every content digest and of the handoff."""

    hidden_size: int
    """Width of the language model's token embeddings."""

    embedding_width: int
    """Columns of an embedding as it travels: ``hidden_size`` x (1 + deepstack layers)."""

    tokenizer: PreTrainedTokenizerBase
    """The model's tokenizer; loaded also without the tower."""

    vocab_size: int
    """The vocabulary size that the engine offsets item-local ids by (``text_config.vocab_size``)."""

    @classmethod
    @abstractmethod
    def from_pretrained(
        cls, model_dir: Path, raw_config: Mapping[str, Any], *, tower: bool, device: str, dtype: str | None
    ) -> Family:
        """The family of the checkpoint in ``model_dir``, whose ``config.json`` holds ``raw_config``; see ``load``."""

    @property
    def sampling_rate(self) -> int | None:
        """Samples a second of the waveforms that ``prepare`` takes; None where the model takes no audio."""
        return None

    @abstractmethod
    def markers(self) -> list[tuple[str, Modality]]:
        """Placeholder text of each modality as the chat template writes it; where two overlap, the longer first."""

    @abstractmethod
    def placeholders(self, token_ids: Sequence[int], counts: Mapping[Modality, int]) -> list[tuple[int, int, Modality]]:
        """Where the media items stand in the unexpanded prompt: ``(start, length, modality)`` in prompt order.

        Args:
            counts: media items of each modality in the request.

        Raises:
            InvalidRequest: more or fewer placeholders than items, with both numbers in the message.
        """

    def request_options(self, counts: Mapping[Modality, int], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """``kwargs`` of one request, and whatever the other items of the request decide about each item.

        What this returns goes into ``resolved_options`` and ``prepare``, so that the digest covers it.
        """
        return kwargs

    @abstractmethod
    def resolved_options(self, modality: Modality, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """All processor options that reach an item of ``modality``: the defaults, overridden by the request's kwargs.

        The result goes into the digest: an option that does not touch the modality is not in it, and a default that
        is given explicitly makes no difference.

        Raises:
            InvalidRequest: an option that the processor does not know.
        """

    def own_sound(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether ``prepare`` wants a video's own sound along with its frames (``Media.meta["audio"]``)."""
        return False

    def frame_indices(self, total_frames: int, fps: float, kwargs: Mapping[str, Any]) -> list[int]:
        """Which frames of a video ``prepare`` wants, by the processor's own rule and the request's ``kwargs``.

        Args:
            total_frames, fps: of the source.

        Raises:
            InvalidRequest: the rule cannot be applied to this video.
        """
        return list(range(total_frames))

    def prepare_embedding(
        self, modality: Modality, rows: int, grid: Sequence[int] | None, kwargs: Mapping[str, Any]
    ) -> Prepared:
        """An item whose embedding ``[rows, embedding_width]`` the caller brings; it has no features to encode.

        Args:
            grid: ``(t, h, w)`` in patches, where the caller knows it. It is never guessed from the rows.

        Raises:
            InvalidRequest: this many rows, or this grid, is nothing that the model's prompt can hold.
        """
        raise InvalidRequest(f"this model takes no precomputed {modality} embeddings")

    @abstractmethod
    def prepare(self, media: Media, kwargs: Mapping[str, Any]) -> Prepared:
        """Run the processor on one item. CPU only, thread-safe.

        Raises:
            InvalidRequest: the processor refuses the item (too small, wrong number of channels, ...).
        """

    @abstractmethod
    def encode(self, items: Sequence[Prepared]) -> list[torch.Tensor]:
        """Embeddings per item, ``[rows, embedding_width]`` in the tower's dtype and on its device.

        Encoding several items together equals encoding each alone. Called from one thread at a time.
        """

    def prunes(self, item: Prepared) -> bool:
        """Whether ``prune`` will drop rows of the item, so that its layout is not known before it is encoded."""
        return False

    def reserve(self, item: Prepared) -> Prepared:
        """The item as an engine lays it out before its content is known; as many rows as ``prune`` will leave."""
        return item

    def prune(self, item: Prepared, embedding: torch.Tensor) -> tuple[Prepared, torch.Tensor]:
        """The item as it goes into the prompt, now that its embedding is known.

        Differs from what is given only where rows are dropped by content (pruned video): expansion, rows and
        positions of the result agree with the embedding of the result. Call it before anything is laid out.
        """
        return item, embedding

    @abstractmethod
    def replacements(
        self, token_ids: Sequence[int], places: Sequence[tuple[int, int, Modality]], expansions: Sequence[Expansion]
    ) -> tuple[Replacement, ...]:
        """The edits that turn the unexpanded prompt into what the family's processor would have made of it.

        Spliced in token space where that is safe, else re-tokenised around the placeholder. Item numbers in the
        result index the request's items in prompt order.
        """

    @abstractmethod
    def positions(self, layout: PromptLayout, items: Sequence[ItemHandoff]) -> tuple[np.ndarray | None, float]:
        """M-RoPE position ids (``[3, n]``) and the delta for generated tokens; ``(None, 0)`` for plain RoPE.

        Both are whole (int64), except where a model places the frames of a video between whole positions.
        """
