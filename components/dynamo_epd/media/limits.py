# SPDX-License-Identifier: Apache-2.0
"""How much of a machine one media item may use."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..contract.errors import ConfigError, InvalidRequest

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class MediaLimits:
    """What a request may ask for; more is ``InvalidRequest``, found out before the memory is used.

    Attributes:
        max_file_size_bytes: bytes of one item as it is stored, whatever the scheme it comes by.
        fetch_timeout: seconds for fetching one item, redirects included.
        max_items: media items in one request.
        max_image_pixels: width x height of an image or of one video frame; Pillow refuses images beyond 178,956,970.
        max_video_frames: frames taken from one video.
        max_video_pixels: frames x width x height taken from one video (3 bytes each).
        max_video_source_frames: frames that a video may have before sampling; they are all decoded up to the last one.
        max_video_duration: seconds.
        max_audio_duration: seconds.

    Raises:
        ConfigError: a limit that is not positive.
    """

    max_file_size_bytes: int = 50 * MEGABYTE
    fetch_timeout: float = 30.0
    max_items: int = 64
    max_image_pixels: int = 64 * MEGABYTE
    max_video_frames: int = 768
    max_video_pixels: int = 256 * MEGABYTE
    max_video_source_frames: int = 36_000
    max_video_duration: float = 600.0
    max_audio_duration: float = 1800.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ConfigError(f"media limit {field.name} must be positive, not {value}")

    def check_size(self, nbytes: int, what: str, label: str) -> None:
        """Raise ``InvalidRequest`` when ``nbytes`` is zero or more than an item may have."""
        if nbytes == 0:
            raise InvalidRequest(f"{what} is empty (0 bytes)", item=label)
        if nbytes > self.max_file_size_bytes:
            raise InvalidRequest(f"{what} {self.too_large}", item=label)

    @property
    def too_large(self) -> str:
        """The words that follow the name of what exceeds ``max_file_size_bytes``."""
        limit = self.max_file_size_bytes
        return (
            f"is larger than the limit of {limit} bytes ({limit / MEGABYTE:.4g} MB); send a smaller file or raise "
            "--max-file-size-mb on the encode worker"
        )
