# SPDX-License-Identifier: Apache-2.0
"""A traced request as blocks of text and item tokens.

Blocks and items count from 1, as ``dynamo-epd keys`` prints them (its key 0 is the root's); positions count from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .block_keys import AugmentedTokens, augmented_tokens, block_keys, root_key
from .multimodal_input import MultimodalInput
from .trace import RequestTrace, TraceItem, parse_multimodal_input

TEXT = -1
"""The item index of a piece that belongs to no item."""
TEXT_WIDTH = 34
"""Characters of a text piece that ``piece_words`` shows."""


@dataclass(frozen=True)
class Piece:
    """Consecutive positions of one block that are all text, or all of one run.

    Attributes:
        start, stop: positions ``start`` to ``stop - 1``.
        item: index of the item, or ``TEXT``.
        offset: which of the item's tokens stands at ``start``.
        begins, ends: whether the item's run begins, or ends, with this piece.
    """

    start: int
    stop: int
    item: int = TEXT
    offset: int = 0
    begins: bool = False
    ends: bool = False


@dataclass(frozen=True)
class Block:
    """``number`` counts from 1; the last block may hold fewer than ``tokens_per_block`` tokens."""

    number: int
    key: bytes
    pieces: tuple[Piece, ...]

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def stop(self) -> int:
        return self.pieces[-1].stop


@dataclass(frozen=True)
class Explanation:
    """One request: its augmented tokens, the key of the root and its blocks."""

    trace: RequestTrace
    mm: MultimodalInput | None
    tokens: AugmentedTokens
    root: bytes

    @cached_property
    def runs(self) -> list[Piece]:
        """All runs in prompt order."""
        runs = []
        for item, item_runs in enumerate(self.mm.item_runs if self.mm else ()):
            offset = 0
            for start, length in item_runs:
                runs.append(Piece(start, start + length, item, offset, True, True))
                offset += length
        return sorted(runs, key=lambda run: run.start)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks, a partly filled last one included."""
        stretches = []
        at = 0
        for run in self.runs:
            if run.start > at:
                stretches.append(Piece(at, run.start))
            stretches.append(run)
            at = run.stop
        if at < len(self.tokens):
            stretches.append(Piece(at, len(self.tokens)))
        size = self.trace.tokens_per_block
        pieces: list[list[Piece]] = [[] for _ in range(-(-len(self.tokens) // size))]
        for whole in stretches:
            for block in range(whole.start // size, (whole.stop - 1) // size + 1):
                start, stop = max(whole.start, block * size), min(whole.stop, (block + 1) * size)
                offset = whole.offset + start - whole.start
                begins, ends = whole.begins and start == whole.start, whole.ends and stop == whole.stop
                pieces[block].append(Piece(start, stop, whole.item, offset, begins, ends))
        keys = block_keys(self.tokens, size, self.root)
        return tuple(Block(i + 1, key, tuple(pieces[i])) for i, key in enumerate(keys))

    def piece_at(self, position: int) -> Piece:
        """The piece that ``position`` is in."""
        block = self.blocks[position // self.trace.tokens_per_block]
        return next(piece for piece in block.pieces if piece.start <= position < piece.stop)

    def item(self, index: int) -> TraceItem:
        """What is known of an item; without a trace, what the seven fields say."""
        if index < len(self.trace.items):
            return self.trace.items[index]
        mm = self.mm
        uuid = mm.multimodal_uuids[index] if mm is not None and mm.multimodal_uuids is not None else None
        return TraceItem(modality="item", digest=mm.digests[index].hex() if mm is not None else "", uuid=uuid)

    @property
    def num_items(self) -> int:
        return max(len(self.trace.items), self.mm.num_items if self.mm is not None else 0)

    def text(self, start: int, stop: int) -> str:
        """The text of some positions in one line where the trace has it, else their ids."""
        ids, texts = self.trace.prompt_token_ids[start:stop], self.trace.texts
        if ids and all(token in texts for token in ids):
            return "".join(texts[token] for token in ids).replace("\n", "\\n")
        return " ".join(str(token) for token in ids)


def explain(trace: RequestTrace) -> Explanation:
    """What the block keys of ``trace`` are made of. Raises ``InvalidMetadata``."""
    mm = parse_multimodal_input(trace)
    tokens = augmented_tokens(trace.prompt_token_ids, mm, trace.vocab_size)
    return Explanation(trace, mm, tokens, root_key(trace.lora_id, trace.cache_salt))


def grid_words(grid: Any) -> str:
    """``[1, 34, 46]`` as ``34x46``, a video's ``[4, 34, 46]`` as ``4x34x46``; a list of grids with commas."""
    if not isinstance(grid, (list, tuple)):
        return str(grid)
    if grid and isinstance(grid[0], (list, tuple)):
        return ", ".join(map(grid_words, grid))
    return "x".join(str(n) for n in (grid[1:] if len(grid) == 3 and grid[0] == 1 else grid))


def position_words(positions: Mapping[str, Any]) -> dict[str, str]:
    """``ItemHandoff.positions`` for reading: name and value of each entry."""
    words = {}
    for name, value in positions.items():
        grid = "grid" in name and "second" not in name
        label = "grid" if name == "grid_thw" else name.replace("_", " ")
        words[label] = grid_words(value) if grid else str(value)
    return words


def item_words(side: Explanation, index: int) -> str:
    """One line on an item: what it is, where its tokens are, and how its digest begins."""
    item = side.item(index)
    words = [item.modality, *(f"{name} {value}" for name, value in position_words(item.positions).items())]
    if side.mm is not None:
        runs = side.mm.item_runs[index]
        count = side.mm.multimodal_lengths[index]
        where = f"in {len(runs)} runs from" if len(runs) > 1 else "at"
        framing = f" ({len(item.special_offsets)} framing)" if item.special_offsets else ""
        words.append(f"{count} tokens{framing} {where} {runs[0][0]}")
    if item.rows:
        words.append(f"{item.rows} embedding rows")
    if item.uuid is not None:
        words.append(f'uuid "{item.uuid}"')
    return ", ".join([*words, f"digest {item.digest[:16]}"])


def summary_words(side: Explanation) -> tuple[str, str]:
    """A name for the request, and one line of facts about it."""
    trace = side.trace
    facts = [f"{len(side.tokens)} tokens", f"{len(side.blocks)} blocks of {trace.tokens_per_block}"]
    if trace.unexpanded_token_ids:
        facts[0] += f" (expanded from {len(trace.unexpanded_token_ids)})"
    facts.append("with a cache salt" if trace.cache_salt is not None else "no cache salt")
    if trace.lora_id is not None:
        facts.append(f"LoRA adapter {trace.lora_id}")
    if trace.kind:
        facts.append(f"keys: {trace.kind}" + (f" ({trace.reason})" if trace.reason else ""))
    return " ".join(part for part in (trace.request_id, trace.role) if part) or "request", ", ".join(facts)


def piece_words(side: Explanation, piece: Piece) -> str:
    """What a piece is, and whether its run begins (``[``) or ends (``]``) there."""
    if piece.item == TEXT:
        text = side.text(piece.start, piece.stop)
        return f"text {text if len(text) <= TEXT_WIDTH else text[: TEXT_WIDTH - 3] + '...'}"
    last = piece.offset + piece.stop - piece.start
    span = f"{piece.offset + 1}-{last}" if last > piece.offset + 1 else f"{last}"
    return f"item {piece.item + 1} {'[' if piece.begins else ''}{span}{']' if piece.ends else ''}"
