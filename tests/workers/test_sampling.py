# SPDX-License-Identifier: Apache-2.0
import pytest

from dynamo_epd.contract.errors import InvalidRequest
from dynamo_epd.engine.base import Logprob
from dynamo_epd.workers.sampling import logprob_fields, parse_sampling

WIRE = {
    "stop_conditions": {"max_tokens": 8, "stop": ["x"], "stop_token_ids_hidden": [256], "min_tokens": None},
    "sampling_options": {"n": None, "temperature": 0.7, "top_p": 0.9, "top_k": None, "seed": 3, "min_p": None},
    "output_options": {"logprobs": 2, "prompt_logprobs": None},
    "eos_token_ids": [256],
}


def test_options_as_the_frontend_sends_them():
    p = parse_sampling(WIRE, room=100)
    assert (p.temperature, p.top_p, p.top_k, p.seed) == (0.7, 0.9, 0, 3)
    assert (p.max_tokens, p.min_tokens, p.logprobs) == (8, 0, 2)
    assert p.stop_token_ids == {256}


def test_defaults_are_greedy_and_fill_the_context():
    p = parse_sampling({}, room=7)
    assert (p.temperature, p.top_p, p.top_k, p.seed, p.max_tokens, p.logprobs) == (0.0, 1.0, 0, None, 7, None)


def test_max_tokens_is_cut_to_the_room_that_is_left():
    assert parse_sampling({"stop_conditions": {"max_tokens": 50}}, room=7).max_tokens == 7


def test_ignore_eos_keeps_the_callers_own_stop_ids():
    request = {**WIRE, "stop_conditions": {"ignore_eos": True, "stop_token_ids": [9], "stop_token_ids_hidden": [256]}}
    assert parse_sampling(request, room=10).stop_token_ids == {9}


@pytest.mark.parametrize(
    "group, name, value",
    [
        ("sampling_options", "n", 2),
        ("sampling_options", "best_of", 3),
        ("sampling_options", "presence_penalty", 0.5),
        ("sampling_options", "frequency_penalty", -1.0),
        ("sampling_options", "repetition_penalty", 1.1),
        ("sampling_options", "min_p", 0.1),
        ("sampling_options", "use_beam_search", True),
        ("sampling_options", "length_penalty", 2.0),
        ("sampling_options", "guided_decoding", {"json": {}}),
        ("stop_conditions", "max_thinking_tokens", 5),
        ("output_options", "prompt_logprobs", 0),
        ("sampling_options", "temperature", -0.1),
        ("sampling_options", "top_p", 1.5),
        ("sampling_options", "top_p", 0.0),
        ("stop_conditions", "max_tokens", 0),
        ("output_options", "logprobs", 21),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(group, name, value):
    with pytest.raises(InvalidRequest, match=name):
        parse_sampling({group: {name: value}}, room=100)


@pytest.mark.parametrize("name, value", [("n", 1), ("presence_penalty", 0.0), ("repetition_penalty", 1.0)])
def test_neutral_values_are_accepted(name, value):
    assert parse_sampling({"sampling_options": {name: value}}, room=5).max_tokens == 5


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(InvalidRequest, match="min_tokens=9"):
        parse_sampling({"stop_conditions": {"max_tokens": 4, "min_tokens": 9}}, room=100)


def test_logprob_fields_rank_the_alternatives():
    fields = logprob_fields([7], [Logprob(-0.5, ((7, -0.5), (3, -1.5)))], ["a"])
    assert fields["log_probs"] == [-0.5]
    assert fields["top_logprobs"] == [
        [
            {"rank": 1, "token_id": 7, "token": "a", "logprob": -0.5},
            {"rank": 2, "token_id": 3, "token": None, "logprob": -1.5},
        ]
    ]
    assert "top_logprobs" not in logprob_fields([7], [Logprob(-0.5)], ["a"])


def test_prefill_takes_min_tokens_beyond_the_one_token_that_it_is_asked_for():
    request = {"stop_conditions": {"max_tokens": 1, "min_tokens": 3}}
    p = parse_sampling(request, room=100, first_token_only=True)
    assert (p.max_tokens, p.min_tokens) == (1, 1)
    with pytest.raises(InvalidRequest, match="min_tokens=3 is more than max_tokens=1"):
        parse_sampling(request, room=100)
