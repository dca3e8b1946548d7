# SPDX-License-Identifier: Apache-2.0
"""``dynamo-epd bench serve``: its workload is as it says, and a short run of it all."""

from __future__ import annotations

import json

import pytest

from dynamo_epd.bench import serve_workload
from dynamo_epd.cli import main
from dynamo_epd.demo.plain import PlainTransformers, PromptPredictor
from dynamo_epd.demo.toy_data import TOY_MODEL


def test_the_workloads_prompts(monkeypatch):
    """1,500 to 3,000 tokens; pairs of conversations that differ in nothing but their pictures."""
    asked = []
    monkeypatch.setattr(
        serve_workload.Plain, "answer", lambda self, messages, max_tokens: (asked.append([*messages]), "red")[1]
    )
    conversations = serve_workload.Workload(20, 3).conversations(40)
    assert len(conversations) == 40 and all(len(conversation) == 3 for conversation in conversations)
    predictor = PromptPredictor(TOY_MODEL)
    prompts = [predictor.layout(messages)[0].token_ids.tobytes() for messages in asked if len(messages) == 2]
    lengths = [len(prompt) // 4 for prompt in prompts]
    assert min(lengths) >= 1500 and max(len(predictor.layout(messages)[0]) for messages in asked) <= 3000
    assert len({json.dumps(c[0].messages) for c in conversations}) == len(prompts) > len(set(prompts))


def test_the_expected_answers_are_plain_transformers_own():
    workload, plain = serve_workload.Workload(3, 3), PlainTransformers(TOY_MODEL)
    asked = []
    answer = serve_workload.Plain.answer

    def noted(self, messages, max_tokens):
        asked.append(([*messages], answer(self, messages, max_tokens)))
        return asked[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve_workload.Plain, "answer", noted)
        workload.conversations(5)
    assert len(asked) > 9
    for messages, expected in asked[:1] + asked[-4:]:
        assert plain.answer(messages, serve_workload.MAX_TOKENS)[0] == expected


def test_arguments_that_cannot_be(capsys):
    assert main(["bench", "serve", "--conversations", "0"]) == 2
    assert "--conversations must be at least 1" in capsys.readouterr().err
    assert main(["bench", "serve", "--images", "1"]) == 2


@pytest.mark.slow
def test_a_short_run(capsys, tmp_path):
    argv = ["--quick", "--conversations", "4", "--images", "2", "--repeat", "1", "--decode-tokens", "8"]
    assert main(["bench", "serve", "--json", "--plots", str(tmp_path), *argv]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    on, off, placeholder = (report[side] for side in ("reuse_on", "reuse_off", "placeholder"))
    assert on["correct"] == off["correct"] == on["total"] == off["total"] == 12
    assert placeholder["correct"] < placeholder["total"]
    assert off["cached_share"] == 0 < on["cached_share"]
    for way in ("transformers", "reference"):
        assert set(report[way]["decode_tokens_per_s"]) == {"1", "8"}
    for curves in (report["ttft_by_shared_prefix"], report["requests_per_s_by_concurrency"]):
        assert set(curves) == {"reuse_on", "reuse_off"}
    assert {path.name for path in tmp_path.iterdir()} == {"ttft.png", "requests.png"}
