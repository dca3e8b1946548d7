# SPDX-License-Identifier: Apache-2.0
"""Which engine YAMLs are taken, and what is said about the others."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from dynamo_epd.contract.errors import ConfigError
from dynamo_epd.demo.toy_data import TOY_MODEL
from dynamo_epd.engine.reference.config import ReferenceConfig, load_engine_config


def load(tmp_path: Path, text: str, override: str | None = None) -> ReferenceConfig:
    path = tmp_path / "engine.yaml"
    path.write_text(text)
    return load_engine_config(path, override, TOY_MODEL)


def test_the_model_gives_the_length_and_everything_else_has_a_default() -> None:
    assert load_engine_config(None, None, TOY_MODEL) == ReferenceConfig(max_seq_len=4096)


def test_a_file_of_tensorrt_llm_is_read_and_what_means_nothing_here_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        config = load(
            tmp_path,
            """
            tensor_parallel_size: 4
            max_num_tokens: 4096
            max_batch_size: 16
            max_seq_len: 2048
            max_beam_width: 1
            backend: pytorch
            enable_chunked_prefill: true
            disable_overlap_scheduler: true
            kv_cache_config:
              enable_block_reuse: false
              enable_partial_reuse: false
              copy_on_partial_reuse: true
              tokens_per_block: 64
              free_gpu_memory_fraction: 0.8
              max_tokens: 8192
              dtype: fp8
            cache_transceiver_config:
              backend: DEFAULT
            """,
        )
    assert config == ReferenceConfig(2048, 16, 4096, True, 64, 8192, False, False, 0.8)
    (record,) = caplog.records
    assert "tensor_parallel_size" in record.getMessage() and "kv_cache_config.dtype" in record.getMessage()


def test_the_override_wins_key_by_key(tmp_path: Path) -> None:
    text = "max_seq_len: 100\nkv_cache_config: {tokens_per_block: 16, max_tokens: 800}"
    override = json.dumps({"kv_cache_config": {"tokens_per_block": 8}, "max_batch_size": 3})
    config = load(tmp_path, text, override)
    assert config == replace(load(tmp_path, text), tokens_per_block=8, max_batch_size=3)
    assert config.max_tokens == 800


def test_more_positions_than_the_model_has_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(tmp_path, "max_seq_len: 10000").max_seq_len == 4096
    assert "4096" in caplog.text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("max_seq_length: 5", "max_seq_length is not a key; did you mean max_seq_len?"),
        ("kv_cache_conf: {}", "did you mean kv_cache_config?"),
        ("kv_cache_config: {enable_block_resue: true}", "did you mean kv_cache_config.enable_block_reuse?"),
        ("kv_cache_config: {tokens-per-block: 8}", "did you mean kv_cache_config.tokens_per_block?"),
        ("enable_block_reuse: true", "enable_block_reuse belongs under kv_cache_config"),
        ("kv_cache_config: {max_num_tokens: 8}", "kv_cache_config.max_num_tokens belongs at the top level"),
        ("kv_cache_config: {enable_block_reuse: 'yes'}", "must be true or false"),
        ("enable_chunked_prefill: 1", "must be true or false"),
        ("max_batch_size: true", "must be a whole number"),
        ("max_batch_size: 0", "at least 1"),
        ("max_num_tokens: 10.5", "must be a whole number"),
        ("kv_cache_config: {free_gpu_memory_fraction: 1.5}", "at most 1"),
        ("kv_cache_config: [1]", "must be a mapping"),
        ("kv_cache_config: {tokens_per_block: 32, max_tokens: 20}", "not even one block"),
        ("- 1", "holds a list"),
        ("a: [", "cannot be read"),
        ("5: 6", "keys must be words"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text)
    assert problem in str(error.value)


def test_files_and_overrides_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_engine_config(tmp_path / "missing.yaml", None, TOY_MODEL)
    with pytest.raises(ConfigError, match="not JSON"):
        load_engine_config(None, "{", TOY_MODEL)
    with pytest.raises(ConfigError, match="holds a list"):
        load_engine_config(None, "[1]", TOY_MODEL)
    with pytest.raises(ConfigError, match="not a model directory"):
        load_engine_config(None, None, tmp_path)


def test_empty_values_are_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "max_batch_size:\nkv_cache_config:\n") == ReferenceConfig(max_seq_len=4096)
    assert load(tmp_path, "") == ReferenceConfig(max_seq_len=4096)
