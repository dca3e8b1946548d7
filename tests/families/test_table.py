# SPDX-License-Identifier: Apache-2.0
"""The README's table of families says what is tested, no more and no less."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..models.tiny import DATA
from . import test_embedding_files, test_exact, test_mixed, test_reuse, test_videos
from .cases import ALONE, CASES, GRIDS, TAKES

README = Path(__file__).parents[2] / "README.md"
VARIANTS = {"nemotron_h_omni_videotok"}
"""Tiny models that differ from another one in their tokenizer only."""


def parameters(test: Callable[..., Any]) -> set[tuple[str, str]]:
    """(tiny model, modality) that a test runs for; all modalities of the model where it names no case."""
    found: set[tuple[str, str]] = set()
    for mark in (mark for mark in test.pytestmark if mark.name == "parametrize"):
        if mark.args[0] == "tiny":
            found |= {(name, modality) for name in mark.args[1] for modality in TAKES[name]}
        elif mark.args[0] == ("tiny", "case"):
            found |= {(name, case) for name, case in mark.args[1] if case in ALONE}
    return {(name, modality) for name, modality in found if name not in VARIANTS}


def cells_with_tests() -> dict[tuple[str, str], set[str]]:
    """The words of each cell, from the parameters of the tests that they stand for."""
    answered = parameters(test_exact.test_five_times) & parameters(test_exact.test_other_content_of_the_same_shape)
    answered &= parameters(test_exact.test_equals_plain_transformers)
    cut = answered & parameters(test_reuse.test_every_cut_of_every_prompt_gives_the_same_answer)
    between = cut & parameters(test_reuse.test_gemma3_is_cut_at_items_only)
    keys = answered & parameters(test_mixed.test_a_hybrid_is_keyed_exactly_all_the_same)
    keys &= parameters(test_mixed.test_a_hybrid_says_once_that_it_shares_nothing)
    files = parameters(test_embedding_files.test_a_file_is_answered_like_what_it_was_made_from)
    files &= parameters(test_embedding_files.test_no_family_takes_a_bad_file)
    sound = parameters(test_mixed.test_the_sound_of_a_video_is_part_of_what_it_is)
    cells: dict[tuple[str, str], set[str]] = defaultdict(set)
    for word, those in {
        "reuse": cut - between,
        "reuse between items": between,
        "keys": keys,
        "file+grid": files & {*GRIDS},
        "file": files - {*GRIDS},
        "pruning": {cell for cell in parameters(test_videos.test_pruned_video) if cell[1] == "video"},
        "own sound": {(name, "video") for name, _ in sound if name in CASES["video-with-sound"].families},
    }.items():
        for cell in those:
            cells[cell].add(word)
    return dict(cells)


def test_the_table_says_what_is_tested() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.*) \| (.*) \| (.*) \|$", README.read_text(), re.MULTILINE)
    assert [row[0] for row in rows] == list(dict.fromkeys(row[0] for row in rows))
    written = {
        (name, modality): set(cell.split(", "))
        for name, _, *cells in rows
        for modality, cell in zip(("image", "video", "audio"), cells, strict=True)
        if cell != "-"
    }
    assert written == cells_with_tests()
    assert {row[0] for row in rows} == TAKES.keys() - VARIANTS
    for name, model_type, *_ in rows:
        assert json.loads((DATA / "models" / name / "config.json").read_text())["model_type"] == model_type
