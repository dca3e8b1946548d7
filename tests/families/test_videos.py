# SPDX-License-Identifier: Apache-2.0
"""Videos: frames sampled as each request asks, and rows pruned by content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dynamo.llm.exceptions import InvalidArgument

from dynamo_epd.models import Media

from .cases import PRUNES, TAKES
from .conftest import Tiny, same
from .harness import Answer
from .media_files import audio, image, still, video
from .plain import Expected

FILMS = [name for name, kinds in TAKES.items() if "video" in kinds]

SAMPLING: dict[str, dict[str, Any]] = {
    "as the model does": {},
    "two a second": {"fps": 2.0},
    "three a second": {"fps": 3.0},
    "one a second": {"fps": 1.0},
    "four": {"num_frames": 4},
}


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """A number of frames comes instead of the frames a second that a checkpoint sets."""
    alone = {"fps": None} if "num_frames" in options else {}
    return {"videos_kwargs": {**alone, **options, "do_sample_frames": True}} if options else {}


@pytest.mark.parametrize("tiny", FILMS, indirect=True)
def test_each_request_chooses_its_frames(tiny: Tiny) -> None:
    """Every choice gives what transformers makes of it, none shares with another, each shares with itself."""
    film, salt = video(3, frames=12, fps=4.0), tiny.salt()
    text = tiny.text([film, "What happens?"])
    answers = []
    for options in SAMPLING.values():
        answer = tiny.stack.ask(text, [film], kwargs=options, salt=salt)
        same(answer, tiny.plain.answer(text, [film], plain_options(options)))
        assert answer.layout is not None
        assert answer.cached <= (int(answer.layout.run_starts[0]) if answers else 0)
        answers.append(answer)
    assert len({answer.layout.rows.tolist()[0] for answer in answers if answer.layout}) >= 2
    usual = tiny.family.resolved_options("video", {})
    apart = {str(tiny.family.resolved_options("video", options)) for options in SAMPLING.values()}
    assert len({answer.digests[0] for answer in answers}) == len(apart) >= 3, usual
    for options, answer in zip(SAMPLING.values(), answers, strict=True):
        again = tiny.stack.ask(text, [film], kwargs=options, salt=salt)
        assert again.tokens == answer.tokens and again.digests == answer.digests
        assert again.cached == (0 if tiny.hybrid else again.prompt_tokens - 1)


@pytest.mark.parametrize("tiny", FILMS, indirect=True)
def test_sampling_of_a_video_leaves_the_picture_alone(tiny: Tiny) -> None:
    film, picture = video(3, frames=12, fps=4.0), image(2)
    text = tiny.text([picture, film, "Compare."])
    slow, fast, alone = (
        tiny.stack.ask(text, [picture, film], kwargs={"fps": 1.0}),
        tiny.stack.ask(text, [picture, film], kwargs={"fps": 2.0}),
        tiny.stack.ask(tiny.text([picture, "?"]), [picture]),
    )
    assert slow.digests[0] == fast.digests[0] == alone.digests[0]
    assert slow.digests[1] != fast.digests[1]


@pytest.mark.parametrize("tiny", ["qwen3_vl"], indirect=True)
def test_options_that_contradict_each_other_are_refused(tiny: Tiny) -> None:
    film = video(3)
    for options, message in (
        ({"fps": 1.0, "num_frames": 4}, "mutually exclusive"),
        ({"num_frames": 10_000}, "video 1: sampling gives 10000 frames"),
        ({"num_frames": 0}, "num_frames is 0, must be above 0"),
        ({"fps": -1.0}, "fps is -1.0, must be above 0"),
        ({"fps": "fast"}, "fps"),
        ({"frames": 4}, "frames is not an option"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            tiny.stack.ask(tiny.text([film, "?"]), [film], kwargs=options)


@contextmanager
def pruning(tiny: Tiny, rate: float) -> Iterator[None]:
    """Let plain transformers prune as well."""
    model = tiny.plain.model
    before = model.video_pruning_rate
    model.video_pruning_rate = rate
    try:
        yield
    finally:
        model.video_pruning_rate = before


def with_ids(expected: Expected, answer: Answer) -> Expected:
    """transformers prunes behind its processor, so that nobody gets to see the ids."""
    assert answer.layout is not None
    return replace(expected, ids=answer.layout.token_ids.tolist())


@pytest.mark.parametrize("rate", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("tiny", PRUNES, indirect=True)
def test_pruned_video(tiny: Tiny, rate: float) -> None:
    """The rows that transformers keeps and no others; text stays; another rate makes another item."""
    film = still(4)
    text = tiny.text([film, "What happens?"])
    whole = tiny.stack.ask(text, [film])
    with pruning(tiny, rate):
        expected = tiny.plain.answer(text, [film])
    answer = tiny.stack.ask(text, [film], kwargs={"video_pruning_rate": rate})
    assert whole.layout is not None and answer.layout is not None
    kept = int(answer.layout.rows[0])
    assert kept == max(whole.layout.rows[0] // 4, int(whole.layout.rows[0] * (1 - rate))) < whole.layout.rows[0]
    text_ids = [layout.token_ids[layout.slot_item < 0].tolist() for layout in (whole.layout, answer.layout)]
    assert text_ids[0] == text_ids[1]
    same(answer, with_ids(expected, answer))
    assert answer.digests != whole.digests


@pytest.mark.parametrize("tiny", PRUNES, indirect=True)
def test_pruning_follows_content(tiny: Tiny) -> None:
    """Two videos of one shape keep other rows, each what it keeps alone; mixed with a picture and a sound, too."""
    rate = {"video_pruning_rate": 0.6}
    films: list[Media] = [still(4), still(9), video(5)]
    text = tiny.text([films[0], "?"])
    runs = []
    for film in films:
        answer = tiny.stack.ask(text, [film], kwargs=rate)
        with pruning(tiny, 0.6):
            same(answer, with_ids(tiny.plain.answer(text, [film]), answer))
        assert answer.layout is not None
        runs.append(answer.layout.runs(0))
    assert runs[0] != runs[2] and len({sum(n for _, n in run) for run in runs}) == 1
    parts = [audio(1), "A ", films[2], "B ", image(1), films[0], "C"]
    media = [part for part in parts if isinstance(part, Media)]
    answer = tiny.stack.ask(tiny.text(parts), media, kwargs=rate)
    assert answer.handoff is not None and answer.layout is not None
    assert [item.modality for item in answer.handoff.items] == ["audio", "video", "image", "video"]
    for place, alone in ((1, runs[2]), (3, runs[0])):
        start = answer.layout.runs(place)[0][0] - alone[0][0]
        assert answer.layout.runs(place) == [(first + start, count) for first, count in alone]
    assert np.array_equal(answer.layout.rows, [item.rows for item in answer.handoff.items])


@pytest.mark.parametrize("tiny", ["nemotron_h_omni"], indirect=True)
def test_a_rate_that_keeps_nothing_is_refused(tiny: Tiny) -> None:
    film = still(4)
    for rate in (1.0, -0.1, "half", True):
        with pytest.raises(InvalidArgument, match="video_pruning_rate"):
            tiny.stack.ask(tiny.text([film]), [film], kwargs={"video_pruning_rate": rate})
