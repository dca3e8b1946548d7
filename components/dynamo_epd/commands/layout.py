# SPDX-License-Identifier: Apache-2.0
"""``dynamo-epd layout``: where each media item's tokens sit in the expanded prompt, as JSON or as a drawing."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from .. import models
from ..contract.digest import item_digest
from ..contract.errors import InvalidRequest
from ..contract.layout import PromptLayout, expand
from ..media.limits import MediaLimits
from ..media.source import MediaReference
from ..models import Family, Media, Prepared
from ..models.checkpoint import tensor_spans
from ..workers import items
from ..workers.embeddings import part_key

INPUT_FORM = """\
The input is one JSON object:
  {"prompt_token_ids": [one placeholder per item], "mm_processor_kwargs": {},
   "media": [{"kind": "image" | "video" | "audio", "path": "...", "fps": N, "sampling_rate": N}, in prompt order]}
A path is a media file, or a .npy array: an image uint8 [h, w, 3], frames uint8 [n, h, w, 3] (with fps), a waveform
float32 [n] (with sampling_rate). Where a video's own sound is asked for, an audio entry without a placeholder is the
sound of the video before it. A pruned video needs the model's weights; without them its rows are only reserved."""

LIMITS = MediaLimits()
BAR = 48


class MediaEntry(msgspec.Struct, forbid_unknown_fields=True):
    """One media item of the input."""

    kind: Literal["image", "video", "audio"]
    path: str
    fps: float | None = None
    sampling_rate: int | None = None


