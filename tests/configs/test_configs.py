# SPDX-License-Identifier: Apache-2.0
"""The engine YAMLs: every model and role is there, every key is TensorRT-LLM's, and none turns reuse off."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dynamo_epd.engine.reference.config import load_engine_config
from dynamo_epd.engine.trtllm.engine_args import load, problems

CONFIGS = Path(__file__).parents[2] / "configs"
ROLES = ("encode", "prefill", "decode", "agg")
MODELS = (
    "cosmos3",
    "llama4-maverick",
    "llama4-scout",
    "llava-v1.6-mistral-7b-hf",
    "nemotron-nano-omni-v3",
    "nemotron-nano-v2-vl",
    "phi-4-multimodal-instruct",
    "qwen2-vl-7b-instruct",
    "qwen2.5-vl-7b-instruct",
    "qwen3-vl-2b-instruct",
    "qwen3-vl-30b-a3b-instruct",
    "qwen3-vl-30b-a3b-instruct-fp8",
    "toy",
)
GB200 = ("llama4-maverick", "llama4-scout", "qwen3-vl-30b-a3b-instruct")
SERVE = CONFIGS / "serve"  # graphs of services, which are no engine configurations
FILES = sorted(f for f in CONFIGS.rglob("*.yaml") if SERVE not in f.parents)
GENERATING = [f for f in FILES if f.stem != "encode"]


def name(path: Path) -> str:
    return str(path.relative_to(CONFIGS))


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_every_model_has_every_role_and_nothing_else_is_there():
    wanted = {f"{model}/{role}.yaml" for model in MODELS for role in ROLES}
    wanted |= {f"{model}/gb200/{role}.yaml" for model in GB200 for role in ROLES}
    assert {name(f) for f in FILES} == wanted


@pytest.mark.parametrize("path", FILES, ids=name)
def test_keys_and_types_are_those_of_llm_args(path):
    assert problems(read(path)) == []
    assert path.read_text(encoding="utf-8").startswith("# SPDX-License-Identifier: Apache-2.0\n")


@pytest.mark.parametrize("path", GENERATING, ids=name)
def test_reuse_and_chunked_prefill_are_on_and_said(path):
    values = read(path)
    assert values["kv_cache_config"]["enable_block_reuse"] is True
    assert values["enable_chunked_prefill"] is True
    assert load(path, None).block_reuse


@pytest.mark.parametrize("path", GENERATING, ids=name)
def test_prefill_and_decode_can_hand_over_and_give_up_in_time(path):
    transceiver = read(path).get("cache_transceiver_config")
    if path.stem == "agg":
        assert transceiver is None
        return
    assert load(path, None).transceiver and transceiver["kv_transfer_timeout_ms"] > 0
    assert path.stem != "prefill" or read(path)["disable_overlap_scheduler"] is True


@pytest.mark.parametrize("folder", sorted({f.parent for f in FILES}), ids=name)
def test_roles_of_a_model_agree_on_block_size_and_lengths(folder):
    files = [read(folder / f"{role}.yaml") for role in ROLES[1:]]
    assert len({f["kv_cache_config"]["tokens_per_block"] for f in files}) == 1
    assert len({f["max_seq_len"] for f in files}) == 1
    for f in files[:2]:
        assert f["cache_transceiver_config"] == files[0]["cache_transceiver_config"]
        assert f["cache_transceiver_config"].get("max_tokens_in_buffer", f["max_seq_len"]) >= f["max_seq_len"]


@pytest.mark.parametrize("path", [f for f in FILES if f.parent.name == "gb200"], ids=name)
def test_gb200_has_four_gpus_a_node(path):
    values = read(path)
    assert values["gpus_per_node"] == 4
    if values["tensor_parallel_size"] > 4:
        assert values["tensor_parallel_size"] % 4 == 0 and values["allreduce_strategy"] == "MNNVL"


@pytest.mark.parametrize("role", ROLES[1:])
def test_the_toy_files_run_the_reference_engine_too(role):
    from dynamo_epd.demo.toy_data import TOY_MODEL

    assert load_engine_config(CONFIGS / "toy" / f"{role}.yaml", None, TOY_MODEL).tokens_per_block == 8


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"enable_block_reuse": True}, "enable_block_reuse is not a key"),
        ({"kv_cache_config": {"enable_block_reuse": "yes"}}, "must be bool"),
        ({"kv_cache_config": {"tokens_per_blok": 32}}, "kv_cache_config.tokens_per_blok is not a key"),
        ({"kv_cache_config": [1]}, "must be a mapping"),
        ({"max_seq_len": True}, "must be int"),
        ({"cache_transceiver_config": {"backend": "nixl"}}, "must be DEFAULT|UCX|NIXL|MOONCAKE|MPI"),
        ({"embedding_arena_gb": 4}, "embedding_arena_gb is not a key"),
    ],
)
def test_what_llm_args_does_not_know_is_found(values, said):
    [problem] = problems(values)
    assert said in problem
