# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import hashlib
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_epd.cli import main
from dynamo_epd.commands.explain_page import page
from dynamo_epd.contract.compare import compare, lines, verdict_words
from dynamo_epd.contract.errors import InvalidMetadata, InvalidRequest
from dynamo_epd.contract.explain import (
    TEXT,
    Explanation,
    explain,
    grid_words,
    item_words,
    piece_words,
    position_words,
    summary_words,
)
from dynamo_epd.contract.handoff import ItemHandoff, TensorRef
from dynamo_epd.contract.layout import PromptLayout
from dynamo_epd.contract.trace import RequestTrace, decode_trace, encode_trace, make_trace

VOCAB = 1000
IMG = 999


def handoff_item(content: str, rows: int, **changes: Any) -> ItemHandoff:
    digest = hashlib.sha256(content.encode()).hexdigest()
    ref = TensorRef("h:1", "agent", 1, 0, digest, (rows, 8), "bfloat16")
    base: dict[str, Any] = {"modality": "image", "digest": digest, "rows": rows, "embedding": ref}
    return ItemHandoff(**{**base, "positions": {"grid_thw": [1, 34, 46]}, **changes})


def request(drawing: str, *contents: str | ItemHandoff, size: int = 4, **scope: Any) -> RequestTrace:
    """A trace of a prompt where a digit is text with that id, and a, b, ... are slots (A, B, ... framing) of items."""
    item = np.array([-1 if c.isdigit() else ord(c.lower()) - ord("a") for c in drawing], dtype=np.int64)
    ids = [int(c) if c.isdigit() else IMG for c in drawing]
    framing = np.array([c.isupper() for c in drawing], dtype=bool)
    layout = PromptLayout.from_flat(ids, item, framing, int(item.max(initial=-1)) + 1)
    items = [c if isinstance(c, ItemHandoff) else handoff_item(c, int(layout.rows[i])) for i, c in enumerate(contents)]
    mm = layout.multimodal_input([entry.digest for entry in items], [entry.uuid for entry in items])
    return make_trace(layout, mm, items, vocab_size=VOCAB, tokens_per_block=size, **scope)


def first_words(a: RequestTrace, b: RequestTrace) -> str:
    comparison = compare(explain(a), explain(b))
    return comparison.differences[0] if comparison.differences else ""


def test_blocks_and_runs() -> None:
    side = explain(request("12Aaa3aa45", "x"))
    assert [(block.number, block.start, block.stop) for block in side.blocks] == [(1, 0, 4), (2, 4, 8), (3, 8, 10)]
    pieces = [(p.start, p.stop, p.item, p.offset, p.begins, p.ends) for block in side.blocks for p in block.pieces]
    assert pieces == [
        (0, 2, TEXT, 0, False, False),
        (2, 4, 0, 0, True, False),
        (4, 5, 0, 2, False, True),
        (5, 6, TEXT, 0, False, False),
        (6, 8, 0, 3, True, True),
        (8, 10, TEXT, 0, False, False),
    ]
    words = [piece_words(side, piece) for block in side.blocks for piece in block.pieces]
    assert words == ["text 1 2", "item 1 [1-2", "item 1 3]", "text 3", "item 1 [4-5]", "text 4 5"]