class LayoutInput(msgspec.Struct, forbid_unknown_fields=True):
    """The input of the command."""

    prompt_token_ids: list[int]
    media: list[MediaEntry] = []
    mm_processor_kwargs: dict[str, Any] = {}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "layout",
        help="show where each media item's tokens sit in a prompt",
        description="Expand a prompt as the encode worker does and print where each media item's tokens sit in it.",
        epilog=INPUT_FORM,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, type=Path, metavar="DIR", help="the model's directory")
    parser.add_argument("--show", action="store_true", help="draw the prompt instead of printing JSON")
    parser.add_argument("file", nargs="?", default="-", metavar="FILE", help="input (default: standard input)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    request = read_input(args.file)
    family, layout, prepared, digests, reserved = layout_of(args.model, request)
    if args.show:
        print("\n".join(drawing(family, layout, prepared)))
        return 0
    output: dict[str, Any] = {
        "expanded_ids": layout.token_ids.tolist(),
        "items": [
            {
                "modality": item.modality,
                "runs": [list(run) for run in layout.runs(i)],
                "special_offsets": layout.special_offsets(i).tolist(),
                "embedding_rows": item.rows,
                "digest": digest,
            }
            for i, (item, digest) in enumerate(zip(prepared, digests, strict=True))
        ],
    }
    if reserved:
        output["reserved"] = True
    print(json.dumps(output))
    return 0


def read_input(file: str) -> LayoutInput:
    """The request in ``file``, or on standard input for ``-``. Raises ``InvalidRequest``."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return msgspec.json.decode(data, type=LayoutInput)
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{'standard input' if file == '-' else file}: {error}") from error


def layout_of(model: Path, request: LayoutInput) -> tuple[Family, PromptLayout, list[Prepared], list[str], bool]:
    """The expanded prompt, its items and their digests in prompt order, and whether pruned rows are only reserved.

    Raises:
        ConfigError: ``model`` cannot be used.
        InvalidRequest: the media cannot be read, or do not fit the prompt.
    """
    family = models.load(model, tower=False)
    ids, kwargs = request.prompt_token_ids, request.mm_processor_kwargs
    entries, sounds = _with_sounds(family, request)
    counts = Counter(entry.kind for entry in entries)
    options = family.request_options(counts, kwargs)
    places = family.placeholders(ids, counts)
    _check_order(entries, places)
    labels = _labels([entry.kind for entry in entries])
    whole = [
        _prepare(family, entry, sound, label, options)
        for entry, sound, label in zip(entries, sounds, labels, strict=True)
    ]
    reserved = False
    if any(family.prunes(item) for item, _ in whole):
        reserved = not tensor_spans(model)
        encoder = family if reserved else models.load(model, tower=True)
        whole = [(_settled(encoder, item, reserved), digest) for item, digest in whole]
    edits = family.replacements(ids, places, [item.expansion for item, _ in whole])
    parts = [
        (part, part_key(digest, i, len(item.parts or (item,))))
        for item, digest in whole
        for i, part in enumerate(item.parts or (item,))
    ]
    layout = expand(ids, edits, len(parts))
    return family, layout, [part for part, _ in parts], [digest for _, digest in parts], reserved


def _settled(family: Family, item: Prepared, reserved: bool) -> Prepared:
    if not family.prunes(item):
        return item
    return family.reserve(item) if reserved else family.prune(item, family.encode([item])[0])[0]


def _with_sounds(family: Family, request: LayoutInput) -> tuple[list[MediaEntry], list[MediaEntry | None]]:
    """Entries that have a placeholder, and the sound that belongs to each."""
    entries: list[MediaEntry] = []
    sounds: list[MediaEntry | None] = []
    alone = not family.own_sound(request.mm_processor_kwargs) or _fits(family, request)
    for entry in request.media:
        if entry.kind == "audio" and not alone and entries and entries[-1].kind == "video" and sounds[-1] is None:
            sounds[-1] = entry
        else:
            entries.append(entry)
            sounds.append(None)
    return entries, sounds


def _fits(family: Family, request: LayoutInput) -> bool:
    """Whether every entry has a placeholder of its own."""
    try:
        family.placeholders(request.prompt_token_ids, Counter(entry.kind for entry in request.media))
    except InvalidRequest:
        return False
    return True


def _check_order(entries: Sequence[MediaEntry], places: Sequence[tuple[int, int, str]]) -> None:
    for i, (entry, (start, _, modality)) in enumerate(zip(entries, places, strict=True)):
        if entry.kind != modality:
            raise InvalidRequest(f"media[{i}] is {entry.kind}, the placeholder at token {start} is for {modality}")


def _labels(kinds: Sequence[str]) -> list[str]:
    return [f"{kind} {kinds[: i + 1].count(kind)}" for i, kind in enumerate(kinds)]


def _prepare(
    family: Family, entry: MediaEntry, sound: MediaEntry | None, label: str, options: Mapping[str, Any]
) -> tuple[Prepared, str]:
    """The item and its digest: of the file's bytes as the encode worker's, or of what the array holds."""
    data = _read(entry, label)
    reference = MediaReference(entry.kind, 0, label, entry.path)
    if entry.path.endswith(".npy"):
        media = _array(entry, data, label)
    else:
        media = items.decode(family, reference, data, options, LIMITS)
    if sound is not None:
        is_array = sound.path.endswith(".npy")
        track = _read(sound, label)
        heard = _array(sound, track, label) if is_array else _decoded_sound(family, sound, track, label, options)
        media = Media("video", media.data, {**media.meta, "audio": heard})
    elif not entry.path.endswith(".npy"):
        digest = items.digest(family, reference, data, options)
        return _refuse_with_label(family, media, options, label), digest
    decoded = {"data": np.asarray(media.data), "meta": _plain(media.meta)}
    if sound is not None:
        decoded["sound"] = np.asarray(media.meta["audio"].data)
    digest = item_digest(
        modality=entry.kind,
        payload=decoded,
        payload_kind="decoded",
        model=family.identity,
        options=family.resolved_options(entry.kind, options),
    )
    return _refuse_with_label(family, media, options, label), digest


def _decoded_sound(family: Family, sound: MediaEntry, data: bytes, label: str, options: Mapping[str, Any]) -> Media:
    return items.decode(family, MediaReference("audio", 0, label, sound.path), data, options, LIMITS)


def _refuse_with_label(family: Family, media: Media, options: Mapping[str, Any], label: str) -> Prepared:
    try:
        return family.prepare(media, options)
    except InvalidRequest as error:
        raise error if error.item else InvalidRequest(str(error), item=label) from error


def _plain(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in meta.items() if name != "audio"}


def _read(entry: MediaEntry, label: str) -> bytes:
    try:
        return Path(entry.path).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{entry.path} cannot be read: {error.strerror}", item=label) from error


def _array(entry: MediaEntry, data: bytes, label: str) -> Media:
    """A ``.npy`` array as the item that it holds."""
    from PIL import Image

    try:
        array = np.load(BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise InvalidRequest(f"{entry.path} is not a .npy array: {error}", item=label) from error
    wanted = {"image": ("uint8", 3), "video": ("uint8", 4), "audio": ("float32", 1)}[entry.kind]
    pictures = entry.kind != "audio"
    if (str(array.dtype), array.ndim) != wanted or (pictures and array.shape[-1] != 3) or not array.size:
        raise InvalidRequest(
            f"{entry.path} is {array.dtype} {list(array.shape)}, must be {wanted[0]} with {wanted[1]} dimensions"
            + (", the last of size 3" if pictures else ""),
            item=label,
        )
    if entry.kind == "image":
        return Media("image", Image.fromarray(array))
    name, value = ("fps", entry.fps) if entry.kind == "video" else ("sampling_rate", entry.sampling_rate)
    return Media(entry.kind, array, {name: value} if value is not None else {})


def drawing(family: Family, layout: PromptLayout, prepared: Sequence[Prepared]) -> Iterator[str]:
    """One line per stretch of text and per run: position, length, what it is, and its slots (█) and framing (│)."""
    member, slot = layout.member_item, layout.slot_item >= 0
    names = _labels([item.modality for item in prepared])
    edges = np.flatnonzero(np.diff(member, prepend=-2, append=-2)).tolist()
    for start, end in zip(edges, edges[1:], strict=False):
        item = int(member[start])
        if item < 0:
            text = family.tokenizer.decode(layout.token_ids[start:end].tolist(), skip_special_tokens=False)
            shown = json.dumps(text, ensure_ascii=False)
            what, detail = "text", shown if len(shown) <= BAR + 20 else f"{shown[: BAR // 2]} … {shown[-BAR // 2 :]}"
        else:
            marks = "".join("█" if taken else "│" for taken in slot[start:end])
            what = names[item]
            detail = marks if len(marks) <= BAR else f"{marks[: BAR // 2]} … {marks[-BAR // 2 :]}"
            rows = layout.slot_row[start:end][slot[start:end]]
            detail += f"  rows {rows[0]}-{rows[-1]}" if len(rows) else "  no rows"
        yield f"{start:>7} {end - start:>6}  {what:<10} {detail}"
    yield f"{len(layout)} tokens, {int(layout.rows.sum())} embedding rows in {len(prepared)} items"
