# SPDX-License-Identifier: Apache-2.0
"""Requests of several items: uuids of each, one item twice, many requests at once, and models that keep no blocks."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from dynamo.llm.exceptions import InvalidArgument

from dynamo_epd.contract.block_keys import augmented_tokens, block_keys, root_key
from dynamo_epd.models import Media

from .cases import CASES, KV, TAKES, pairs
from .conftest import Tiny, same
from .media_files import audio, image, video

SEED, OTHER = 1, 11

UUIDS = {
    "video-image-video": ["film", None, "other"],
    "audio-video-audio": ["a", "b", None],
    "image-image": [None, "x"],
}


@pytest.mark.parametrize(
    ("tiny", "case"), [p for p in pairs(CASES) if p[1] in UUIDS], indirect=["tiny"], scope="session"
)
def test_uuids_go_with_their_items(tiny: Tiny, case: str) -> None:
    """A uuid is mixed into its item's digest and never stands for the content."""
    uuids, salt = UUIDS[case], tiny.salt()
    plain = tiny.ask(case, SEED, salt=salt)
    named = tiny.ask(case, SEED, salt=salt, uuids=uuids)
    same(named, tiny.expected(case, SEED))
    assert named.handoff is not None and [item.uuid for item in named.handoff.items] == uuids
    assert [a == b for a, b in zip(named.digests, plain.digests, strict=True)] == [uuid is None for uuid in uuids]
    again = tiny.ask(case, SEED, salt=salt, uuids=uuids)
    assert again.cached == (0 if tiny.hybrid else again.prompt_tokens - 1) and again.digests == named.digests
    other = tiny.ask(case, OTHER, salt=salt, uuids=uuids)
    same(other, tiny.expected(case, OTHER))
    assert not {*other.digests} & {*named.digests}


@pytest.mark.parametrize("tiny", [name for name, kinds in TAKES.items() if "image" in kinds], indirect=True)
def test_one_picture_twice(tiny: Tiny) -> None:
    picture = image(SEED)
    parts = ["A ", picture, "B ", picture, "C"]
    answer = tiny.stack.ask(tiny.text(parts), [picture, picture])
    same(answer, tiny.plain.answer(tiny.text(parts), [picture, picture]))
    assert answer.digests[0] == answer.digests[1]


@pytest.mark.parametrize("tiny", ["phi4_multimodal"], indirect=True)
def test_a_clip_beside_a_picture_is_another_item(tiny: Tiny) -> None:
    """Phi-4 projects a clip in another way when the request also has a picture."""
    clip, picture, salt = audio(SEED), image(SEED), tiny.salt()
    answers = []
    for parts in (["Hear ", clip, "?"], ["Hear ", clip, " and ", picture, "?"]):
        media = [part for part in parts if not isinstance(part, str)]
        for _ in range(2):
            answers.append(tiny.stack.ask(tiny.text(parts), media, salt=salt))
            same(answers[-1], tiny.plain.answer(tiny.text(parts), media))
    assert answers[0].digests[0] == answers[1].digests[0] != answers[2].digests[0]
    assert answers[2].layout is not None and answers[2].cached == int(answers[2].layout.run_starts[0])


@pytest.mark.parametrize("tiny", ["qwen2_5_omni", "qwen3_omni_moe"], indirect=True)
def test_the_sound_of_a_video_is_part_of_what_it_is(tiny: Tiny) -> None:
    """Equal frames with another sound, the same file without its sound: nothing of either is shared."""
    options, plain = CASES["video-with-sound"].kwargs, CASES["video-with-sound"].plain
    one, other, salt = video(3, fps=2.0, sound=4), video(3, fps=2.0, sound=5), tiny.salt()
    text = tiny.text([one, "What?"])
    first = tiny.stack.ask(text, [one], kwargs=options, salt=salt)
    assert first.handoff is not None and [item.modality for item in first.handoff.items] == ["audio", "video"]
    begin = int(first.layout.run_starts.min()) if first.layout else 0
    second = tiny.stack.ask(text, [other], kwargs=options, salt=salt)
    same(second, tiny.plain.answer(text, [other], plain))
    silent = tiny.stack.ask(text, [one], kwargs={"fps": 2.0}, salt=salt)
    same(silent, tiny.plain.answer(text, [one], {"videos_kwargs": {"fps": 2.0}}))
    assert second.cached == begin >= silent.cached
    assert len({*first.digests, *second.digests, *silent.digests}) == 5
    both = [tiny.text([one, " and ", other, "?"]), [one, other]]
    same(tiny.stack.ask(*both, kwargs=options, salt=salt), tiny.plain.answer(*both, plain))