GRID = handoff_item("turned", 3, positions={"grid_thw": [1, 46, 34]})
SAME_SIZE = handoff_item("other", 3)
WITH_UUID = handoff_item("named", 3, uuid="u1")
VIDEO = handoff_item("film", 3, modality="video")
BASE = request("12aaa345", "x")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (request("12aaa345", "x"), ""),
        (request("12aaa345", GRID), "block 1: item 1's content differs: grid 34x46 and 46x34"),
        (request("12aaa345", WITH_UUID), 'block 1: item 1\'s content differs: uuid none and "u1"'),
        (request("12aaa345", VIDEO), "block 1: item 1: image and video"),
        (request("12aaa349", "x"), "block 2: token 7 is 5 in A and 9 in B"),
        (request("12aaa349", "x", texts={5: " red", 9: " blue"}), "block 2: token 7 is 5 in A and ' blue' (9) in B"),
        (request("12aaaa45", "x"), "block 2: token 5 is text 3 in A and token 4 of item 1 in B"),
        (request("12345678"), "block 1: token 2 is token 1 of item 1 in A and text 3 in B"),
        (request("12aaa3456", "x"), "block 3: A ends before token 8, B goes on"),
        (request("12aaa34", "x"), "block 2: B ends before token 7, A goes on"),
        (request("12aaa345", "x", cache_salt="t"), "block 1: the cache salts differ"),
        (
            request("12aaa345", "x", cache_salt="t", kind="uncacheable", reason="no runs"),
            "block 1: the cache salts differ (B is keyed as uncacheable: no runs)",
        ),
        (request("12aaa345", "x", lora_id=7), "block 1: the LoRA adapters differ: no adapter and adapter 7"),
        (request("12aaa345", "x", size=8), "block 1: blocks hold 4 and 8 tokens"),
        (
            msgspec.structs.replace(request("12aaa345", "x"), vocab_size=2000),
            "block 1: the vocabulary sizes differ: 1000 and 2000",
        ),
        (
            msgspec.structs.replace(request("12aaa345", "y"), model="m2"),
            "block 1: item 1's content differs: model unknown and m2",
        ),
    ],
)
def test_the_first_difference_in_words(other: RequestTrace, words: str) -> None:
    assert first_words(BASE, other) == words


def test_other_content_of_the_same_size() -> None:
    ours, theirs = handoff_item("x", 3).digest[:8], SAME_SIZE.digest[:8]
    assert first_words(BASE, request("12aaa345", SAME_SIZE)) == (
        f"block 1: item 1's content differs: other pixels, encoder or options, digests {ours} and {theirs}"
    )


def test_items_that_alternate_in_another_way() -> None:
    assert first_words(request("abab", "x", "y"), request("abba", "x", "y")) == (
        "block 1: item 1's content differs: equal digests, but the tokens alternate with another item's in another way"
    )


def test_how_far_two_requests_share() -> None:
    a = explain(request("1aaaa2bbb345", "x", "y"))
    b = explain(request("1aaaa2bbb345", "x", GRID))
    comparison = compare(a, b)
    assert (comparison.shared_blocks, comparison.shared_tokens) == (1, 6)
    assert comparison.differences == ("block 2: item 2's content differs: grid 34x46 and 46x34",)
    assert verdict_words(a, b, comparison) == "The two share block 1 of 3 (their first 6 of 12 tokens are equal)."
    c = explain(request("1aaaa2bbb3", GRID, "y"))
    assert compare(a, c).differences == ("block 1: item 1's content differs: grid 34x46 and 46x34",)
    assert verdict_words(a, c, compare(a, c)) == "The two share no block (their first 1 tokens are equal)."
    d = explain(request("1aaaa3bbb3", GRID, SAME_SIZE))
    assert [line.split(":")[0] for line in compare(a, d).differences] == ["block 1", "item 2's content differs"]
    assert verdict_words(a, a, compare(a, a)) == "The two share all of their 3 blocks."
    salted = explain(request("1aaaa2bbb345", "x", "y", cache_salt="t"))
    assert verdict_words(a, salted, compare(a, salted)) == "The two share no block."
    fewer = explain(request("1aaaa2333", "x"))
    assert compare(a, fewer).differences == (
        "block 2: token 6 is token 1 of item 2 in A and text 3 in B",
        "A has 2 media items, B has 1",
    )


@st.composite
def drawings(draw: st.DrawFn) -> str:
    text = draw(st.text("12ab", max_size=20))
    first = list(dict.fromkeys(c for c in text if c in "ab"))
    return text.translate({ord(c): "ab"[i] for i, c in enumerate(first)})


