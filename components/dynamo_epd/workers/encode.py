# SPDX-License-Identifier: Apache-2.0
"""The encode worker: media references in, a handoff and offered embeddings out."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from dynamo._core import Context
from dynamo.common.backend.engine import EngineConfig, GenerateChunk, GenerateRequest
from dynamo.common.backend.health_check import build_health_check_payload, is_probe
from dynamo.common.backend.multimodal import encoder_terminal_chunk
from dynamo.common.http.url_validator import UrlValidationPolicy
from PIL import Image

from .. import media, models
from ..contract.digest import item_digest
from ..contract.handoff import HANDOFF_VERSION, Handoff, ItemHandoff, Modality, to_json_object
from ..media.source import MediaRef, parse_request_media
from ..models.base import Family, Media
from .base import EpdWorker
from .batching import EncodeBatcher
from .embeddings import Description, EmbeddingCache, Encoded
from .faults import to_handoff_error
from .prompt import prompt_digest

logger = logging.getLogger(__name__)
