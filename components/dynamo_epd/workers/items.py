# SPDX-License-Identifier: Apache-2.0
"""From the bytes of one media item to what the encoder takes: the right decoder, then the family's processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..contract.errors import InvalidRequest
from ..media.image import decode_image
from ..media.limits import MediaLimits
from ..media.source import MediaReference
from ..models.base import Family, Media, Prepared

Decode = Callable[[bytes, Mapping[str, Any], MediaLimits, str], Media]


def _image(data: bytes, kwargs: Mapping[str, Any], limits: MediaLimits, label: str) -> Media:
    return Media("image", decode_image(data, limits=limits, label=label).image)


_DECODERS: dict[tuple[str, str], Decode] = {("image", "media"): _image}


def prepare(
    family: Family, ref: MediaReference, data: bytes, kwargs: Mapping[str, Any], limits: MediaLimits
) -> Prepared:
    """Decode and preprocess one item. CPU work, thread-safe.

    Raises:
        InvalidRequest: the bytes are not what they should be, or the model's processor refuses them.
    """
    decode = _DECODERS.get((ref.modality, ref.kind))
    if decode is None:
        raise InvalidRequest(f"{ref.modality} {ref.kind} items are not supported yet; send images", item=ref.label)
    media = decode(data, kwargs, limits, ref.label)
    try:
        return family.prepare(media, kwargs)
    except InvalidRequest as error:
        raise error if error.item else InvalidRequest(str(error), item=ref.label) from error
