# SPDX-License-Identifier: Apache-2.0
"""A trace that cannot be written costs a log line, not the request."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from dynamo_epd.workers.prompt import build_prompt
from dynamo_epd.workers.trace import RequestTracer


class Family(SimpleNamespace):
    identity = "m"
    vocab_size = 100
    tokenizer = SimpleNamespace(decode=str)

    def positions(self, layout, items):
        return None, 0


IDS = [1, 2, 3]


@pytest.fixture
def write(tmp_path):
    tracer = RequestTracer(tmp_path / "traces", Family(), role="prefill", tokens_per_block=8)
    prompt = build_prompt({"token_ids": IDS}, None, Family())
    return lambda name: tracer.write(prompt, IDS, name)


def test_a_folder_that_is_gone_is_told_once_and_tracing_goes_on_when_it_is_back(write, tmp_path, caplog):
    folder = tmp_path / "traces"
    folder.rmdir()
    with caplog.at_level(logging.WARNING):
        write("a")
        write("b")
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        "request a is not traced, nor those that follow while this lasts"
    ]
    folder.mkdir()
    write("c")
    assert [p.name for p in folder.iterdir()] == ["c.prefill.json"]


def test_half_a_trace_is_not_left_behind(write, tmp_path, monkeypatch):
    def full(path, data):
        path.open("wb").write(data[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    write("a")
    assert not list((tmp_path / "traces").iterdir())


def test_a_trace_is_for_its_owner_alone(write, tmp_path):
    write("a")
    modes = {path.stat().st_mode & 0o077 for path in (tmp_path / "traces", tmp_path / "traces" / "a.prefill.json")}
    assert modes == {0}
