# SPDX-License-Identifier: Apache-2.0
"""Against a real TensorRT-LLM: every name, argument and field that this package uses. Skipped where there is none."""

from __future__ import annotations

import asyncio
import inspect
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from dynamo_epd.engine.base import SamplingParams
from dynamo_epd.engine.trtllm.capabilities import TABLE, probe, refusal
from dynamo_epd.engine.trtllm.names import OPTIONAL, field_names, load_names
from dynamo_epd.engine.trtllm.sampling import sampling_options

ENGINE_YAMLS = [p for p in Path(__file__).parents[2].joinpath("configs").rglob("*.yaml") if p.parent.name != "serve"]

pytestmark = [
    pytest.mark.trtllm,
    pytest.mark.skipif(find_spec("tensorrt_llm") is None, reason="TensorRT-LLM is not installed"),
]


@pytest.fixture(scope="module")
def names():
    assert not any(m == "tensorrt_llm._rules" for m in sys.modules), "the stand-in must not be on the path"
    return load_names()


@pytest.fixture(scope="module")
def caps(names):
    return probe(names)


@pytest.mark.parametrize("name", OPTIONAL)
def test_names(names, name):
    assert getattr(names, name) is not None


def test_capabilities(caps):
    assert refusal(caps, block_reuse=True) is None
    assert [row.name for row in TABLE if not row.have(caps)] == []


def test_generate_async(names):
    parameters = inspect.signature(names.LLM.generate_async).parameters
    assert {"inputs", "sampling_params", "streaming", "disaggregated_params", "cache_salt"} <= set(parameters)


def test_inputs(names):
    assert {"prompt_token_ids", "multimodal_params"} <= field_names(names.PreprocessedInputs)
    assert {"multimodal_input", "multimodal_data"} <= field_names(names.MultimodalParams)
    assert list(inspect.signature(names.MultimodalParams.to_handle).parameters)[1:] == ["element"]


def test_sampling_params(names):
    full = SamplingParams(temperature=0.5, top_k=3, seed=1, min_tokens=1, stop_token_ids=frozenset({1, 2}), logprobs=1)
    for params in (full, SamplingParams()):
        options = sampling_options(params)
        made = names.SamplingParams(**options)
        assert all(getattr(made, name) == value for name, value in options.items())


def test_disaggregated_params(names, caps):
    wanted = {"request_type", "first_gen_tokens", "ctx_request_id", "opaque_state", "disagg_request_id"}
    assert wanted <= caps.disagg_fields
    for kind in ("context_only", "generation_only"):
        assert names.DisaggregatedParams(request_type=kind).request_type == kind


def test_logprob(names):
    entry = names.Logprob(logprob=-0.5, rank=1)
    assert (entry.logprob, entry.rank) == (-0.5, 1)


def test_reading_the_engine(names):
    for name in ("get_kv_cache_events", "get_kv_cache_events_async", "get_kv_cache_capacity", "shutdown"):
        assert callable(getattr(names.LLM, name))
    for name in ("get_kv_cache_events", "get_kv_cache_events_async"):
        assert "timeout" in inspect.signature(getattr(names.LLM, name)).parameters
    assert callable(names.LLM._check_health)
    assert issubclass(names.RequestError, Exception) and not issubclass(names.RequestError, ValueError)


def test_results():
    from tensorrt_llm.executor.result import CompletionOutput
    from tensorrt_llm.llmapi.llm import RequestOutput

    assert callable(RequestOutput.abort) and hasattr(RequestOutput, "__aiter__")
    assert isinstance(RequestOutput.outputs, property) and isinstance(RequestOutput.finished, property)
    assert {"token_ids", "logprobs", "finish_reason", "disaggregated_params"} <= set(vars(CompletionOutput(0)))


def test_input_processors():
    from tensorrt_llm.inputs.registry import BaseMultimodalInputProcessor

    for name in ("get_vocab_size", "get_mm_token_ids", "get_mm_special_token_ids"):
        assert callable(getattr(BaseMultimodalInputProcessor, name))


def test_an_empty_queue_of_events_is_an_exception_where_nothing_is_waited_for():
    from tensorrt_llm.llmapi.utils import AsyncQueue

    async def ask():
        with pytest.raises(asyncio.QueueEmpty):
            await AsyncQueue().get(timeout=0)

    asyncio.run(ask())


def test_encoder(names):
    assert list(inspect.signature(names.MultimodalEncoder.generate).parameters)[1:3] == ["inputs", "use_tqdm"]
    assert names.VideoData(frames=[object()], metadata={}).frames


def nested(kind, section):
    """The keys of every engine YAML here in one of ``LlmArgs``' sections, made into its class."""
    for path in ENGINE_YAMLS:
        values = yaml.safe_load(path.read_text(encoding="utf-8")).get(section)
        if values is not None:
            yield path, kind(**values)


def test_engine_yamls_are_known_to_llm_args():
    from tensorrt_llm.llmapi import llm_args

    assert len(ENGINE_YAMLS) > 40
    for path in ENGINE_YAMLS:
        assert set(yaml.safe_load(path.read_text(encoding="utf-8"))) <= {"backend", *llm_args.TorchLlmArgs.model_fields}
    for kind, section in (
        (llm_args.KvCacheConfig, "kv_cache_config"),
        (llm_args.CacheTransceiverConfig, "cache_transceiver_config"),
        (llm_args.CudaGraphConfig, "cuda_graph_config"),
    ):
        assert list(nested(kind, section))
    assert "event_buffer_max_size" in llm_args.KvCacheConfig.model_fields


def test_shared_tensors(names):
    import torch

    tensor = torch.arange(6.0).reshape(2, 3)
    params = names.MultimodalParams(multimodal_data={"multimodal_embedding": [tensor]})
    params.to_handle("multimodal_data")
    [handle] = params.multimodal_data["multimodal_embedding"]
    assert isinstance(handle, dict)
    assert torch.equal(names.SharedTensorContainer.from_dict(handle).get_local_view(), tensor)
