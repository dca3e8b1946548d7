# SPDX-License-Identifier: Apache-2.0
"""A stand-in for TensorRT-LLM, for tests only; see ``_rules``."""

from ._rules import VARIANT
from .llmapi.llm import LLM
from .llmapi.mm_encoder import MultimodalEncoder
from .sampling_params import SamplingParams

__version__ = f"0.0+standin.{VARIANT.replace('_', '-')}"

__all__ = ["LLM", "MultimodalEncoder", "SamplingParams"]
