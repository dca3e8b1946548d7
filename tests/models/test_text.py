# SPDX-License-Identifier: Apache-2.0
"""Prompts expanded in token space equal the processor's text tokenised as a whole, whatever stands around the media."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_epd.contract.groups import flat_from_groups
from dynamo_epd.contract.layout import expand
from dynamo_epd.models import text

from .tiny import cases, media_of

PIECES = st.lists(
    st.sampled_from(
        ["a", " ", "\n", "\n\n", " <", ">", "<", "img", "é", "🙂", "0", " seconds", "<|im_end|>", ":", "is"]
    ),
    max_size=6,
).map("".join)
KINDS = {"gemma3": "image", "cosmos3_edge": "video", "nemotron_h_omni": "video", "qwen3_vl": "video", "llama4": "image"}


def _item(family, name):
    f = family(name)
    recipe = next(r for c in cases() if c["family"] == name for r in c["media"] if r["kind"] == KINDS[name])
    item = f.prepare(media_of(recipe), {})
    return f, item, f.codec.decode(flat_from_groups(item.expansion.groups)[0].tolist())


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_expansion_equals_tokenising_the_expanded_text(name, family, data):
    f, item, replacement = _item(family, name)
    between = data.draw(st.lists(PIECES, min_size=2, max_size=4))
    wrapped = f.markers()[0][0] if name == "cosmos3_edge" else next(m for m, kind in f.markers() if kind == KINDS[name])
    ids = f.codec.encode(wrapped.join(between))
    count = len(between) - 1
    places = f.placeholders(ids, {KINDS[name]: count})
    edits = f.replacements(ids, places, [item.expansion] * count)
    layout = expand(ids, edits, count)
    assert layout.token_ids.tolist() == f.codec.encode(replacement.join(between))
    assert layout.rows.tolist() == [item.rows] * count
    assert ids == f.codec.encode(wrapped.join(between))


def test_an_edit_reaches_no_further_than_the_tokens_that_merge(family):
    f, item, _ = _item(family, "gemma3")
    ids = f.codec.encode("What is it? " * 50 + "Look: <start_of_image>?" + " What is it?" * 50)
    places = f.placeholders(ids, {"image": 1})
    (edit,) = f.replacements(ids, places, [item.expansion])
    assert edit.length <= 4 and places[0][0] - edit.start <= 2


def test_ids_that_text_cannot_say_stay_as_they_are(family):
    f, item, _ = _item(family, "gemma3")
    marker = f.codec.token_id("<start_of_image>")
    broken = f.codec.encode("🙂")[:1]  # the first byte of a character
    odd = [f.codec.encode("W")[0], f.codec.encode("h")[0]]  # tokens that would merge
    for before in (broken, odd):
        ids = [*before, marker, *before]
        places = f.placeholders(ids, {"image": 1})
        layout = expand(ids, f.replacements(ids, places, [item.expansion]), 1)
        inner = flat_from_groups(item.expansion.groups)[0].tolist()
        assert layout.token_ids.tolist() == [*before, *inner, *before]


def test_finding_text_that_is_no_token(family):
    codec = family("nemotron_h_omni").codec
    assert codec.token_id("<video>") is None and codec.token_id("<image>") is not None
    for around in ("", "x", " ", "<", "é"):
        ids = codec.encode(f"{around}<video>{around}<video>")
        for start, length in codec.find(ids, "<video>"):
            assert "<video>" in codec.decode(ids[start : start + length])
        assert len(codec.find(ids, "<video>")) == 2
    assert codec.find([], "<video>") == codec.find(codec.encode("<vide"), "<video>") == []


def test_markers_inside_one_another_are_found_once(family):
    f = family("cosmos3_edge")
    ids = f.codec.encode("<|vision_start|><|video_pad|><|vision_end|> and <|video_pad|>")
    assert [length for _, length, _ in f.placeholders(ids, {"video": 2})] == [3, 1]


def test_slow_tokenizers_are_refused():
    from dynamo_epd.contract.errors import ConfigError

    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        text.Codec(object())