@given(drawings(), drawings(), st.integers(1, 5))
def test_what_is_said_to_be_shared_has_equal_keys(x: str, y: str, size: int) -> None:
    a, b = (explain(request(d, *("pq"[: len(set(d) & set("ab"))]), size=size)) for d in (x, y))
    comparison = compare(a, b)
    equal = [p.key == q.key for p, q in zip(a.blocks, b.blocks, strict=False)]
    assert comparison.shared_blocks == sum(equal)
    assert equal == sorted(equal, reverse=True)
    assert comparison.shared_tokens >= min(comparison.shared_blocks * size, len(a.tokens))
    assert bool(comparison.differences) == (a.tokens != b.tokens)
    for every in (False, True):
        drawn = lines(a, b, every=every)
        numbers = {block.number for line in drawn for block in line.blocks if line.side is a}
        assert numbers == {block.number for block in a.blocks}
        assert sum(len(line.blocks) for line in drawn if line.mark == "=") == comparison.shared_blocks


def test_long_items_are_drawn_in_one_line() -> None:
    side = explain(request("1" + "a" * 30 + "2", "x"))
    assert [line.number for line in lines(side)] == ["1", "2-7", "8"]
    assert [line.number for line in lines(side, every=True)] == list("12345678")
    other = explain(request("1" + "a" * 30 + "3", "x"))
    assert [(line.number, line.mark) for line in lines(side, other)] == [
        ("1", "="),
        ("2-7", "="),
        ("8", "A"),
        ("8", "B"),
    ]
    assert [(line.number, line.mark) for line in lines(side, explain(request("1" + "a" * 30 + "2", "y")))] == [
        ("1", "≠"),
        ("2-7", "≠"),
        ("8", "≠"),
    ]


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ([1, 34, 46], "34x46"),
        ([4, 34, 46], "4x34x46"),
        ([34, 46], "34x46"),
        ([[1, 2, 3], [1, 3, 2]], "2x3, 3x2"),
        ([], ""),
        (7, "7"),
    ],
)
def test_grid_words(grid: Any, words: str) -> None:
    assert grid_words(grid) == words


def test_position_words() -> None:
    positions = {"grid_thw": [1, 2, 3], "second_per_grid_ts": [0.5], "image_sizes": [1, 2]}
    assert position_words(positions) == {"grid": "2x3", "second per grid ts": "[0.5]", "image sizes": "[1, 2]"}


def test_what_is_said_of_an_item_and_a_request() -> None:
    side = explain(
        request("1Aaa2aA3", WITH_UUID, unexpanded_token_ids=[1, IMG, 3], request_id="r", role="agg", kind="exact")
    )
    digest = WITH_UUID.digest[:16]
    assert item_words(side, 0) == (
        f'image, grid 34x46, 5 tokens (2 framing) in 2 runs from 1, 3 embedding rows, uuid "u1", digest {digest}'
    )
    facts = "8 tokens (expanded from 3), 2 blocks of 4, no cache salt, keys: exact"
    assert summary_words(side) == ("r agg", facts)
    bare = explain(request("12", cache_salt="s", lora_id=3))
    assert summary_words(bare) == ("request", "2 tokens, 1 blocks of 4, with a cache salt, LoRA adapter 3")


def test_a_trace_round_trips() -> None:
    trace = request("1Aaa2", WITH_UUID, cache_salt="s", lora_id=1, request_id="r", texts={1: "a", 2: "b"})
    assert decode_trace(encode_trace(trace)) == trace
    assert trace.items[0].special_offsets == (0,)
    assert json.loads(encode_trace(request("12")))["multimodal_input"] is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "cannot be read"),
        (b"[]", "cannot be read: Expected `object`"),
        (b"\xff", "cannot be read"),
        (b'{"prompt_token_ids": [1], "vocab_size": 9, "tokens_per_block": 4}', "missing required field"),
        (
            b'{"prompt_token_ids": [true], "multimodal_input": null, "vocab_size": 9, "tokens_per_block": 4}',
            "Expected `int`, got `bool`",
        ),
        (
            b'{"prompt_token_ids": [1], "multimodal_input": null, "vocab_size": 9, "tokens_per_block": 4, "sallt": 1}',
            "unknown field `sallt`",
        ),
    ],
)
def test_files_that_are_no_traces(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        decode_trace(data, "x.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens_per_block": 0}, "tokens_per_block: is 0"),
        ({"slices": [{"start": 0, "end": 3}]}, r"slices\[0\]: 0 to 3 is not inside"),
        ({"slices": [{"start": 2, "end": 1}]}, r"slices\[0\]"),
        ({"slices": [{"start": -1, "end": 1}]}, r"slices\[0\]"),
    ],
)
def test_values_out_of_range(change: dict[str, Any], message: str) -> None:
    base = {"prompt_token_ids": [1, 2], "multimodal_input": None, "vocab_size": 9, "tokens_per_block": 4}
    with pytest.raises(InvalidMetadata, match=message):
        decode_trace(json.dumps({**base, **change}).encode())


