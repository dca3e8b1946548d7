# SPDX-License-Identifier: Apache-2.0
"""Embeddings that the caller brings: answered like the media that they were made from, and keyed by what they hold."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from dynamo.llm.exceptions import InvalidArgument

from dynamo_epd.models import Media

from .cases import ALONE, FILES, GRIDS
from .conftest import Tiny, same
from .harness import Answer, Source, reuse_at_most
from .media_files import audio, embedding_url, image

SEED, OTHER = 1, 11

PLACED = {"idefics3": (1, 2, 2), "llama4": (1, 2, 2), "mistral3": (1, 6, 8), "pixtral": (1, 5, 7)}
"""Of the picture of the cases, where the family needs one and its positions do not have it: tiles, or patches."""

IMAGES = [family for family, case in FILES if case == "image"]
ALL_FRAMES = {"do_sample_frames": False, "fps": 4.0}


@dataclass(frozen=True)
class File:
    """What is in an embedding file of one item."""

    embedding: torch.Tensor
    grid: Any

    def source(self, modality: str, **tensors: torch.Tensor) -> Source:
        metadata = {} if self.grid is None else {"grid_thw": self.grid}
        return Source(modality, embedding_url({"mm_embeddings": self.embedding, **tensors}, **metadata))


def encoded(tiny: Tiny, media: Media) -> File:
    """The embedding of an item as the model's own encoder makes it."""
    prepared = tiny.family.prepare(media, {"fps": 4.0} if media.modality == "video" else {})
    grid = prepared.positions.get("grid_thw", PLACED.get(tiny.name) if media.modality == "image" else None)
    return File(tiny.family.encode([prepared])[0].clone(), grid)


def asked(tiny: Tiny, case: str, item: Source, **options: Any) -> Answer:
    kwargs = {"fps": 4.0} if item.modality == "video" else None
    return tiny.stack.ask(tiny.text(ALONE[case].parts(0)), [item], kwargs=kwargs, **options)


