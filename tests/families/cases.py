# SPDX-License-Identifier: Apache-2.0
"""What is asked of which family: prompts by name, each for any seed, so that the same prompt has other content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_epd.models import Media

from .media_files import audio, image, video

Part = str | Media

TAKES: dict[str, frozenset[str]] = {
    **dict.fromkeys(("gemma3", "idefics3", "llama4", "llava_next", "mistral3", "pixtral"), frozenset({"image"})),
    **dict.fromkeys(
        ("cosmos3_edge", "cosmos3_omni", "internvl", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"),
        frozenset({"image", "video"}),
    ),
    **dict.fromkeys(
        ("nemotron_h_omni", "nemotron_h_omni_videotok", "qwen2_5_omni", "qwen3_omni_moe"),
        frozenset({"image", "video", "audio"}),
    ),
    "phi4_multimodal": frozenset({"image", "audio"}),
    "qwen2_audio": frozenset({"audio"}),
}
"""Tiny model -> the modalities that its family takes."""

KV = [name for name in TAKES if not name.startswith("nemotron")]
"""Those whose prompt is all in its KV. The others have a recurrent state too, so that the engine reuses nothing."""

PRUNES = [name for name in TAKES if name.startswith("nemotron")]
"""Those that drop rows of a video by content."""


@dataclass(frozen=True)
class Case:
    """One prompt.

    Attributes:
        parts: seed -> text and media in order.
        kwargs: ``mm_processor_kwargs``.
        plain: the same for transformers' processor, by section.
        families: those that know these options; none for all.
    """

    parts: Callable[[int], Sequence[Part]]
    kwargs: dict[str, Any] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    families: Sequence[str] = ()

    def media(self, seed: int) -> list[Media]:
        return [part for part in self.parts(seed) if isinstance(part, Media)]

    @property
    def modalities(self) -> frozenset[str]:
        return frozenset(item.modality for item in self.media(0))


ALONE: dict[str, Case] = {
    "image": Case(lambda s: ["Look at this: ", image(s), "What is it?"]),
    "video": Case(lambda s: [video(s), "What happens?"]),
    "audio": Case(lambda s: ["Listen: ", audio(s), "What is said?"]),
}
MIXED: dict[str, Case] = {
    "image-image": Case(lambda s: [image(s), "and a tall one, ", image(s + 1, 60, 110), ". Compare."]),
    "image-image-touching": Case(lambda s: [image(s), image(s + 1)]),
    "video-image-video": Case(
        lambda s: ["First ", video(s), "then", image(s + 1), " and ", video(s + 2, 6, 2.0, (80, 64)), "What changed?"]
    ),
    "long-video": Case(lambda s: [video(s, 40, 4.0), "Hm?"]),
    "audio-audio": Case(lambda s: [audio(s), "vs ", audio(s + 1, 2.7), "?"]),
    "audio-video-audio": Case(lambda s: [audio(s), "over ", video(s + 1), audio(s + 2), "Which fits?"]),
    "audio-image": Case(lambda s: [audio(s), "says what of ", image(s + 1), "?"]),
    "image-audio-video": Case(lambda s: [image(s), "A", audio(s + 1), "B ", video(s + 2), "All?"]),
}


def _picture(kwargs: dict[str, Any], *families: str) -> Case:
    """A wide picture with options for the image processor."""
    return Case(lambda s: ["See ", image(s, 300, 100), "?"], kwargs, {"images_kwargs": kwargs}, families)


OPTIONS: dict[str, Case] = {
    "video-with-sound": Case(
        lambda s: [video(s, fps=2.0, sound=s + 1), "What?"],
        {"use_audio_in_video": True, "fps": 2.0},
        {"own_sound": True, "videos_kwargs": {"fps": 2.0}},
        ("qwen2_5_omni", "qwen3_omni_moe"),
    ),
    "pan-and-scan": _picture({"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 50}, "gemma3"),
    "fewer-pixels": _picture({"max_pixels": 10_000}, "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_omni_moe"),
    "fewer-tiles": _picture({"max_patches": 2}, "llama4"),
    "fewer-patches": _picture({"max_num_patches": 24}, "nemotron_h_omni"),
    "smaller": _picture({"size": {"longest_edge": 84}}, "mistral3", "pixtral"),
}
CASES = {**ALONE, **MIXED, **OPTIONS}


def pairs(cases: dict[str, Case]) -> list[tuple[str, str]]:
    """(family, case) for all families that take what the case needs."""
    return [
        (family, name)
        for family in TAKES
        for name, case in cases.items()
        if case.modalities <= TAKES[family] and family in (case.families or TAKES)
    ]


FILES = [(name, case) for name, case in pairs(ALONE) if not (name in PRUNES and case == "video")]
"""(family, modality) of the embedding files that are taken."""

GRIDS = [
    (name, case)
    for name, case in FILES
    if case != "audio" and name.startswith(("cosmos", "idefics3", "llama4", "mi", "pix", "qwen"))
]
"""Those that cannot be placed without a grid."""


def item_by_item(family: str, media: Sequence[Media]) -> bool:
    """Whether transformers' own forward cannot say what the answer about ``media`` is.

    Nemotron takes no images together with videos, and it and InternVL only videos of one shape. Qwen3-Omni and Phi-4
    pad clips to one length, which changes the shorter one.
    """
    kinds = {item.modality for item in media}
    films = {item.data.shape for item in media if item.modality == "video"}
    clips = {len(item.data) for item in media if item.modality == "audio"}
    if family.startswith("nemotron"):
        return {"image", "video"} <= kinds or len(films) > 1
    if family == "internvl":
        return len(films) > 1
    return family in ("qwen3_omni_moe", "phi4_multimodal") and len(clips) > 1
