# SPDX-License-Identifier: Apache-2.0
"""Every public name of TensorRT-LLM that this package touches, imported in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

from ...contract.errors import ConfigError

REQUIRED: Mapping[str, str] = {
    "LLM": "tensorrt_llm",
    "SamplingParams": "tensorrt_llm",
}
"""Name -> module; without one of these there is no engine."""

OPTIONAL: Mapping[str, str] = {
    "VideoData": "tensorrt_llm.inputs.utils",
    "PreprocessedInputs": "tensorrt_llm.llmapi.llm",
    "MultimodalInput": "tensorrt_llm.inputs.multimodal",
    "MultimodalParams": "tensorrt_llm.inputs.multimodal",
    "MultimodalRuntimeData": "tensorrt_llm.inputs.multimodal",
    "DisaggregatedParams": "tensorrt_llm.llmapi",
    "Logprob": "tensorrt_llm.executor.result",
    "RequestError": "tensorrt_llm.executor.utils",
    "get_global_disagg_request_id": "tensorrt_llm.llmapi.disagg_utils",
    "MultimodalEncoder": "tensorrt_llm",
    "SharedTensorContainer": "tensorrt_llm._torch.shared_tensor",
}
"""Name -> module; a version that lacks one of these is served another way, or refused, by ``capabilities``."""


@dataclass(frozen=True)
class Names:
    """The names as this installation has them; None where it has not. ``version`` is for messages only."""

    version: str
    LLM: Any
    SamplingParams: Any
    PreprocessedInputs: Any = None
    MultimodalInput: Any = None
    MultimodalParams: Any = None
    MultimodalRuntimeData: Any = None
    DisaggregatedParams: Any = None
    Logprob: Any = None
    RequestError: Any = None
    get_global_disagg_request_id: Any = None
    MultimodalEncoder: Any = None
    SharedTensorContainer: Any = None
    VideoData: Any = None


def load_names() -> Names:
    """Import TensorRT-LLM.

    Raises:
        ConfigError: it cannot be imported, or is something else of that name (the placeholder of the public package
            index, for one).
    """
    found: dict[str, Any] = {}
    for name, module in REQUIRED.items():
        try:
            found[name] = getattr(import_module(module), name)
        except Exception as error:
            # Importing it loads CUDA libraries and MPI, which fail in ways of their own.
            raise ConfigError(
                f"TensorRT-LLM cannot be used: {module}.{name}: {type(error).__name__}: {error}. Run in NVIDIA's "
                "TensorRT-LLM container, or choose --engine reference"
            ) from error
    for name, module in OPTIONAL.items():
        try:
            found[name] = getattr(import_module(module), name, None)
        except ImportError:
            found[name] = None
    return Names(version=str(getattr(import_module("tensorrt_llm"), "__version__", "unknown")), **found)


def field_names(kind: Any) -> frozenset[str]:
    """The fields of a dataclass, or nothing for what is None or no dataclass."""
    try:
        return frozenset(f.name for f in fields(kind))
    except TypeError:
        return frozenset()
