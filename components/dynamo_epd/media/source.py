# SPDX-License-Identifier: Apache-2.0
"""The media that a request names, as typed references.

The frontend sends ``multi_modal_data`` = ``{"image_url": [{"Url": ...}, ...], "video_url": ..., "audio_url": ...}`` in
the order of the prompt within each modality, and ``multi_modal_uuids`` with the same keys where the caller gave any.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import unquote

from ..contract.errors import InvalidRequest
from ..contract.handoff import Modality
from .limits import MediaLimits

_MODALITIES: dict[str, Modality] = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
_PICKLES = (".pt", ".pth", ".pkl")
_MAX_UUID_LENGTH = 512


@dataclass(frozen=True)
class MediaReference:
    """One media item of a request, not fetched yet.

    Attributes:
        modality: ``image``, ``video`` or ``audio``.
        index: position among the request's items of this modality, from 0.
        label: the item's name in messages: the modality and the position from 1 (``"image 2"``).
        url: as the caller gave it; not part of ``repr``, for it may be a whole file.
        uuid: the caller's id of the item, or None.
        kind: ``embedding`` for a safetensors file with the encoder's output, else ``media``.
    """

    modality: Modality
    index: int
    label: str
    url: str = field(repr=False)
    uuid: str | None = None
    kind: Literal["media", "embedding"] = "media"


def parse_request_media(
    multi_modal_data: Any, multi_modal_uuids: Any = None, *, limits: MediaLimits
) -> list[MediaReference]:
    """The items of a request: images, then videos, then audio clips, each in prompt order. Empty for text only.

    Args:
        multi_modal_data: the request's field of this name, or None.
        multi_modal_uuids: likewise; a list per modality with None for an item without.

    Raises:
        InvalidRequest: more than ``limits.max_items`` items, an item that is not a URL (decoded by the
            frontend, or known by its uuid only), an unknown kind of media, uuids that do not fit the items.
    """
    data = _lists(multi_modal_data, "multi_modal_data")
    uuids = _lists(multi_modal_uuids, "multi_modal_uuids")
    references = []
    count = sum(map(len, data.values()))
    if count > limits.max_items:
        raise InvalidRequest(f"the request has {count} media items, the limit is {limits.max_items}; send fewer")
    for key, modality in _MODALITIES.items():
        items = data.get(key, [])
        ids = uuids.get(key) or [None] * len(items)
        if len(ids) != len(items):
            raise InvalidRequest(f"multi_modal_uuids.{key} has {len(ids)} entries for {len(items)} {modality} items")
        for index, (item, uuid) in enumerate(zip(items, ids, strict=True)):
            label = f"{modality} {index + 1}"
            url = _url(item, label)
            references.append(
                MediaReference(modality, index, label, url, _checked_uuid(uuid, label), _kind(url, label))
            )
    return references


def _lists(value: Any, name: str) -> dict[str, list[Any]]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} must be an object")
    for key, items in value.items():
        if key not in _MODALITIES and items:
            raise InvalidRequest(f"{name}: unknown kind of media {str(key)[:40]!r}; known are {', '.join(_MODALITIES)}")
        if items is not None and not isinstance(items, list):
            raise InvalidRequest(f"{name}.{key} must be a list")
    return {key: items or [] for key, items in value.items()}


def _url(item: Any, label: str) -> str:
    if isinstance(item, Mapping):
        url = item.get("Url")
        if isinstance(url, str):
            return url
        if "Decoded" in item:
            raise InvalidRequest(
                "was decoded by the frontend, whose result this worker does not read; start the frontend and workers "
                "without frontend decoding",
                item=label,
            )
        if "UuidOnly" in item:
            raise InvalidRequest("has a uuid and no content; send the content with it", item=label)
    raise InvalidRequest("is not given by a URL", item=label)


def _checked_uuid(uuid: Any, label: str) -> str | None:
    if uuid is None:
        return None
    if not isinstance(uuid, str) or not 0 < len(uuid) <= _MAX_UUID_LENGTH:
        raise InvalidRequest(f"its uuid must be a string of 1 to {_MAX_UUID_LENGTH} characters", item=label)
    return uuid


def _kind(url: str, label: str) -> Literal["media", "embedding"]:
    """By the media type of a ``data:`` URL, else by the extension of the path, in any letter case."""
    if url[:5].lower() == "data:":
        media_type = url[5:200].partition(",")[0].partition(";")[0]
        return "embedding" if "safetensors" in media_type.lower() else "media"
    path = unquote(re.split(r"[?#]", url[:8192], maxsplit=1)[0]).lower()
    if path.endswith(_PICKLES):
        raise InvalidRequest(
            "names a pickle-based file, which can run code and is not opened; save the embedding as .safetensors",
            item=label,
        )
    return "embedding" if path.endswith(".safetensors") else "media"