@pytest.mark.parametrize(("tiny", "case"), FILES, indirect=["tiny"], scope="session")
def test_a_file_is_answered_like_what_it_was_made_from(tiny: Tiny, case: str) -> None:
    """Five times, then another file of the same shape, then the first again; also where reuse ends inside the item."""
    parts = ALONE[case].parts
    plain = {"videos_kwargs": ALL_FRAMES} if case == "video" else {}
    expected, other = (tiny.plain.answer(tiny.text(parts(s)), ALONE[case].media(s), plain) for s in (SEED, OTHER))
    file, second = (encoded(tiny, ALONE[case].media(s)[0]) for s in (SEED, OTHER))
    assert file.embedding.shape == second.embedding.shape and file.grid == second.grid
    salt = tiny.salt()
    answers = [asked(tiny, case, file.source(case), salt=salt) for _ in range(5)]
    for answer in answers:
        same(answer, expected)
    n = answers[0].prompt_tokens
    assert [answer.cached for answer in answers] == [0] + [0 if tiny.hybrid else n - 1] * 4
    different = asked(tiny, case, second.source(case), salt=salt)
    same(different, other)
    same(asked(tiny, case, file.source(case), salt=salt), expected)
    assert answers[0].layout is not None
    assert different.cached == (0 if tiny.hybrid else int(answers[0].layout.run_starts.min()))
    assert different.digests != answers[0].digests
    same(asked(tiny, case, file.source(case), on=tiny.stack.forgetful), expected)
    if not tiny.hybrid:
        positions = answers[0].layout.positions(0).tolist()
        for cut in (positions[1], positions[len(positions) // 2], positions[-1]):
            with reuse_at_most(tiny.stack.prefill, cut), reuse_at_most(tiny.stack.decode, cut):
                same(asked(tiny, case, file.source(case), salt=salt), expected)


@pytest.mark.parametrize("tiny", IMAGES, indirect=True)
def test_several_files_and_pictures_in_one_request(tiny: Tiny) -> None:
    pictures = [image(1), image(2), image(3), image(4)]
    parts = ["A ", pictures[0], "B ", pictures[1], " C", pictures[2], pictures[3], "D"]
    items = [encoded(tiny, m).source("image") if i % 2 == 0 else m for i, m in enumerate(pictures)]
    salt = tiny.salt()
    answers = [tiny.stack.ask(tiny.text(parts), items, salt=salt) for _ in range(2)]
    expected = tiny.plain.answer(tiny.text(parts), pictures)
    for answer in answers:
        same(answer, expected)
    assert len(set(answers[0].digests)) == 4 and answers[0].digests == answers[1].digests
    swapped = tiny.stack.ask(tiny.text(parts), [items[2], items[1], items[0], items[3]], salt=salt)
    same(swapped, tiny.plain.answer(tiny.text(parts), [pictures[2], pictures[1], pictures[0], pictures[3]]))
    assert swapped.digests == [answers[0].digests[i] for i in (2, 1, 0, 3)]


@pytest.mark.parametrize("tiny", ["qwen2_5_omni"], indirect=True)
def test_files_of_several_modalities_in_one_request(tiny: Tiny) -> None:
    sound, picture = audio(1), image(2)
    parts = ["A ", sound, "B", picture, "C"]
    items = [encoded(tiny, m).source(m.modality) for m in (sound, picture)]
    same(tiny.stack.ask(tiny.text(parts), items), tiny.plain.answer(tiny.text(parts), [sound, picture]))


@pytest.mark.parametrize("tiny", ["qwen3_vl"], indirect=True)
def test_the_same_content_is_the_same_however_the_file_is_written(tiny: Tiny) -> None:
    file, salt = encoded(tiny, image(SEED)), tiny.salt()
    grid = torch.tensor([file.grid])
    spelt = [
        file.source("image"),
        Source("image", embedding_url(file.embedding, image_grid_thw=[file.grid])),
        Source("image", embedding_url(file.embedding[None], grid_thw=file.grid)),
        Source("image", embedding_url({"mm_embeddings": file.embedding, "image_grid_thw": grid})),
    ]
    answers = [asked(tiny, "image", item, salt=salt) for item in spelt]
    assert len({answer.digests[0] for answer in answers}) == 1
    assert [answer.cached for answer in answers[1:]] == [answers[0].prompt_tokens - 1] * 3
    assert len({tuple(answer.tokens) for answer in answers}) == 1


@pytest.mark.parametrize("tiny", ["qwen2_5_vl", "llama4"], indirect=True)
def test_the_request_may_say_what_the_file_does_not(tiny: Tiny) -> None:
    """The grid makes the same item wherever it stands, and belongs to embedding files only, in prompt order."""
    pictures = [image(1), image(2), image(3)]
    text = tiny.text(["A ", pictures[0], "B ", pictures[1], "C ", pictures[2], "D"])
    first, last = (encoded(tiny, pictures[i]) for i in (0, 2))
    bare = File(last.embedding, None).source("image")
    items, salt = [first.source("image"), pictures[1], bare], tiny.salt()
    told = tiny.stack.ask(text, [items[0], items[1], last.source("image")], salt=salt)
    same(told, tiny.plain.answer(text, pictures))
    for grids in ([None, last.grid], [first.grid, list(last.grid)]):
        answer = tiny.stack.ask(text, items, salt=salt, kwargs={"image_grid_thw": grids})
        assert answer.digests == told.digests and answer.tokens == told.tokens
        assert answer.cached == answer.prompt_tokens - 1
    for grids, message in (
        ([last.grid], "image_grid_thw must be a list with one .* the request has 2"),
        (last.grid, "the request has 2"),
        ([None, None], "image 3: .*needs grid_thw"),
        ([None, [1, 4]], "image 3: .*three positive integers"),
        ([None, [1, -4, 6]], "image 3: .*three positive integers"),
        ([None, [1, 400, 600]], "image 3: .*rows"),
        ([[1, 1, 1], last.grid], "image 1: the file's grid is"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            tiny.stack.ask(text, items, salt=salt, kwargs={"image_grid_thw": grids})
    with pytest.raises(InvalidArgument, match="the request has 0"):
        tiny.stack.ask(text, pictures, salt=salt, kwargs={"image_grid_thw": [first.grid]})


@pytest.mark.parametrize("tiny", ["qwen3_vl"], indirect=True)
def test_what_else_a_file_holds_keeps_it_apart(tiny: Tiny) -> None:
    """Another grid with as many rows, another auxiliary tensor, another dtype, a uuid: none shares with another."""
    file, salt = encoded(tiny, image(SEED)), tiny.salt()
    turned = File(file.embedding, (file.grid[0], file.grid[2], file.grid[1]))
    items = [
        file.source("image"),
        turned.source("image"),
        file.source("image", extra=torch.zeros(2)),
        file.source("image", extra=torch.ones(2)),
        File(file.embedding.to(torch.bfloat16), file.grid).source("image"),
        File(file.embedding.to(torch.bfloat16).float(), file.grid).source("image"),
    ]
    answers = [asked(tiny, "image", item, salt=salt) for item in items]
    answers.append(asked(tiny, "image", items[0], salt=salt, uuids=["mine"]))
    assert len({answer.digests[0] for answer in answers}) == len(answers)
    assert answers[0].layout is not None
    assert {answer.cached for answer in answers[1:]} == {int(answers[0].layout.run_starts[0])}
    same(answers[0], tiny.expected("image", SEED))
    assert answers[1].top[0] != answers[0].top[0]
    for repeat in range(2):
        again = asked(tiny, "image", items[repeat], salt=salt)
        assert (again.tokens, again.cached) == (answers[repeat].tokens, again.prompt_tokens - 1)


@pytest.mark.parametrize("tiny", ["llava_next"], indirect=True)
def test_the_dtype_of_a_file_is_kept(tiny: Tiny) -> None:
    file = encoded(tiny, image(SEED))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        answer = asked(tiny, "image", File(file.embedding.to(dtype), None).source("image"))
        assert answer.handoff is not None
        assert answer.handoff.items[0].embedding.dtype == str(dtype).removeprefix("torch.")
        assert answer.tokens[0] == tiny.expected("image", SEED).tokens[0]


BAD = {
    "wrong width": (lambda e: e[:, 1:], "rows of .* values"),
    "NaN": (lambda e: torch.where(torch.arange(len(e))[:, None] == 2, torch.nan, e), "NaN or infinite"),
    "infinite": (lambda e: torch.where(torch.arange(len(e))[:, None] == 2, torch.inf, e), "NaN or infinite"),
    "no rows": (lambda e: e[:0], "no rows|no elements"),
    "too many rows": (lambda e: torch.cat([e, e[:1]]), "7 rows, its grid"),
    "rank 1": (lambda e: e[0], r"must be \[rows"),
    "rank 3": (lambda e: torch.stack([e, e]), r"must be \[rows"),
    "whole numbers": (lambda e: e.to(torch.int32), "dtype int32"),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("tiny", ["qwen3_vl"], indirect=True)
def test_a_bad_file_is_refused_by_name(tiny: Tiny, what: str) -> None:
    change, message = BAD[what]
    good = encoded(tiny, image(SEED))
    bad = File(change(good.embedding).contiguous(), good.grid)
    parts = ["A ", image(1), "B ", image(2), "C"]
    with pytest.raises(InvalidArgument, match=f"image 2: .*({message})"):
        tiny.stack.ask(tiny.text(parts), [good.source("image"), bad.source("image")])
    answer = tiny.stack.ask(tiny.text(parts), [good.source("image"), image(2)])
    same(answer, tiny.plain.answer(tiny.text(parts), [image(1), image(2)]))


@pytest.mark.parametrize(("tiny", "case"), FILES, indirect=["tiny"], scope="session")
def test_no_family_takes_a_bad_file(tiny: Tiny, case: str) -> None:
    good = encoded(tiny, ALONE[case].media(SEED)[0])
    assert (good.grid is not None) == ((tiny.name, case) in GRIDS)
    rows = good.embedding
    bad = [
        (File(rows[:, 1:], good.grid), "rows of .* values"),
        (File(torch.cat([rows, rows[:, :1]], 1), good.grid), "rows of .* values"),
        (File(torch.full_like(rows, torch.nan), good.grid), "NaN or infinite"),
        (File(rows[:0], good.grid), "no rows|no elements"),
    ]
    if good.grid is not None:
        t, h, w = good.grid
        bad += [
            (File(rows, None), "needs grid_thw"),
            (File(rows, (t, h + 1, w)), "multiples of 2|rows"),
            (File(rows, (t, h, 1 << 30)), "rows, its grid .* makes"),
            (File(rows[1:], good.grid), "rows, its grid .* makes"),
        ]
    for file, message in bad:
        with pytest.raises(InvalidArgument, match=f"^{case} 1: .*({message})"):
            asked(tiny, case, file.source(case))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ((1 << 63).to_bytes(8, "little") + b"{}" + bytes(64), "names a header of 9223372036854775808; it is damaged"),
        (b"\x80\x02}q\x00.", "Python pickle"),
        (b"PK\x03\x04" + bytes(64), "ZIP archive or a PyTorch checkpoint"),
        (b"\x93NUMPY" + bytes(64), "NumPy array"),
        (np.float32(1).tobytes() * 64, "not an embedding in the safetensors format"),
    ],
    ids=["a header of 2^63", "pickle", "torch.save", "npy", "raw"],
)
@pytest.mark.parametrize("tiny", ["qwen3_vl"], indirect=True)
def test_only_safetensors_are_opened(tiny: Tiny, content: bytes, message: str) -> None:
    url = f"data:application/x-safetensors;base64,{base64.b64encode(content).decode()}"
    with pytest.raises(InvalidArgument, match=f"image 1: .*{message}"):
        asked(tiny, "image", Source("image", url))


@pytest.mark.parametrize("tiny", ["nemotron_h_omni", "qwen2_vl"], indirect=True)
def test_what_a_family_cannot_place_is_refused(tiny: Tiny) -> None:
    """Nemotron's video rows belong to tubelets that a file does not name; Qwen's need their frames a second."""
    rows = Source("video", embedding_url(torch.ones(16, tiny.family.embedding_width), grid_thw=[4, 4, 4]))
    message = "send the video" if tiny.hybrid else "needs mm_processor_kwargs.fps"
    with pytest.raises(InvalidArgument, match=f"video 1: .*{message}"):
        tiny.stack.ask(tiny.text(ALONE["video"].parts(0)), [rows])
    if not tiny.hybrid:
        with pytest.raises(InvalidArgument, match="image 1: .*needs grid_thw"):
            asked(tiny, "image", Source("image", embedding_url(torch.ones(6, tiny.family.embedding_width))))
