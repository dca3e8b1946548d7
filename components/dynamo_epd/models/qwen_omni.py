# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni and Qwen3-Omni (the thinker): images, audio, video, and a video with its own sound.

A video's own sound is an item of its own whose tokens alternate with the frames'. The begin and end of audio around
the pair belong to the sound, which therefore comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..contract.errors import InvalidRequest
from ..contract.handoff import ItemHandoff, Modality
from ..contract.layout import PromptLayout
from . import mrope, text
from .base import Media, Prepared
from .checkpoint import read_json
from .general import GeneralFamily, whole_grid

if TYPE_CHECKING:
    import torch

_OWN_SOUND = "load_audio_from_video"
_ALIASES = (_OWN_SOUND, "use_audio_in_video")
_FIXED = ("seconds_per_chunk", "position_id_per_seconds")


class QwenOmni(GeneralFamily):
    """Positions of Qwen2.5-Omni: the two begin tokens of a pair share a position, and so do its two end tokens."""

    model_types = ("qwen2_5_omni", "qwen2_5_omni_thinker")
    oldest_transformers = (5, 23)

    pair_frame_is_still = True
    """Whether the begin and end of audio inside those of vision do not advance the position."""

    whole_positions = True
    """Whether the times of a video are cut to whole positions."""

    def select_config(self, config: Any) -> Any:
        return getattr(config, "thinker_config", config)

    def model_class(self) -> Any:
        import transformers

        return transformers.Qwen2_5OmniThinkerForConditionalGeneration

    @cached_property
    def _video_size(self) -> dict[str, Any] | None:
        """The size that the checkpoint sets for videos. The processor's class has one too, which comes after it."""
        nested, own = self.model_dir / "processor_config.json", self.model_dir / "video_preprocessor_config.json"
        section = read_json(nested).get("video_processor") if nested.exists() else None
        if section is None and own.exists():
            section = read_json(own)
        if not section or not {"size", "min_pixels", "max_pixels"} & section.keys():
            return None
        return dict(self.processor.video_processor.size)

    def framing_tokens(self) -> Sequence[str]:
        return (self.processor.audio_bos_token, self.processor.audio_eos_token)

    # Options

    def extra_options(self) -> Mapping[str, Any]:
        return {_OWN_SOUND: False}

    def _sections(self, kwargs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The processor declares options of the pair as options of the video; they are neither here."""
        flat = dict(kwargs)
        videos = dict(flat.pop("videos_kwargs", None) or {})
        for name in _FIXED:
            for given in (flat.pop(name, None), videos.pop(name, None)):
                if given not in (None, getattr(self.processor, name)):
                    raise InvalidRequest(f"mm_processor_kwargs.{name} is {getattr(self.processor, name)} in this model")
        wanted = [where.pop(name, False) for where in (flat, videos) for name in _ALIASES]
        sections = super()._sections({**flat, "videos_kwargs": videos, _OWN_SOUND: any(wanted)})
        if self._video_size is not None:
            sections["videos_kwargs"].setdefault("size", self._video_size)
        return sections

    def resolved_options(self, modality: Modality, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        chosen = dict(super().resolved_options(modality, kwargs))
        if modality != "video":
            del chosen[_OWN_SOUND]
        return chosen

    # Preparation

    def own_sound(self, kwargs: Mapping[str, Any]) -> bool:
        return bool(self._sections(kwargs)[""][_OWN_SOUND])

    def prepare_video(self, media: Media, kwargs: Mapping[str, Any]) -> Prepared:
        section = self.video_options(media, kwargs)
        fps = self._sections(kwargs)["videos_kwargs"].get("fps")
        sound = media.meta.get("audio") if self.own_sound(kwargs) else None
        if fps is None and sound is not None and media.meta.get("fps"):
            # Without a rate the processor assumes one, and the sound would drift away from the frames.
            fps = section["video_metadata"][0].sampled_fps
        if fps is not None:
            section["fps"] = fps
        call: dict[str, Any] = {"videos_kwargs": section, _OWN_SOUND: sound is not None}
        if sound is None:
            inputs, (replacement,) = self.processor._process_videos([media.data], **call)
            return self.prepared("video", inputs, replacement)
        wave = self.waveform(sound)
        audio_inputs, (audio_text,) = self.processor._process_audio([wave], **self._call_options("audio", kwargs))
        inputs, (replacement,) = self.processor._process_videos(
            [media.data],
            audio=[wave],
            processed_audio=audio_inputs,
            video_to_audio_indices=[0],
            **call,
            **{name: getattr(self.processor, name) for name in _FIXED},
        )
        slots = [self.slot_id("audio"), self.slot_id("video")]
        expansion, (audio_rows, video_rows) = text.expansion_of(self.codec, replacement, slots, self._framing_ids)
        audio = self.prepared("audio", audio_inputs, audio_text)
        video = Prepared(
            "video", self.features("video", inputs), expansion, video_rows, self.item_positions("video", inputs)
        )
        return Prepared(
            "video", {}, expansion, audio_rows + video_rows, parts=(replace(audio, expansion=expansion), video)
        )

    def item_positions(self, modality: Modality, inputs: Mapping[str, Any]) -> dict[str, Any]:
        if modality == "audio":
            return {}
        found: dict[str, Any] = {"grid_thw": inputs[f"{modality}_grid_thw"][0].tolist()}
        if modality == "video":
            found["second_per_grid"] = float(inputs["video_second_per_grid"][0])
        return found

    def embedding_text(
        self, modality: Modality, rows: int, grid: Sequence[int] | None, kwargs: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], str]:
        if modality == "audio":
            return super().embedding_text(modality, rows, grid, kwargs)
        import torch

        whole = whole_grid(grid, rows, self.config.vision_config.spatial_merge_size)
        inputs: dict[str, Any] = {f"{modality}_grid_thw": torch.tensor([whole])}
        if modality == "video":
            fps = self._sections(kwargs)["videos_kwargs"].get("fps")
            if fps is None:
                raise InvalidRequest("a precomputed video embedding needs mm_processor_kwargs.fps, its frames a second")
            inputs["video_second_per_grid"] = [self.processor.video_processor.temporal_patch_size / fps]
            return inputs, self.processor.replace_video_token(inputs, 0, **{_OWN_SOUND: False})
        return inputs, self.processor.replace_image_token(inputs, 0)

    # Encoding and positions

    def per_item(self, output: Any, items: Sequence[Prepared]) -> list[torch.Tensor]:
        """Audio has no deepstack features; zeros in their place add nothing where they are added."""
        import torch

        if items[0].modality != "audio":
            return super().per_item(output, items)
        rows = getattr(output, "pooler_output", None)
        rows = output.last_hidden_state if rows is None else rows
        padded = torch.nn.functional.pad(rows, (0, self.embedding_width - rows.shape[-1]))
        return list(padded.split([item.rows for item in items]))

    def positions(self, layout: PromptLayout, items: Sequence[ItemHandoff]) -> tuple[np.ndarray | None, float]:
        merge, per_second = self.config.vision_config.spatial_merge_size, self.config.position_id_per_seconds
        offsets: list[np.ndarray] = []
        for i, item in enumerate(items):
            if item.modality == "audio":
                offsets.append(np.broadcast_to(np.arange(item.rows), (3, item.rows)))
                continue
            factors = item.positions.get("second_per_grid", 1.0), per_second
            grid = mrope.grid_of(i, item, merge)
            offsets.append(mrope.grid_offsets(grid, merge, *factors, whole=self.whole_positions))
        advances = [offset.max() + 1 for offset in offsets]
        stretch = list(range(len(items)))
        still: list[int] = []
        for sound, video in _pairs(layout, items):
            slots = np.flatnonzero((layout.slot_item == sound) | (layout.slot_item == video))
            is_sound = layout.slot_item[slots] == sound
            both = self.pair_offsets(offsets[sound], offsets[video], is_sound)
            offsets[sound], offsets[video] = both[:, is_sound], both[:, ~is_sound]
            stretch[video] = stretch[sound]
            advances[sound] = advances[video] = both[:, -1].max() + 1
            if self.pair_frame_is_still:
                begin, end = layout.positions(sound)[[0, -1]].tolist()
                still += [begin - 1, end]
        return mrope.place(layout, offsets, advances, stretch=stretch, still=still)

    def pair_offsets(self, sound: np.ndarray, video: np.ndarray, is_sound: np.ndarray) -> np.ndarray:
        """``[3, slots]``: offsets of a pair's slots in prompt order, where ``is_sound`` says whose each is."""
        both = np.empty((3, len(is_sound)), dtype=np.int64)
        both[:, is_sound], both[:, ~is_sound] = sound, video
        return both


def _pairs(layout: PromptLayout, items: Sequence[ItemHandoff]) -> list[tuple[int, int]]:
    """Numbers of sound and video of each video that has its own sound: they are neighbours and overlap."""
    found = []
    for i in range(len(items) - 1):
        end = int(layout.positions(i)[-1])
        if int(layout.positions(i + 1)[0]) < end:
            found.append((i, i + 1))
    return found


class Qwen3Omni(QwenOmni):
    model_types = ("qwen3_omni_moe", "qwen3_omni_moe_thinker")

    pair_frame_is_still = False
    whole_positions = False

    def model_class(self) -> Any:
        import transformers

        return transformers.Qwen3OmniMoeThinkerForConditionalGeneration

    def pair_offsets(self, sound: np.ndarray, video: np.ndarray, is_sound: np.ndarray) -> np.ndarray:
        """Positions go out in order of time, whichever token stands there: transformers merges them once more."""
        both = np.concatenate([video, sound], axis=1)
        return both[:, np.argsort(both[0], kind="stable")]
