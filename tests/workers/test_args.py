# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from dynamo_epd.contract.errors import ConfigError
from dynamo_epd.demo.toy_data import TOY_MODEL
from dynamo_epd.transfer.config import TransferConfig
from dynamo_epd.workers.args import parse

GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv("DYN_EPD_TRANSFER_ARENA_BYTES", raising=False)


def args(role, *more, model=TOY_MODEL):
    return parse(["--model", str(model), "--disaggregation-mode", role, *more])


def test_a_large_embedding_cache_brings_the_arena_that_it_needs():
    worker, _ = args("encode", "--multimodal-embedding-cache-capacity-gb", "4")
    assert worker.transfer.keep_bytes == 4 * GIB and worker.transfer.arena_bytes >= 5 * GIB
    worker, _ = args("encode")
    assert worker.transfer.keep_bytes == 0 and worker.transfer.arena_bytes == TransferConfig.arena_bytes


def test_an_arena_that_is_given_must_hold_the_cache():
    with pytest.raises(ConfigError, match="--transfer-arena-bytes"):
        args("encode", "--multimodal-embedding-cache-capacity-gb", "4", "--transfer-arena-bytes", str(GIB))
    worker, _ = args("encode", "--multimodal-embedding-cache-capacity-gb", "1", "--transfer-arena-bytes", str(2 * GIB))
    assert worker.transfer.arena_bytes == 2 * GIB


@pytest.mark.parametrize("role, routed", [("prefill", True), ("agg", True), ("encode", False), ("decode", False)])
def test_prefill_and_agg_route_media_to_encode(role, routed):
    worker, config = args(role)
    assert config.route_to_encoder is routed and worker.role == role
    assert worker.served_model_name == "toy_vlm"


@pytest.mark.parametrize(
    "role, more, words",
    [
        ("decode", ("--route-to-encoder",), "--route-to-encoder"),
        ("agg", ("--extra-engine-args", "nowhere.yaml"), "nowhere.yaml"),
        ("encode", ("--allowed-local-media-path", "/nowhere/at/all"), "--allowed-local-media-path"),
        ("encode", ("--max-file-size-mb", "0"), "--max-file-size-mb"),
        ("agg", ("--endpoint", "dyn://one.two"), "--endpoint"),
    ],
)
def test_what_cannot_be_used_is_named(role, more, words):
    with pytest.raises(ConfigError, match=words):
        args(role, *more)


def test_a_model_that_is_no_directory(tmp_path):
    with pytest.raises(ConfigError, match="config.json"):
        args("agg", model=tmp_path)


def test_a_script_for_dynamo_trtllm_keeps_its_flags():
    flags = ("--enable-multimodal", "--modality", "multimodal", "--max-num-tokens", "4096", "--kv-block-size", "16")
    worker, config = args("pd", *flags, "--override-engine-args", '{"kv_cache_config": {"max_tokens": 9}}')
    assert worker.role == "agg" and config.component == "backend"
    assert json.loads(worker.engine_overrides) == {
        "max_num_tokens": 4096,
        "kv_cache_config": {"tokens_per_block": 16, "max_tokens": 9},
    }
    assert args("agg")[0].engine_overrides is None


def test_what_overrides_the_engine_comes_before_a_flag():
    worker, _ = args("agg", "--max-seq-len", "100", "--override-engine-args", '{"max_seq_len": 200}')
    assert json.loads(worker.engine_overrides) == {"max_seq_len": 200}
