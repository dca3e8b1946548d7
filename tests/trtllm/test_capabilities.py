# SPDX-License-Identifier: Apache-2.0
"""Probing: what is found in each variant, and what is refused at start-up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from dynamo_epd.contract.errors import ConfigError
from dynamo_epd.demo.toy_data import TOY_MODEL
from dynamo_epd.engine.trtllm import create
from dynamo_epd.engine.trtllm.capabilities import TABLE, check, probe, refusal
from dynamo_epd.engine.trtllm.names import load_names

from .conftest import installed


def test_each_variant_is_recognised_by_what_it_takes(variant):
    caps = probe(load_names())
    assert caps.form == variant
    assert caps.prefix_sum == (variant != "four")
    assert caps.id_helper == {"four": "none", "seven": "node_process", "item_runs": "machine"}[variant]
    assert ("disagg_request_id" in caps.disagg_fields) == (variant != "four")
    assert caps.capacity == (variant != "four")
    assert caps.preprocessed_inputs and caps.cache_salt and caps.to_handle and caps.kv_events and caps.encoder
    assert refusal(caps, block_reuse=True) is None


def test_every_capability_has_a_line_and_says_what_is_done_without_it(seven):
    caps = probe(load_names())
    bare = replace(
        caps,
        form="none",
        preprocessed_inputs=False,
        prefix_sum=False,
        cache_salt=False,
        to_handle=False,
        disagg_fields=frozenset(),
        id_helper="none",
        kv_events=False,
        capacity=False,
        encoder=False,
    )
    assert all(row.have(caps) for row in TABLE)
    assert not any(row.have(bare) for row in TABLE)
    assert all(row.then and row.otherwise for row in TABLE)


def test_start_up_names_the_yaml_key_and_the_version_where_nothing_is_safe(seven):
    caps = replace(probe(load_names()), form="none", cache_salt=False)
    with pytest.raises(ConfigError, match=r"kv_cache_config\.enable_block_reuse is on, but TensorRT-LLM 0\.0\+standin"):
        check(caps, block_reuse=True)
    check(caps, block_reuse=False)
    for safe in (replace(caps, cache_salt=True), replace(caps, form="four")):
        check(safe, block_reuse=True)
    with pytest.raises(ConfigError, match="PreprocessedInputs"):
        check(replace(caps, preprocessed_inputs=False), block_reuse=False)


def test_a_class_that_refuses_the_fields_is_not_taken_for_one_that_has_them(seven):
    @dataclass
    class Odd:
        multimodal_hashes: list
        multimodal_positions: list
        multimodal_lengths: list
        multimodal_uuids: list | None = None
        multimodal_item_run_cu_offsets: list | None = None
        multimodal_run_positions: list | None = None
        multimodal_run_lengths: list | None = None

        def __post_init__(self):
            if self.multimodal_run_positions is not None and len(self.multimodal_run_positions) > 1:
                raise ValueError("one run only")

    names = load_names()
    assert probe(replace(names, MultimodalInput=Odd)).form == "four"
    assert (
        probe(replace(names, MultimodalInput=SimpleNamespace)).form != "none"
    )  # takes anything, so it takes all seven
    assert probe(replace(names, MultimodalInput=None)).form == "none"


def test_a_package_of_that_name_that_is_not_tensorrt_llm(tmp_path, monkeypatch):
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm" / "__init__.py").write_text("")
    with installed("seven"):
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(ConfigError, match="TensorRT-LLM cannot be used: tensorrt_llm.LLM"):
            create(model_dir=TOY_MODEL)


def test_one_that_fails_in_its_own_way_on_import(tmp_path, monkeypatch):
    (tmp_path / "tensorrt_llm.py").write_text("raise OSError('libnvinfer.so.10: cannot open shared object file')")
    with installed("seven"):
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(ConfigError, match="libnvinfer"):
            load_names()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keys": "sometimes"}, "exact or placeholder"),
        ({"device": "cpu"}, "runs on GPUs"),
        ({"overrides": '{"backend": "tensorrt"}'}, "only pytorch"),
        ({"overrides": '{"model": "x"}'}, "--model"),
        ({"overrides": "["}, "not JSON"),
        ({"overrides": "[]"}, "holds a list"),
        ({"overrides": '{"kv_cache_config": 3}'}, "must be a mapping"),
        ({"config_file": "/nowhere/engine.yaml"}, "cannot be read"),
    ],
)
def test_options_that_cannot_be_used(seven, options, said):
    with pytest.raises(ConfigError, match=said):
        create(model_dir=TOY_MODEL, **options)


async def test_a_key_that_the_engine_refuses_is_a_start_up_error(seven):
    engine = create(model_dir=TOY_MODEL, overrides='{"tensor_paralel_size": 2}')
    with pytest.raises(ConfigError, match="tensor_paralel_size"):
        await engine.start()
    await engine.stop()
    await engine.stop()