@contextmanager
def encoder_calls(tiny: Tiny) -> Iterator[list[list[str]]]:
    """The modalities of the items in every call of the encoder.

    The first call waits until enough items have come that two of them are of one modality.
    """
    batcher, calls, arrived, enough = tiny.stack.encode._batcher, [], itertools.count(), threading.Event()
    encode, submit = batcher._encode, batcher.submit

    def encode_and_tell(items: Sequence[Any]) -> Any:
        enough.wait(60)
        calls.append([item.modality for item in items])
        return encode(items)

    def submit_and_count(*args: Any) -> Any:
        if next(arrived) > len(TAKES[tiny.name]):
            enough.set()
        return submit(*args)

    batcher._encode, batcher.submit = encode_and_tell, submit_and_count
    try:
        yield calls
    finally:
        batcher._encode = encode
        del batcher.submit


@pytest.mark.parametrize("tiny", TAKES, indirect=True)
def test_requests_at_once(tiny: Tiny) -> None:
    """All that a family takes in flight together: encoded in shared calls, answered as alone."""
    wanted = [(case, seed) for _, case in pairs(CASES) if _ == tiny.name for seed in (SEED, OTHER)]
    requests = []
    for case, seed in wanted:
        c = CASES[case]
        salt = tiny.salt()
        requests.append(tiny.stack.request(tiny.text(c.parts(seed)), c.media(seed), kwargs=c.kwargs, salt=salt))
    embeddings = tiny.stack.encode.transfer.store
    embeddings.clear()
    with encoder_calls(tiny) as calls:
        answers = tiny.stack.ask_all(requests)
    for (case, seed), answer in zip(wanted, answers, strict=True):
        same(answer, tiny.expected(case, seed))
    assert len(calls) < sum(len(call) for call in calls)
    assert all(len(set(call)) == 1 for call in calls)


HYBRID = [name for name in TAKES if name not in KV]


@pytest.mark.parametrize("tiny", HYBRID, indirect=True)
def test_a_hybrid_says_once_that_it_shares_nothing(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        worker = tiny.stack.start("agg", *tiny.stack.engine_args())
        for _ in range(2):
            tiny.ask("image", SEED)
    lines = [r.getMessage() for r in caplog.records if "reuse" in r.getMessage()]
    assert len(lines) == 1 and "block reuse is off" in lines[0] and "recurrent state" in lines[0]
    assert not worker._engine.info.block_reuse


@pytest.mark.parametrize("tiny", HYBRID, indirect=True)
def test_a_hybrid_is_keyed_exactly_all_the_same(tiny: Tiny) -> None:
    """TensorRT-LLM gets the seven fields, and keys follow the content."""

    def keys(film: Media, rate: float) -> tuple[Any, list[bytes]]:
        parts = [image(1), "A ", film, "B"]
        request = tiny.stack.request(tiny.text(parts), [parts[0], film], kwargs={"video_pruning_rate": rate})
        prompt = tiny.stack.prompt(request)
        mm = prompt.multimodal_input
        assert prompt.key_kind == "exact" and mm is not None
        assert mm == prompt.layout.multimodal_input([item.digest for item in prompt.items], [None, None])
        return prompt, block_keys(augmented_tokens(prompt.layout.token_ids, mm, tiny.family.vocab_size), 8, root_key())

    prompt, first = keys(video(3), 0.5)
    assert len(prompt.layout.runs(1)) == 4 and prompt.multimodal_input.num_items == 2
    same_again, other, other_rate = keys(video(3), 0.5)[1], keys(video(4), 0.5)[1], keys(video(3), 0.3)[1]
    begins = int(prompt.layout.runs(1)[0][0]) // 8
    assert same_again == first
    for changed in (other, other_rate):
        assert changed[:begins] == first[:begins]
        assert not {*changed[begins:]} & {*first[begins:]}


@pytest.mark.parametrize("tiny", ["nemotron_h_omni"], indirect=True)
def test_a_hybrid_cannot_be_split_into_prefill_and_decode(tiny: Tiny) -> None:
    worker = tiny.stack.start("prefill", *tiny.stack.engine_args())
    with pytest.raises(InvalidArgument, match="recurrent state.*use agg"):
        tiny.stack.ask(tiny.text([image(1), "?"]), [image(1)], on=worker)


@pytest.mark.parametrize("tiny", ["qwen3_vl"], indirect=True)
def test_items_and_placeholders_must_agree(tiny: Tiny) -> None:
    text = tiny.text([image(1), "and ", video(1), "?"])
    for media, message in (
        ([image(1)], "1 video placeholder and the request 0 video items"),
        ([image(1), image(2), video(1)], "1 image placeholder and the request 2 image items"),
        ([video(1), video(2)], "placeholder"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            tiny.stack.ask(text, media)
    ordered = tiny.stack.ask(text, [video(1), image(1)])
    assert ordered.handoff is not None and np.array_equal(
        [item.modality for item in ordered.handoff.items], ["image", "video"]
    )
