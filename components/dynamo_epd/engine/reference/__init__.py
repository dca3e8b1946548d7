# SPDX-License-Identifier: Apache-2.0
"""The language model of a Hugging Face checkpoint on torch, with a paged KV cache and exact block reuse."""

from __future__ import annotations

from .engine import ReferenceEngine, create

__all__ = ["ReferenceEngine", "create"]
