# SPDX-License-Identifier: Apache-2.0
"""Checks of the model and the engine: family, TensorRT-LLM's capabilities, and whether block reuse is safe."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from .. import models
from ..contract.errors import ConfigError
from ..engine.trtllm.capabilities import REUSE_KEY, TABLE, Capabilities, probe, refusal
from ..engine.trtllm.engine_args import EngineArgs, load, problems
from ..engine.trtllm.names import load_names
from .finding import Finding, green, red, yellow

SPLIT_ITEMS = frozenset(
    {"qwen3_vl", "qwen3_vl_moe", "cosmos3_omni", "cosmos3_edge", "nemotron_h_omni", "qwen2_5_omni", "qwen3_omni_moe"}
)
"""Model types some of whose items (videos, mostly) are not one run of tokens."""

RECURRENT = frozenset({"nemotron_h_omni"})
"""Model types that keep a recurrent state beside their KV."""


def transformers() -> Finding:
    try:
        import transformers as module
    except Exception as error:
        return red("transformers", f"cannot be imported: {error}", "pip install 'transformers>=5.10,<6'")
    return green("transformers", str(module.__version__))


def family(model: Path) -> Finding:
    """Whether the model is of a family that this package knows."""
    kind = model_type(model)
    if kind is None:
        return red("model", f"{model} has no config.json with a model_type", "give a Hugging Face model directory")
    if kind not in models.FAMILIES:
        return red("model", f"type {kind!r} has no family here", f"known: {', '.join(sorted(models.FAMILIES))}")
    return green("model", f"{model.name}: {kind}")


def model_type(model: Path) -> str | None:
    try:
        value = json.loads((model / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    return value if isinstance(value, str) else None


def capabilities() -> tuple[Capabilities | None, list[Finding]]:
    """What the installed TensorRT-LLM can do; one finding per line of its table."""
    if find_spec("tensorrt_llm") is None:
        return None, [
            yellow(
                "TensorRT-LLM", "not installed", "use NVIDIA's TensorRT-LLM container; the reference engine needs none"
            )
        ]
    try:
        caps = probe(load_names())
    except ConfigError as error:
        return None, [red("TensorRT-LLM", str(error), "use NVIDIA's TensorRT-LLM container")]
    lines = [green("TensorRT-LLM", caps.version)]
    for row in TABLE:
        name = f"TensorRT-LLM: {row.name}"
        if row.have(caps):
            lines.append(green(name, row.then))
        else:
            lines.append((red if row.essential else yellow)(name, row.otherwise, "use a newer TensorRT-LLM"))
    return caps, lines


def block_reuse(
    caps: Capabilities | None, engine_args: Path | None, overrides: str | None, kind: str | None
) -> Iterator[Finding]:
    """The engine YAML: its keys, and whether reuse is on and safe with this version and this model."""
    try:
        args = load(engine_args, overrides)
    except ConfigError as error:
        yield red("engine YAML", str(error), "correct the file")
        return
    if engine_args is not None or overrides:
        yield from _keys(args)
    check = "block reuse"
    if not args.block_reuse:
        yield yellow(check, f"{REUSE_KEY} is off: every prompt is computed in full", f"set {REUSE_KEY}: true")
        return
    if caps is None:
        yield green(check, "on; the reference engine's keys are exact")
        return
    reason = refusal(caps, block_reuse=True)
    if reason:
        yield red(check, reason, f"a newer TensorRT-LLM, or {REUSE_KEY}: false")
    elif kind in SPLIT_ITEMS and caps.form not in ("seven", "item_runs"):
        how = "share by their content only" if caps.prefix_sum else "share nothing"
        yield yellow(
            check,
            f"on and safe, but {kind} has items of several runs, which {caps.version} cannot key exactly: they {how}",
            "use a newer TensorRT-LLM",
        )
    elif kind in RECURRENT:
        yield yellow(
            check,
            f"on; {kind} keeps a recurrent state, which TensorRT-LLM must snapshot for a prefix to be reused",
            "see mamba_state_config and use_kv_cache_manager_v2 in TensorRT-LLM's own documentation",
        )
    else:
        yield green(check, "on, and keyed by content")


def environment(env: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Variables that change what TensorRT-LLM does with embeddings from outside."""
    if env.get("TLLM_MULTIMODAL_DISAGGREGATED") == "1":
        yield yellow(
            "TLLM_MULTIMODAL_DISAGGREGATED",
            "1: prefill and agg load no encoder of their own, which saves memory; some releases then lose embeddings",
            "unset it if prefill fails on media",
        )


def _keys(args: EngineArgs) -> Iterator[Finding]:
    found = problems(args.values)
    for problem in found:
        yield yellow("engine YAML", problem, "TensorRT-LLM refuses keys that it does not know; correct or remove it")
    if not found:
        yield green("engine YAML", "all keys are TensorRT-LLM's")
