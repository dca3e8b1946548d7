# SPDX-License-Identifier: Apache-2.0
"""From the bytes of one media item to what the encoder takes: the right decoder, then the family's processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from ..contract.digest import item_digest
from ..contract.errors import InvalidRequest
from ..contract.handoff import Modality
from ..media.audio import DecodedAudio, decode_audio
from ..media.embedding import PrecomputedEmbedding, decode_embedding
from ..media.image import ALPHA_BACKGROUND, decode_image
from ..media.limits import MediaLimits
from ..media.source import MediaReference
from ..media.video import VideoInfo, decode_video
from ..models.base import Family, Media, Prepared

if TYPE_CHECKING:
    import torch

GridTHW = tuple[int, int, int]
"""``(t, h, w)`` of an image or a video, in what the family counts (patches, tiles)."""

_GRIDS: dict[Modality, str] = {"image": "image_grid_thw", "video": "video_grid_thw"}


def digest(family: Family, ref: MediaReference, data: bytes, options: Mapping[str, Any], encoder: str = "hf") -> str:
    """The content digest of an item from its source bytes, before anything else is done with them.

    Args:
        options: of the request, as ``Family.request_options`` gives them.
        encoder: whose implementation of the encoder it is.

    Raises:
        InvalidRequest: an option that the processor does not know.
    """
    return item_digest(
        modality=ref.modality,
        payload=data,
        model=family.identity,
        encoder=encoder,
        options=family.resolved_options(ref.modality, options),
        alpha_background=ALPHA_BACKGROUND if ref.modality == "image" else None,
        uuid=ref.uuid,
    )


def embedding_digest(
    family: Family, ref: MediaReference, embedding: PrecomputedEmbedding, options: Mapping[str, Any]
) -> str:
    """The content digest of an item that comes as an embedding file: of what it holds, however the file spells it."""
    return item_digest(
        modality=ref.modality,
        payload=embedding.payload,
        payload_kind="embedding",
        model=family.identity,
        options=family.resolved_options(ref.modality, options),
        uuid=ref.uuid,
    )


def decode(family: Family, ref: MediaReference, data: bytes, options: Mapping[str, Any], limits: MediaLimits) -> Media:
    """The decoded item. CPU work, thread-safe. Raises ``InvalidRequest`` where the bytes are something else."""
    if ref.modality == "image":
        return Media("image", decode_image(data, limits=limits, label=ref.label).image)
    rate = family.sampling_rate
    if ref.modality == "audio":
        if rate is None:
            raise InvalidRequest("this model takes no audio", item=ref.label)
        return _audio(decode_audio(data, rate=rate, limits=limits, label=ref.label))

    def sample(info: VideoInfo) -> list[int]:
        return family.frame_indices(info.total_frames, info.fps, options)

    wanted_rate = rate if family.own_sound(options) else None
    video = decode_video(data, sample=sample, limits=limits, label=ref.label, audio_rate=wanted_rate)
    meta: dict[str, Any] = {
        "fps": video.fps,
        "total_frames": video.total_frames,
        "timestamps": video.timestamps,
        "frame_indices": video.frame_indices,
    }
    if video.audio is not None:
        meta["audio"] = _audio(video.audio)
    return Media("video", video.frames, meta)


def prepare(
    family: Family, ref: MediaReference, data: bytes, options: Mapping[str, Any], limits: MediaLimits
) -> tuple[Media, Prepared]:
    """Decode and preprocess one item; raises ``InvalidRequest`` with the item's label."""
    try:
        media = decode(family, ref, data, options, limits)
        return media, family.prepare(media, options)
    except InvalidRequest as error:
        raise _labelled(error, ref) from error


def take_grids(
    options: Mapping[str, Any], refs: Sequence[MediaReference]
) -> tuple[dict[str, Any], list[GridTHW | None]]:
    """``options`` without the grids of embedding files, and these: one for each of ``refs``, None where none is given.

    ``image_grid_thw`` and ``video_grid_thw`` are lists of ``[t, h, w]``, one for each embedding file of the modality in
    prompt order; null for a file that tells its own.

    Raises:
        InvalidRequest: more or fewer grids than files, or one that is not three positive integers.
    """
    rest = dict(options)
    grids: list[GridTHW | None] = [None] * len(refs)
    for modality, name in _GRIDS.items():
        given = rest.pop(name, None)
        if given is None:
            continue
        files = [i for i, ref in enumerate(refs) if ref.kind == "embedding" and ref.modality == modality]
        if not isinstance(given, list) or len(given) != len(files):
            raise InvalidRequest(
                f"mm_processor_kwargs.{name} must be a list with one [t, h, w] for each {modality} embedding file; the "
                f"request has {len(files)}"
            )
        for i, grid in zip(files, given, strict=True):
            grids[i] = None if grid is None else _grid(grid, refs[i])
    return rest, grids


def _grid(value: object, ref: MediaReference) -> GridTHW:
    try:
        grid = msgspec.convert(value, GridTHW)
    except msgspec.ValidationError:
        grid = (0, 0, 0)
    if not all(0 < n < 1 << 31 for n in grid):
        raise InvalidRequest(f"its grid is {value!r:.60}, must be three positive integers [t, h, w]", item=ref.label)
    return grid


def read_embedding(
    family: Family, ref: MediaReference, data: bytes, limits: MediaLimits, grid: GridTHW | None
) -> PrecomputedEmbedding:
    """The embedding file of ``ref`` with its grid, by the file or by the request; raises ``InvalidRequest``."""
    given = decode_embedding(data, width=family.embedding_width, limits=limits, label=ref.label)
    if grid is None:
        return given
    if given.grid not in (None, (grid,)):
        raise InvalidRequest(f"the file's grid is {given.grid}, the request's {grid}; leave one out", item=ref.label)
    return replace(given, grid=(grid,))


def prepare_embedding(
    family: Family, ref: MediaReference, embedding: PrecomputedEmbedding, options: Mapping[str, Any]
) -> tuple[Prepared, torch.Tensor]:
    """Lay out an embedding that the caller brings; raises ``InvalidRequest`` where no prompt can hold it."""
    grid = embedding.grid
    if grid is not None and len(grid) != 1:
        raise InvalidRequest(f"the file has {len(grid)} grids; put each item into a file of its own", item=ref.label)
    rows = int(embedding.embedding.shape[0])
    try:
        return family.prepare_embedding(ref.modality, rows, grid[0] if grid else None, options), embedding.embedding
    except InvalidRequest as error:
        raise _labelled(error, ref) from error


def _audio(audio: DecodedAudio) -> Media:
    return Media("audio", audio.samples, {"sampling_rate": audio.sampling_rate})


def _labelled(error: InvalidRequest, ref: MediaReference) -> InvalidRequest:
    return error if error.item else InvalidRequest(str(error), item=ref.label)
