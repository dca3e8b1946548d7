# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .._rules import refuse


@dataclass
class VideoData:
    frames: list[Any]
    metadata: dict[str, Any]
    audio: Any = None

    def __post_init__(self) -> None:
        if not self.frames:
            refuse("video-data", "frames list cannot be empty")
        if not isinstance(self.metadata, dict):
            refuse("video-data", "metadata must be a dictionary", TypeError)
