# SPDX-License-Identifier: Apache-2.0
"""Opening video and audio containers with PyAV, safely."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any

import av

from .content import damaged, not_decodable

if TYPE_CHECKING:
    from av.container import InputContainer

# Playlists (HLS, DASH, concat, ...) make FFmpeg open further files and URLs: only self-contained formats are tried.
_FORMATS = (
    "mov,mp4,matroska,webm,avi,mpegts,mpeg,mpegvideo,h264,hevc,ivf,flv,asf,gif,ogg,wav,w64,flac,mp3,aac,aiff,au,caf,amr,"
    "ac3,eac3"
)
_OPEN: dict[str, Any] = {"mode": "r", "options": {"format_whitelist": _FORMATS, "protocol_whitelist": "none"}}
# Titles in another encoding than UTF-8 are no fault; PyAV before 19 must be told.
if int(av.__version__.partition(".")[0]) < 19:
    _OPEN["metadata_errors"] = "replace"


@contextmanager
def open_container(data: bytes, wanted: str, label: str) -> Iterator[InputContainer]:
    """The container in ``data``; errors of FFmpeg inside the block are errors of the item.

    Args:
        wanted: what it is opened for, with an article (``"a video"``).

    Raises:
        InvalidRequest: unknown format, or damaged.
    """
    try:
        container = av.open(BytesIO(data), **_OPEN)
    except (av.FFmpegError, ValueError) as error:
        raise not_decodable(data, f"{wanted} that can be decoded", label) from error
    with container:
        try:
            yield container
        except av.FFmpegError as error:
            raise damaged(data, error, label) from error
