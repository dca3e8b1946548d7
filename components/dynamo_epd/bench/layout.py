# SPDX-License-Identifier: Apache-2.0
"""``dynamo-epd bench layout``: how long the layout of a long prompt takes, beside a plain loop over its tokens."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..contract.block_keys import augmented_tokens, block_keys, root_key
from ..contract.errors import InvalidRequest
from ..contract.handoff import Group, Replacement, Segment
from ..contract.layout import PromptLayout, expand
from ..contract.multimodal_input import MultimodalInput, digest_to_words

T = TypeVar("T")

VOCAB_SIZE = 151_936
FRAME_START, FRAME_END, PLACEHOLDER = 151_652, 151_653, 151_656
DIGEST = "5c" * 32
TEXT_TOKENS = 1_000
GAP_TOKENS = 7
"""Text before each run, as ``<12.5 seconds>`` is before a frame of a video."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "layout",
        help="time the prompt layout and the block keys",
        description="Time layout, prefix sum and validation of one prompt whose video has one run per frame.",
    )
    parser.add_argument("--tokens", type=int, default=200_000, help="expanded prompt tokens (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=512, help="runs of the video (default: %(default)s)")
    parser.add_argument(
        "--repeat", type=int, default=50, help="measurements; the fastest counts (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.repeat < 1:
        raise InvalidRequest("--repeat must be at least 1")
    prompt, replacements = make_prompt(args.tokens, args.runs)
    layout_ms, (layout, mm) = _best_ms(lambda: make_layout(prompt, replacements), args.repeat)
    loop_ms, (ids, cumsum, looped) = _best_ms(lambda: loop_layout(prompt, replacements), max(1, args.repeat // 5))
    if layout.token_ids.tolist() != ids or layout.row_cumsum.tolist() != cumsum or looped != mm:
        raise RuntimeError("the loop and the layout disagree")
    ratio = loop_ms / layout_ms
    if args.json:
        print(json.dumps({"layout_ms": round(layout_ms, 3), "loop_ms": round(loop_ms, 3), "ratio": round(ratio, 1)}))
        return 0
    keys_ms, keys = _best_ms(
        lambda: block_keys(augmented_tokens(layout.token_ids, mm, VOCAB_SIZE), 32, root_key()), args.repeat
    )
    print(f"{len(layout):,} tokens, {len(layout.run_starts)} runs, {int(layout.rows.sum()):,} embedding rows")
    print(f"layout, prefix sum, seven fields, validation: {layout_ms:7.2f} ms")
    print(f"the same in a loop over the tokens:           {loop_ms:7.2f} ms ({ratio:.0f} times slower)")
    print(f"keys of its {len(keys):,} blocks of 32 tokens:          {keys_ms:7.2f} ms")
    return 0


def make_prompt(tokens: int, runs: int) -> tuple[list[int], list[Replacement]]:
    """An unexpanded prompt with one video, and what expands it to ``tokens`` tokens with ``runs`` runs."""
    slots = tokens - TEXT_TOKENS - runs * (GAP_TOKENS + 2)
    if runs < 1 or slots < runs:
        raise InvalidRequest(f"{tokens} tokens are too few for {runs} runs")
    groups = []
    for frame in range(runs):
        text = tuple(Segment(100 + (frame * 7 + i * 13) % 10_000, 1) for i in range(GAP_TOKENS))
        count = slots // runs + (frame < slots % runs)
        groups.append(
            Group(
                1,
                (
                    *text,
                    Segment(FRAME_START, 1, 0, True),
                    Segment(PLACEHOLDER, count, 0),
                    Segment(FRAME_END, 1, 0, True),
                ),
            )
        )
    half = TEXT_TOKENS // 2
    prompt = [*range(half), PLACEHOLDER, *range(half, TEXT_TOKENS)]
    return prompt, [Replacement(half, 1, tuple(groups))]


def make_layout(prompt: Sequence[int], replacements: Sequence[Replacement]) -> tuple[PromptLayout, MultimodalInput]:
    """What a worker does: expand, check, and make the seven fields."""
    layout = expand(prompt, replacements, 1)
    mm = layout.multimodal_input([DIGEST])
    if mm is None:
        raise RuntimeError("a prompt with a video has no MultimodalInput")
    return layout, mm


def loop_layout(
    prompt: Sequence[int], replacements: Sequence[Replacement]
) -> tuple[list[int], list[int], MultimodalInput]:
    """The same for one item, token by token."""
    ids: list[int] = []
    cumsum: list[int] = []
    runs: list[list[int]] = []
    total = 0
    inside = False

    def add(token: int, item: int, framing: bool) -> None:
        nonlocal total, inside
        if not 0 <= token < 2**31:
            raise ValueError(f"token id {token}")
        if item >= 0:
            if inside:
                runs[-1][1] += 1
            else:
                runs.append([len(ids), 1])
            if not framing:
                total += 1
        inside = item >= 0
        ids.append(token)
        cumsum.append(total)

    end = 0
    for replacement in replacements:
        for token in prompt[end : replacement.start]:
            add(token, -1, False)
        for group in replacement.groups:
            for _ in range(group.times):
                for segment in group.segments:
                    for _ in range(segment.count):
                        add(segment.token_id, segment.item, segment.framing)
        end = replacement.start + replacement.length
    for token in prompt[end:]:
        add(token, -1, False)
    mm = MultimodalInput(
        multimodal_hashes=(digest_to_words(bytes.fromhex(DIGEST)),),
        multimodal_positions=(runs[0][0],),
        multimodal_lengths=(sum(length for _, length in runs),),
        multimodal_item_run_cu_offsets=(0, len(runs)),
        multimodal_run_positions=tuple(start for start, _ in runs),
        multimodal_run_lengths=tuple(length for _, length in runs),
    )
    return ids, cumsum, mm


def _best_ms(work: Callable[[], T], repeat: int) -> tuple[float, T]:
    """Wall-clock time in ms of the fastest of ``repeat`` calls, and the last result.

    The fastest, because everything else that runs on the machine can only add to it. No garbage collection between.
    """
    result = work()
    best = float("inf")
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeat):
            start = time.perf_counter()
            result = work()
            best = min(best, time.perf_counter() - start)
    finally:
        if collecting:
            gc.enable()
    return 1e3 * best, result
