# SPDX-License-Identifier: Apache-2.0
"""A family made from a checkpoint of transformers: configuration, encoder, processor, and the prompt around media."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ..contract.errors import ConfigError, InvalidRequest
from ..contract.handoff import Modality, Replacement
from . import checkpoint, options, text
from .base import Expansion, Family


class PretrainedFamily(Family):
    """What needs no media: the files of a model and the tokens of a prompt.

    Args:
        model_dir: the checkpoint's directory.
        config: its configuration, as transformers reads it.
        raw_config: the same as JSON.
        tower: whether ``encode`` will be called.
        device, dtype: as in ``models.load``.
    """

    oldest_transformers: tuple[int, int] = (5, 20)
    """The first release of transformers whose processors do all that the class asks of them."""

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

    @classmethod
    def from_pretrained(
        cls, model_dir: Path, raw_config: Mapping[str, Any], *, tower: bool, device: str, dtype: str | None
    ) -> PretrainedFamily:
        from transformers import AutoConfig, __version__

        if tuple(map(int, __version__.split(".")[:2])) < cls.oldest_transformers:
            needed = ".".join(map(str, cls.oldest_transformers))
            raise ConfigError(
                f"a model of type {raw_config.get('model_type')!r} needs transformers {needed} or newer, here is "
                f"{__version__}: upgrade it (Python 3.10 gets no release after 5.20, use a newer Python)"
            )
        try:
            config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise ConfigError(f"{model_dir / 'config.json'} cannot be used: {error}") from error
        loaded = cls(model_dir, config, raw_config, tower=tower, device=device, dtype=dtype)
        # Both take a while and can fail: now, and not while the first request waits.
        _ = loaded.codec, loaded.identity
        return loaded

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
                reason = " ".join(str(error).split())
                raise ConfigError(f"the processor of {self.model_dir} could not be loaded: {reason}") from error

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
    def tokenizer(self) -> Any:
        return self.processor.tokenizer

    @cached_property
    def codec(self) -> text.Codec:
        return text.Codec(self.tokenizer)

    # Placeholders and the prompt

    def markers(self) -> list[tuple[str, Modality]]:
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
