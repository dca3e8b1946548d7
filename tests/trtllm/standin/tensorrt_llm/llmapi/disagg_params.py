# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from .._rules import VARIANT, refuse

if VARIANT == "four":

    @dataclass
    class _Fields:
        request_type: str | None = None
        first_gen_tokens: list[int] | None = None
        ctx_request_id: int | None = None
        opaque_state: bytes | None = None
        draft_tokens: list[int] | None = None
        multimodal_embedding_handles: list[dict[str, Any]] | None = None
        multimodal_hashes: list[list[int]] | None = None

else:

    @dataclass
    class _Fields:  # type: ignore[no-redef]
        request_type: str | None = None
        first_gen_tokens: list[int] | None = None
        first_gen_log_probs: list[Any] | None = None
        ctx_request_id: int | None = None
        opaque_state: bytes | None = None
        draft_tokens: list[int] | None = None
        disagg_request_id: int | None = None
        ctx_dp_rank: int | None = None
        ctx_info_endpoint: list[str] | None = None
        multimodal_embedding_handles: list[dict[str, Any]] | None = None
        multimodal_hashes: list[list[int]] | None = None
        mrope_position_ids_handle: dict[str, Any] | None = None
        mrope_position_deltas_handle: dict[str, Any] | None = None


@dataclass
class DisaggregatedParams(_Fields):
    def __post_init__(self) -> None:
        if self.request_type not in (None, "context_only", "generation_only", "context_and_generation"):
            refuse("request-type", f"unknown request type {self.request_type}")
        if self.multimodal_embedding_handles is not None and self.multimodal_hashes is None:
            words = [secrets.randbits(32) - 2**31 for _ in range(8)]
            self.multimodal_hashes = [words] * len(self.multimodal_embedding_handles)