class Checker(HTMLParser):
    """Collects the text, and whether tags are balanced and nothing is loaded from elsewhere."""

    def __init__(self, html: str):
        super().__init__()
        self.stack: list[str] = []
        self.text: list[str] = []
        self.loads: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.stack.append(tag)
        if tag in ("script", "link", "img", "iframe"):
            self.loads.append(tag)
        self.loads += [name for name, _ in attrs if name in ("src", "href") or name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack[-1:] != ["style"]:
            self.text.append(data)


def sides() -> list[Explanation]:
    hostile = handoff_item("z", 3, uuid="<script>alert(1)</script>", positions={"grid_thw": [1, 46, 34], "a&b": "<i>"})
    traces = [request("1aaa2bbb3", "x", "y"), request("1aaa2bbb4", "x", hostile, texts={4: "<b>\n$body"})]
    return [explain(trace) for trace in traces]


@pytest.mark.parametrize("count", [1, 2])
def test_the_page_is_whole_and_loads_nothing(count: int) -> None:
    html = page(sides()[-count:], ["<a>.json", "b.json"][-count:])
    checker = Checker(html)
    assert checker.stack == []
    assert checker.loads == []
    text = "".join(checker.text)
    assert "<script>alert(1)</script>" in text
    assert "url(" not in html
    if count == 2:
        assert "item 2's content differs" in text
        assert "<a>.json" in text


def test_the_page_says_why_beside_the_block() -> None:
    a, b = (explain(request("1aaa2bbb3", "x", item)) for item in ("y", GRID))
    text = "".join(Checker(page([a, b], ["a", "b"])).text)
    assert text.count("block 2: item 2's content differs: grid 34x46 and 46x34") == 2
    longer = explain(request("1aaa2bbb34", "x", "y"))
    text = "".join(Checker(page([a, longer], ["a", "b"])).text)
    assert text.count("block 3: A ends before token 9, B goes on") == 2


def write(path: Path, trace: RequestTrace) -> str:
    path.write_bytes(encode_trace(trace))
    return str(path)


def test_explain_in_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    a = write(tmp_path / "a.json", request("1aaaa2bbb345", "x", "y", request_id="r1"))
    b = write(tmp_path / "b.json", request("1aaaa2bbb345", "x", GRID, request_id="r2"))
    html = tmp_path / "out.html"
    assert main(["explain", a, b, "--html", str(html)]) == 0
    out = capsys.readouterr().out
    assert "block 2: item 2's content differs: grid 34x46 and 46x34" in out
    assert "The two share block 1 of 3" in out
    assert "item 1 [1-3" in out
    assert "grid 34x46" in html.read_text(encoding="utf-8")
    assert main(["explain", a]) == 0
    assert "r1" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["explain", "{tmp}/none.json"], ["keys", "{tmp}/none.json"], ["keys", "{tmp}"]])
def test_files_that_are_not_there(tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([argument.format(tmp=tmp_path) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert str(tmp_path) in err


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a.json", BASE)
    assert main(["explain", a, "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_explanations_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        explain(BASE).root = b""  # type: ignore[misc]
