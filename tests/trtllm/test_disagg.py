# SPDX-License-Identifier: Apache-2.0
"""``DisaggregatedParams`` through JSON, request ids, sampling options and log probabilities."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dynamo_epd.contract.errors import Unavailable
from dynamo_epd.engine.base import EngineOutput, Logprob, SamplingParams
from dynamo_epd.engine.trtllm import disagg
from dynamo_epd.engine.trtllm.capabilities import probe
from dynamo_epd.engine.trtllm.names import load_names
from dynamo_epd.engine.trtllm.sampling import finish_reason, logprobs, sampling_options

from .conftest import installed


def context_result(names, caps, **fields):
    params = names.DisaggregatedParams(
        request_type="context_only", first_gen_tokens=[42], ctx_request_id=2**63 - 2, opaque_state=b"\x00\xff\x80"
    )
    for name, value in fields.items():
        if name in caps.disagg_fields:
            setattr(params, name, value)
    return params


def test_what_prefill_gave_reaches_decode_unchanged(variant):
    names = load_names()
    caps = probe(names)
    prefill = context_result(
        names,
        caps,
        disagg_request_id=2**62,
        ctx_info_endpoint=["tcp://h:1", "tcp://h:2"],
        first_gen_log_probs=[{42: names.Logprob(-0.25, 1), 7: names.Logprob(-2.0, 2)}],
        multimodal_embedding_handles=[{"method_key": 1}],
        draft_tokens=[],
    )
    sent = json.loads(json.dumps(disagg.encode(prefill, caps, num_tokens=9, cached_tokens=4)))
    parsed = disagg.parse(sent, num_tokens=9)
    assert parsed.cached_tokens == 4 and parsed.finished is None
    got = disagg.generation_params(parsed, names, caps)
    assert got.request_type == "generation_only"
    assert (got.first_gen_tokens, got.ctx_request_id, got.opaque_state) == ([42], 2**63 - 2, b"\x00\xff\x80")
    assert got.multimodal_embedding_handles is None
    if variant != "four":
        assert got.disagg_request_id == 2**62 and got.ctx_info_endpoint == ["tcp://h:1", "tcp://h:2"]
        assert got.first_gen_log_probs == [{42: names.Logprob(-0.25, 1), 7: names.Logprob(-2.0, 2)}]


def test_log_probs_keep_their_nesting(seven):
    names = load_names()
    caps = probe(names)
    per_beam = [[{1: names.Logprob(-1.0, 1)}], [{2: names.Logprob(-2.0, None)}]]
    sent = disagg.encode(context_result(names, caps, first_gen_log_probs=per_beam), caps, num_tokens=1, cached_tokens=0)
    got = disagg.generation_params(disagg.parse(json.loads(json.dumps(sent)), num_tokens=1), names, caps)
    assert got.first_gen_log_probs == per_beam


def test_fields_that_the_other_version_lacks():
    with installed("seven"):
        names = load_names()
        caps = probe(names)
        sent = disagg.encode(context_result(names, caps, disagg_request_id=5), caps, num_tokens=1, cached_tokens=0)
    with installed("four"):
        old = load_names()
        with pytest.raises(Unavailable, match="disagg_request_id, which .* does not know"):
            disagg.generation_params(disagg.parse(sent, num_tokens=1), old, probe(old))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"engine": "reference"}, "same dynamo-epd release and engine"),
        ({"version": 2}, "same dynamo-epd release"),
        ({"num_tokens": "x"}, "malformed"),
        ({"surprise": 1}, "malformed"),
        ({"num_tokens": 8}, "computed 8 tokens, the prompt has 9"),
    ],
)
def test_params_that_cannot_be_used(seven, change, said):
    names = load_names()
    caps = probe(names)
    sent = disagg.encode(context_result(names, caps), caps, num_tokens=9, cached_tokens=0)
    with pytest.raises(Unavailable, match=said):
        disagg.parse({**sent, **change}, num_tokens=9)
    with pytest.raises(Unavailable):
        disagg.parse("nonsense", num_tokens=9)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"opaque_state": "?"}, "not base64"),
        ({"first_gen_log_probs": [{"x": [1, 2]}]}, "first_gen_log_probs is malformed"),
        ({"fields": {"nonsense": 1}}, "nonsense, which"),
    ],
)
def test_contents_that_cannot_be_used(seven, change, said):
    names = load_names()
    caps = probe(names)
    sent = {**disagg.encode(context_result(names, caps), caps, num_tokens=9, cached_tokens=0), **change}
    with pytest.raises(Unavailable, match=said):
        disagg.generation_params(disagg.parse(sent, num_tokens=9), names, caps)


def test_nothing_to_go_on_from_and_no_class_at_all(seven):
    names = load_names()
    caps = probe(names)
    with pytest.raises(Unavailable, match="cache_transceiver_config"):
        disagg.encode(None, caps, num_tokens=1, cached_tokens=0)
    with pytest.raises(Unavailable, match="run agg workers"):
        disagg.context_params(replace(names, DisaggregatedParams=None), caps, 1)


def test_a_request_that_ended_in_prefill():
    output = EngineOutput([9], "stop", [Logprob(-0.5, ((9, -0.5), (3, -1.0)))], cached_tokens=2)
    sent = json.loads(json.dumps(disagg.encode_finished(output, num_tokens=5)))
    assert disagg.finished_output(disagg.parse(sent, num_tokens=5)) == output
    del sent["first_token"]
    with pytest.raises(Unavailable, match="not with which token"):
        disagg.finished_output(disagg.parse(sent, num_tokens=5))


def test_request_ids_are_made_by_the_helper_of_the_version(variant):
    names = load_names()
    make = disagg.request_id_maker(names, probe(names))
    ids = [make() for _ in range(50)]
    if variant == "four":
        assert ids == [None] * 50
    else:
        assert len(set(ids)) == 50 and all(0 < i < 2**63 for i in ids)
    params = disagg.context_params(names, probe(names), ids[0])
    assert params.request_type == "context_only" and getattr(params, "disagg_request_id", None) == ids[0]


def test_greedy_and_sampling_are_said_in_full():
    greedy = sampling_options(SamplingParams(temperature=0, top_p=0.5, stop_token_ids=frozenset({3})))
    assert greedy["top_k"] == 1 and "temperature" not in greedy and "top_p" not in greedy
    warm = sampling_options(SamplingParams(temperature=0.7, seed=-1, min_tokens=2, max_tokens=9))
    assert (warm["temperature"], warm["top_p"], warm["top_k"]) == (0.7, 1.0, 0)
    assert warm["seed"] == 2**63 - 1 and warm["min_tokens"] == 2 and warm["max_tokens"] == 9
    assert sampling_options(SamplingParams(max_tokens=9), prefill_only=True)["max_tokens"] == 1


def test_stop_tokens():
    assert sampling_options(SamplingParams())["ignore_eos"] is True
    one = sampling_options(SamplingParams(stop_token_ids=frozenset({5})))
    assert one["end_id"] == 5 and "stop_token_ids" not in one and "ignore_eos" not in one
    more = sampling_options(SamplingParams(stop_token_ids=frozenset({5, 9, 2})))
    assert more["end_id"] == 2 and more["stop_token_ids"] == [5, 9] and more["include_stop_str_in_output"]


def test_every_option_is_one_of_the_engines(seven):
    full = SamplingParams(temperature=0.5, top_k=3, seed=1, min_tokens=1, stop_token_ids=frozenset({1, 2}), logprobs=0)
    names = load_names()
    for params in (full, SamplingParams()):
        names.SamplingParams(**sampling_options(params))
    assert sampling_options(full)["logprobs"] == 1


def test_log_probabilities_back():
    entries = [{7: SimpleNamespace(logprob=-0.1, rank=1), 8: SimpleNamespace(logprob=-3.0, rank=2)}, {9: -0.2}, -0.5]
    got = logprobs([7, 9, 4], entries, 2)
    assert got == [Logprob(-0.1, ((7, -0.1), (8, -3.0))), Logprob(-0.2, ((9, -0.2),)), Logprob(-0.5)]
    assert logprobs([7], entries, 0) == [Logprob(-0.1)]
    assert logprobs([7], entries, None) == [] and logprobs([7], None, 1) == []
    assert [finish_reason(r) for r in ("stop", "length", "timeout", None)] == [
        "stop",
        "length",
        "cancelled",
        "cancelled",
    ]
