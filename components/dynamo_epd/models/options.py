# SPDX-License-Identifier: Apache-2.0
"""Processor options of a request: which are known, which reach a modality, and their value in one form."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from ..contract.errors import InvalidRequest
from ..contract.handoff import Modality

SECTION: dict[Modality, str] = {"image": "images_kwargs", "video": "videos_kwargs", "audio": "audio_kwargs"}

_OURS = frozenset(
    {
        "return_tensors",
        "device",
        "disable_grouping",
        "data_format",
        "input_data_format",
        "return_metadata",
        "video_metadata",
        "return_attention_mask",
        "raw_speech",
        "load_audio_backend",
    }
)
"""Options that say how the processor hands its result over; the worker sets them."""

_ARCHITECTURE = frozenset(
    {
        "patch_size",
        "crop_size",
        "max_image_size",
        "merge_size",
        "temporal_patch_size",
        "spatial_merge_size",
        "downsample_ratio",
        "n_window",
        "sampling_rate",
        "position_id_per_seconds",
        "audio_compression_rate",
        "audio_downsample_rate",
        "audio_feat_stride",
    }
)
"""Options that the encoder's weights fix; a request may only repeat them."""


_CANVAS = ("crop_size", "pad_size", "pad_to_multiple_of", "max_length")
"""Sizes that an image or a clip is filled up to."""

_RANGES: dict[str, tuple[float, float]] = {"fps": (1e-6, 1e6), "num_frames": (1, 1 << 16)}
"""What a request may say of a video's frames. Times overflow, and lists of frames fill the memory, beyond."""


def subprocessor(processor: Any, modality: Modality) -> Any | None:
    """The part of a transformers processor that serves ``modality``, or None."""
    if modality == "audio":
        return getattr(processor, "audio_processor", None) or getattr(processor, "feature_extractor", None)
    return getattr(processor, f"{modality}_processor", None)


def known_options(processor: Any, modality: Modality) -> frozenset[str]:
    """Names of the options that reach ``modality``."""
    part = subprocessor(processor, modality)
    if part is None:
        return frozenset()
    declared = processor.valid_processor_kwargs.__annotations__[SECTION[modality]]
    names = {*_annotations(declared), *_annotations(getattr(part, "valid_kwargs", None))}
    return frozenset(names) - _OURS


def _annotations(typed_dict: Any) -> Mapping[str, Any]:
    return getattr(typed_dict, "__annotations__", {})


