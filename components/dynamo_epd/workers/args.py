# SPDX-License-Identifier: Apache-2.0
"""Flags of the workers. Dynamo's own runtime flags (namespace, discovery, planes, ...) come from its SDK."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dynamo.common.backend.worker import WorkerConfig
from dynamo.common.configuration.groups import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.common.constants import DisaggregationMode

from ..contract.errors import ConfigError
from ..engine import arguments
from ..transfer.config import TransferConfig, add_transfer_arguments, transfer_config

Role = Literal["encode", "prefill", "decode", "agg"]

_COMPONENTS: dict[Role, str] = {"encode": "encode", "prefill": "prefill", "decode": "backend", "agg": "backend"}
_GIB = 1 << 30

# dynamo.trtllm's flags for single engine keys, and where these stand in the engine YAML.
_ENGINE_FLAGS: dict[str, tuple[type, tuple[str, ...]]] = {
    "--tensor-parallel-size": (int, ("tensor_parallel_size",)),
    "--pipeline-parallel-size": (int, ("pipeline_parallel_size",)),
    "--expert-parallel-size": (int, ("moe_expert_parallel_size",)),
    "--max-batch-size": (int, ("max_batch_size",)),
    "--max-num-tokens": (int, ("max_num_tokens",)),
    "--max-seq-len": (int, ("max_seq_len",)),
    "--kv-block-size": (int, ("kv_cache_config", "tokens_per_block")),
    "--free-gpu-memory-fraction": (float, ("kv_cache_config", "free_gpu_memory_fraction")),
}


@dataclass(frozen=True)
class WorkerArgs:
    """What a worker was told, checked. Sizes in bytes, times in seconds; paths exist."""

    role: Role
    model: Path
    served_model_name: str
    engine: Literal["auto", "trtllm", "reference"]
    engine_args: Path | None
    engine_overrides: str | None
    keys: Literal["exact", "placeholder"]
    device: Literal["auto", "cpu", "cuda"]
    dtype: str
    on_incomplete_metadata: Literal["refuse", "uncacheable"]
    encode_fallback: Literal["none", "ask"]
    encode_endpoint: str
    encode_timeout: float
    allowed_local_media_path: Path | None
    max_file_size: int
    max_items: int
    encode_threads: int
    encode_batch_items: int
    encoder: Literal["hf", "trtllm"]
    embedding_cache_bytes: int
    isolate_embedding_cache_by_salt: bool
    transfer: TransferConfig
    publish_kv_events: bool
    health_needs_peers: bool
    trace_requests: Path | None
    discovery_backend: str
    request_plane: str


def parser() -> argparse.ArgumentParser:
    """The flags of a worker, Dynamo's own included."""
    p = argparse.ArgumentParser(
        prog="python -m dynamo_epd", description="A Dynamo worker for multimodal encode, prefill, decode or agg."
    )
    DynamoRuntimeArgGroup().add_arguments(p)
    g = p.add_argument_group("role and model")
    g.add_argument(
        "--disaggregation-mode",
        choices=[*_COMPONENTS, "pd"],
        default="agg",
        help="pd is dynamo.trtllm's name for agg (default: %(default)s)",
    )
    g.add_argument("--enable-multimodal", action="store_true", help="as these workers always are")
    g.add_argument("--modality", choices=["multimodal"], help="as these workers always are")
    g.add_argument("--model", "--model-path", required=True, metavar="DIR", help="Hugging Face model directory")
    g.add_argument("--served-model-name", help="name that clients use (default: the directory's name)")
    g.add_argument(
        "--route-to-encoder",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="have the frontend send media requests to an encode worker first (default: on for prefill and agg)",
    )
    g.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    g.add_argument("--dtype", default="auto", help="dtype of weights and embeddings (default: the checkpoint's)")

    g = p.add_argument_group("engine (prefill, decode, agg)")
    g.add_argument("--engine", choices=["auto", "trtllm", "reference"], default="auto")
    g.add_argument("--extra-engine-args", metavar="FILE", help="engine YAML, with TensorRT-LLM's keys")
    g.add_argument("--override-engine-args", metavar="JSON", help="engine keys that override the YAML and the flags")
    for flag, (kind, path) in _ENGINE_FLAGS.items():
        g.add_argument(flag, type=kind, metavar="N", help=f"the engine key {'.'.join(path)}")
    g.add_argument(
        "--keys",
        choices=["exact", "placeholder"],
        default="exact",
        help="'placeholder' keys media by placeholder tokens, as engines do without exact metadata: WRONG ANSWERS; it "
        "exists to show them (reference engine only)",
    )
    g.add_argument("--on-incomplete-metadata", choices=["refuse", "uncacheable"], default="refuse")
    g.add_argument(
        "--encode-fallback",
        choices=["none", "ask"],
        default="none",
        help="'ask': a media request that arrives without a handoff is sent to an encode worker once, from here",
    )
    g.add_argument("--encode-endpoint", metavar="NS.COMPONENT.ENDPOINT", help="whom 'ask' asks")
    g.add_argument("--encode-timeout", type=float, default=30.0, metavar="S")
    g.add_argument(
        "--publish-kv-events",
        "--publish-events-and-metrics",
        action="store_true",
        help="tell KV-aware routers which blocks are reusable",
    )
    g.add_argument(
        "--health-needs-peers",
        action="store_true",
        help="the health check also fails while a peer that a transfer failed with, less than --offer-ttl ago, refuses "
        "connections (default: a worker is not blamed for its peers)",
    )
    g.add_argument("--trace-requests", metavar="DIR", help="write one file per request for 'dynamo-epd explain'")

    g = p.add_argument_group("media (encode)")
    g.add_argument("--allowed-local-media-path", metavar="DIR", help="allow file: URLs below this directory")
    g.add_argument("--max-file-size-mb", type=float, default=50.0)
    g.add_argument("--max-media-items", type=int, default=32, help="media items in one request")
    g.add_argument(
        "--encoder", choices=["hf", "trtllm"], default="hf", help="transformers' encoder, or TensorRT-LLM's own"
    )
    g.add_argument("--encode-threads", type=int, default=min(4, os.cpu_count() or 1), help="decode and preprocess")
    g.add_argument("--encode-batch-items", type=int, default=16, help="items that one encoder call takes")
    g.add_argument("--isolate-embedding-cache-by-salt", action="store_true")

    add_transfer_arguments(p)
    return p


