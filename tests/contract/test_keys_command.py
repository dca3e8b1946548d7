# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dynamo_epd.cli import main

DATA = Path(__file__).parent.parent / "data" / "block_keys.json.gz"
CASES: list[dict[str, Any]] = json.loads(gzip.decompress(DATA.read_bytes()))
INPUTS = ("prompt_token_ids", "multimodal_input", "vocab_size", "tokens_per_block", "cache_salt", "lora_id")


def keys(monkeypatch: pytest.MonkeyPatch, obj: object) -> int:
    data = obj if isinstance(obj, bytes) else json.dumps(obj).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    return main(["keys"])


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_equal_to_upstream(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [{"start": part["start"], "end": part["end"]} for part in case["expected"]["slices"]]
    assert keys(monkeypatch, {**{name: case[name] for name in INPUTS}, "slices": parts}) == 0
    assert json.loads(capsys.readouterr().out) == case["expected"]


def test_a_whole_case_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = next(case for case in CASES if not case["expected"]["slices"])
    file = tmp_path / "case.json"
    file.write_text(json.dumps(case))
    assert main(["keys", str(file)]) == 0
    assert json.loads(capsys.readouterr().out) == case["expected"]


GOOD = {name: CASES[2][name] for name in INPUTS}
assert GOOD["multimodal_input"] is not None
BAD: list[tuple[Any, str]] = [
    (b"", "cannot be read"),
    (b"nonsense", "cannot be read"),
    ({}, "missing required field"),
    ({**GOOD, "prompt_token_ids": None}, "prompt_token_ids"),
    ({**GOOD, "prompt_token_ids": [1.5]}, "prompt_token_ids"),
    ({**GOOD, "prompt_token_ids": [2**80]}, "prompt_token_ids"),
    ({**GOOD, "prompt_token_ids": GOOD["prompt_token_ids"][:50]}, "beyond the prompt of 50 tokens"),
    ({**GOOD, "prompt_token_ids": [-1, *GOOD["prompt_token_ids"][1:]]}, "prompt_token_ids[0]: is -1"),
    ({**GOOD, "multimodal_input": {}}, "multimodal_hashes: is missing"),
    (
        {**GOOD, "multimodal_input": {**GOOD["multimodal_input"], "multimodal_hashes": []}},
        "multimodal_hashes: is empty",
    ),
    ({**GOOD, "multimodal_input": {**GOOD["multimodal_input"], "multimodal_run_positions": None}}, "is missing"),
    ({**GOOD, "multimodal_input": [1]}, "multimodal_input"),
    ({**GOOD, "vocab_size": 0}, "vocab_size: is 0"),
    ({**GOOD, "vocab_size": "many"}, "vocab_size"),
    ({**GOOD, "tokens_per_block": 0}, "tokens_per_block: is 0"),
    ({**GOOD, "tokens_per_block": -4}, "tokens_per_block: is -4"),
    ({**GOOD, "cache_salt": 7}, "cache_salt"),
    ({**GOOD, "lora_id": -1}, "lora_id: is -1"),
    ({**GOOD, "lora_id": 2**64}, "lora_id: is 18446744073709551616"),
    ({**GOOD, "slices": [{"start": 0, "end": 10**6}]}, "slices[0]"),
    ({**GOOD, "slices": [{"start": 0}]}, "slices"),
]


@pytest.mark.parametrize(("obj", "message"), BAD)
def test_invalid_input_is_one_line_and_exit_2(
    obj: Any, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys(monkeypatch, obj) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