def split(processor: Any, kwargs: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The request's options by the section of the processor that they reach; ``""`` holds those of no section.

    Args:
        kwargs: ``mm_processor_kwargs``: flat names, or sections (``{"images_kwargs": {...}}``), or both. A null is
            left out: to some processors None means the default and to others "do not".
        extra: options that the family handles itself, with their defaults.

    Raises:
        InvalidRequest: a name that no modality of this model knows, a section that is not an object, or frames to be
            sampled that are not a positive number.
    """
    known = {modality: known_options(processor, modality) for modality in SECTION}
    given: dict[str, dict[str, Any]] = {"": {}, **{section: {} for section in SECTION.values()}}
    for name, value in kwargs.items():
        if name in SECTION.values():
            if not isinstance(value, Mapping):
                raise InvalidRequest(f"mm_processor_kwargs.{name} must be an object")
            modality = next(m for m, section in SECTION.items() if section == name)
            for inner, inner_value in value.items():
                if inner not in known[modality]:
                    raise InvalidRequest(_unknown(f"{name}.{inner}", known[modality]))
                if inner_value is not None:
                    given[name][inner] = inner_value
            continue
        if name in extra:
            if value is not None:
                given[""][name] = value
            continue
        reached = [modality for modality in SECTION if name in known[modality]]
        if not reached:
            raise InvalidRequest(_unknown(name, frozenset().union(*known.values(), extra)))
        for modality in reached if value is not None else ():
            given[SECTION[modality]].setdefault(name, value)
    for name, (least, most) in _RANGES.items():
        asked = given["videos_kwargs"].get(name)
        if isinstance(asked, (int, float)) and not least <= asked <= most:
            allowed = "above 0" if asked <= 0 else f"from {least} to {most}"
            raise InvalidRequest(f"mm_processor_kwargs.{name} is {asked!r}, must be {allowed}")
    return given


def _unknown(name: str, known: frozenset[str]) -> str:
    if name.rpartition(".")[2] in _OURS:
        return f"mm_processor_kwargs.{name} is set by the worker: leave it out"
    return f"mm_processor_kwargs.{name} is not an option of this model; known: {', '.join(sorted(known)) or 'none'}"


def merge(processor: Any, given: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every section as the processor's own ``__call__`` would pass it on, tensors asked for.

    Raises:
        InvalidRequest: a value of the wrong type.
    """
    from huggingface_hub.errors import StrictDataclassError

    sections = {section: dict(values) for section, values in given.items() if section}
    try:
        return processor._merge_kwargs(
            processor.valid_processor_kwargs,
            tokenizer_init_kwargs=processor.tokenizer.init_kwargs,
            return_tensors="pt",
            **sections,
        )
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise InvalidRequest(f"mm_processor_kwargs: {' '.join(str(error).split())}") from error


def resolve(processor: Any, modality: Modality, merged: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """The options that reach ``modality``: every value in one JSON-safe form, nothing that is None.

    Args:
        merged, base: the modality's section from ``merge``, with the request's options and without.

    Raises:
        InvalidRequest: a value that the encoder's weights fix, or a limit raised above the model's own.
    """
    part = subprocessor(processor, modality)
    names = known_options(processor, modality)
    defaults = {name: getattr(part, name, None) for name in names}
    usual, chosen = (
        _standard(part, {**defaults, **{k: v for k, v in section.items() if k in names and v is not None}})
        for section in (base, merged)
    )
    for name, value in chosen.items():
        fixed = name in _ARCHITECTURE or (name == "size" and _is_canvas(usual.get(name)))
        if fixed and name in usual and value != usual[name]:
            raise InvalidRequest(
                f"mm_processor_kwargs.{name} is {usual[name]!r} in this model and cannot be {value!r} in a request"
            )
        if name == "do_resize" and usual.get(name) and not value:
            raise InvalidRequest("mm_processor_kwargs.do_resize must stay on here: it limits what an item may cost")
        if name in _CANVAS and name not in usual:
            raise InvalidRequest(f"mm_processor_kwargs.{name} is not used by this model: leave it out")
        if ("max" in name or name in ("size", "dynamic_hd", *_CANVAS)) and name in usual:
            limit, asked = _largest(usual[name]), _largest(value)
            if limit is not None and asked is not None and asked > limit:
                raise InvalidRequest(f"mm_processor_kwargs.{name} may be at most {usual[name]!r} here, not {value!r}")
    return chosen


def _standard(part: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    standardise = getattr(part, "_standardize_kwargs", None)
    try:
        values = standardise(**{k: v for k, v in options.items() if v is not None}) if standardise else options
    except LookupError as error:
        raise InvalidRequest(f"mm_processor_kwargs: a size lacks a side ({error})") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"mm_processor_kwargs: {error}") from error
    return {name: plain(value) for name, value in sorted(values.items()) if value is not None and name not in _OURS}


def plain(value: Any) -> Any:
    """``value`` as JSON has it: enums by value, tuples as lists, objects without their Nones."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        return plain(value.item())
    return (
        plain(dataclasses.asdict(value)) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    )


def _is_canvas(size: object) -> bool:
    """Whether all images get this size, which the encoder then is made for, and not a size within a limit."""
    return isinstance(size, Mapping) and {"height", "width"} <= size.keys()


def _largest(value: Any) -> float | None:
    if isinstance(value, Mapping):
        numbers = [_largest(item) for item in value.values()]
        return max((number for number in numbers if number is not None), default=None)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