def parse(argv: Sequence[str] | None) -> tuple[WorkerArgs, WorkerConfig]:
    """Parse the command line.

    Raises:
        ConfigError: values that cannot be used, or that contradict each other.
        SystemExit: argparse's own, on unknown flags and ``--help``.
    """
    a = parser().parse_args(argv)
    runtime = DynamoRuntimeConfig.from_cli_args(a)
    runtime.validate()
    role: Role = "agg" if a.disaggregation_mode == "pd" else a.disaggregation_mode
    model = Path(a.model).expanduser()
    if not (model / "config.json").is_file():
        raise ConfigError(f"--model {a.model}: there is no config.json in it; give a Hugging Face model directory")
    route = a.route_to_encoder if a.route_to_encoder is not None else role in ("prefill", "agg")
    if route and role in ("encode", "decode"):
        raise ConfigError(f"--route-to-encoder has no meaning on a {role} worker; set it on prefill or agg")
    cache = int(a.multimodal_embedding_cache_capacity_gb * _GIB)
    sizes: dict[str, int] = {}
    if role == "encode":
        # Cached embeddings live in the arena; unless its size is given, it has room for those on their way as well.
        sizes = {"keep_bytes": cache, "arena_bytes": max(TransferConfig.arena_bytes, cache + cache // 4 + _GIB // 4)}
    if a.transfer_arena_bytes is not None or "DYN_EPD_TRANSFER_ARENA_BYTES" in os.environ:
        sizes.pop("arena_bytes", None)
    transfer = transfer_config(a, agent_prefix=f"dynamo-epd-{role}", **sizes)
    if role == "encode" and cache > transfer.arena_bytes:
        raise ConfigError(
            f"--multimodal-embedding-cache-capacity-gb {cache / _GIB:g} does not fit --transfer-arena-bytes "
            f"{transfer.arena_bytes}: cached embeddings live in the arena, so make it larger"
        )
    for name in ("encode_timeout", "max_file_size_mb", "max_media_items"):
        if getattr(a, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0")
    args = WorkerArgs(
        role=role,
        model=model,
        served_model_name=a.served_model_name or model.resolve().name,
        engine=a.engine,
        engine_args=_existing(a.extra_engine_args, "--extra-engine-args"),
        engine_overrides=_overrides(a),
        keys=a.keys,
        device=a.device,
        dtype=a.dtype,
        on_incomplete_metadata=a.on_incomplete_metadata,
        encode_fallback=a.encode_fallback,
        encode_endpoint=a.encode_endpoint or f"{runtime.namespace}.{_COMPONENTS['encode']}.generate",
        encode_timeout=a.encode_timeout,
        allowed_local_media_path=_existing(a.allowed_local_media_path, "--allowed-local-media-path"),
        max_file_size=int(a.max_file_size_mb * (1 << 20)),
        max_items=a.max_media_items,
        encode_threads=max(1, a.encode_threads),
        encode_batch_items=max(1, a.encode_batch_items),
        encoder=a.encoder,
        embedding_cache_bytes=cache,
        isolate_embedding_cache_by_salt=a.isolate_embedding_cache_by_salt,
        transfer=transfer,
        publish_kv_events=a.publish_kv_events,
        health_needs_peers=a.health_needs_peers,
        trace_requests=Path(a.trace_requests) if a.trace_requests else None,
        discovery_backend=runtime.discovery_backend,
        request_plane=runtime.request_plane,
    )
    config = WorkerConfig.from_runtime_config(
        runtime,
        model_name=str(model),
        served_model_name=args.served_model_name,
        component=_component(runtime.endpoint) or _COMPONENTS[role],
        endpoint="generate",
        disaggregation_mode=DisaggregationMode(role),
        route_to_encoder=route,
    )
    return args, config


def _overrides(a: argparse.Namespace) -> str | None:
    """``--override-engine-args`` laid over what the flags for single keys say, as JSON."""
    chosen: dict[str, Any] = {}
    for flag, (_, path) in _ENGINE_FLAGS.items():
        value = getattr(a, flag[2:].replace("-", "_"))
        if value is not None:
            place = chosen if len(path) == 1 else chosen.setdefault(path[0], {})
            place[path[-1]] = value
    if not chosen:
        return a.override_engine_args
    return json.dumps(arguments.overlaid(chosen, a.override_engine_args))


def _component(endpoint: str | None) -> str | None:
    """The component of ``--endpoint dyn://namespace.component.endpoint``."""
    if not endpoint:
        return None
    parts = endpoint.removeprefix("dyn://").split(".")
    if len(parts) != 3:
        raise ConfigError(f"--endpoint {endpoint}: expected dyn://namespace.component.endpoint")
    return parts[1]


def _existing(path: str | None, flag: str) -> Path | None:
    if not path:
        return None
    found = Path(path).expanduser()
    if not found.exists():
        raise ConfigError(f"{flag} {path}: no such file or directory")
    return found
