# SPDX-License-Identifier: Apache-2.0
"""How far two traced requests share their blocks, and in words what keeps them from sharing more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .explain import TEXT, Block, Explanation, Piece, position_words


@dataclass(frozen=True)
class Comparison:
    """How far two requests share, and why no further.

    Attributes:
        shared_blocks: blocks with equal keys, from the first on.
        shared_tokens: leading tokens that are equal for the keys.
        differences: what differs, in words, first difference first; empty when the prompts have the same keys.
    """

    shared_blocks: int
    shared_tokens: int
    differences: tuple[str, ...]


def compare(a: Explanation, b: Explanation) -> Comparison:
    """Which leading blocks of two requests have the same keys, and what differs after them."""
    scope = _scope_differences(a, b)
    if scope:
        return Comparison(0, 0, tuple(scope + _item_differences(a, b)))
    shared = a.tokens.common_prefix(b.tokens)
    pairs = zip(a.blocks, b.blocks, strict=False)
    blocks = next((i for i, (x, y) in enumerate(pairs) if x.key != y.key), min(len(a.blocks), len(b.blocks)))
    differences = []
    if shared < max(len(a.tokens), len(b.tokens)):
        number = shared // a.trace.tokens_per_block + 1
        words, pair = _first_difference(a, b, shared)
        differences = [f"block {number}: {words}", *_item_differences(a, b, skip=pair)]
    return Comparison(blocks, shared, tuple(differences))


def _scope_differences(a: Explanation, b: Explanation) -> list[str]:
    """What makes every key of two requests differ."""
    x, y = a.trace, b.trace
    found = []
    if x.tokens_per_block != y.tokens_per_block:
        found.append(f"block 1: blocks hold {x.tokens_per_block} and {y.tokens_per_block} tokens")
    if x.lora_id != y.lora_id:
        names = ["no adapter" if t.lora_id is None else f"adapter {t.lora_id}" for t in (x, y)]
        found.append(f"block 1: the LoRA adapters differ: {names[0]} and {names[1]}")
    if x.cache_salt != y.cache_salt:
        why = [f" ({name} is keyed as {t.kind}: {t.reason})" for name, t in (("A", x), ("B", y)) if t.reason]
        found.append("block 1: the cache salts differ" + "".join(why))
    return found


def _first_difference(a: Explanation, b: Explanation, at: int) -> tuple[str, tuple[int, int] | None]:
    """What differs at position ``at``, and the two items where both sides have one there."""
    if at == len(a.tokens) or at == len(b.tokens):
        short, long = ("A", "B") if at == len(a.tokens) else ("B", "A")
        return f"{short} ends before token {at}, {long} goes on", None
    x, y = a.piece_at(at), b.piece_at(at)
    if x.item == TEXT and y.item == TEXT:
        return f"token {at} is {_token(a, at)} in A and {_token(b, at)} in B", None
    if x.item == TEXT or y.item == TEXT:
        sides = []
        for name, side, piece in (("A", a, x), ("B", b, y)):
            belongs = f"text {_token(side, at)}" if piece.item == TEXT else _local(piece, at)
            sides.append(f"{belongs} in {name}")
        return f"token {at} is {sides[0]} and {sides[1]}", None
    offsets = [piece.offset + at - piece.start for piece in (x, y)]
    if offsets == [0, 0]:
        return _content_words(a, b, x.item, y.item), (x.item, y.item)
    if a.trace.vocab_size != b.trace.vocab_size and offsets[0] == offsets[1]:
        return f"the vocabulary sizes differ: {a.trace.vocab_size} and {b.trace.vocab_size}", None
    return f"token {at} is {_local(x, at)} in A and {_local(y, at)} in B", None


def _item_differences(a: Explanation, b: Explanation, skip: tuple[int, int] | None = None) -> list[str]:
    """Items of equal number that differ, in words; ``skip`` is a pair that has been named already."""
    found = []
    for i in range(min(a.num_items, b.num_items)):
        if (i, i) != skip and _hash(a, i) != _hash(b, i):
            found.append(_content_words(a, b, i, i))
    if a.num_items != b.num_items:
        found.append(f"A has {a.num_items} media items, B has {b.num_items}")
    return found


def _content_words(a: Explanation, b: Explanation, i: int, j: int) -> str:
    x, y = a.item(i), b.item(j)
    name = f"item {i + 1}" if i == j else f"item {i + 1} of A and item {j + 1} of B"
    if x.modality != y.modality:
        return f"{name}: {x.modality} and {y.modality}"
    verb = "'s content differs" if i == j else " differ in content"
    if x.digest == y.digest:
        return f"{name}{verb}: equal digests, but the tokens alternate with another item's in another way"
    found = []
    ours, theirs = position_words(x.positions), position_words(y.positions)
    for label in [*ours, *(label for label in theirs if label not in ours)]:
        if ours.get(label) != theirs.get(label):
            found.append(f"{label} {ours.get(label, 'none')} and {theirs.get(label, 'none')}")
    if x.uuid != y.uuid:
        quoted = ["none" if u is None else f'"{u}"' for u in (x.uuid, y.uuid)]
        found.append(f"uuid {quoted[0]} and {quoted[1]}")
    if x.rows != y.rows and not found:
        found.append(f"{x.rows} and {y.rows} embedding rows")
    if a.trace.model != b.trace.model:
        found.append(f"model {a.trace.model[:16] or 'unknown'} and {b.trace.model[:16] or 'unknown'}")
    if not found:
        kind = {"image": "pixels", "video": "frames", "audio": "samples"}.get(x.modality, "content")
        found.append(f"other {kind}, encoder or options, digests {x.digest[:8]} and {y.digest[:8]}")
    return f"{name}{verb}: {'; '.join(found)}"


def _hash(side: Explanation, item: int) -> bytes | str:
    return side.mm.digests[item] if side.mm is not None else side.item(item).digest


def _token(side: Explanation, at: int) -> str:
    token = side.trace.prompt_token_ids[at]
    text = side.trace.texts.get(token)
    return f"{token}" if text is None else f"{text!r} ({token})"


def _local(piece: Piece, at: int) -> str:
    return f"token {piece.offset + at - piece.start + 1} of item {piece.item + 1}"


def verdict_words(a: Explanation, b: Explanation, comparison: Comparison) -> str:
    """How far two requests share, in one sentence."""
    if not comparison.differences:
        return f"The two share all of their {len(a.blocks)} blocks."
    tokens = min(len(a.tokens), len(b.tokens))
    if comparison.shared_blocks == 0:
        equal = f" (their first {comparison.shared_tokens} tokens are equal)" if comparison.shared_tokens else ""
        return f"The two share no block{equal}."
    blocks = f"block 1 of {min(len(a.blocks), len(b.blocks))}"
    if comparison.shared_blocks > 1:
        blocks = f"blocks 1 to {comparison.shared_blocks} of {min(len(a.blocks), len(b.blocks))}"
    return f"The two share {blocks} (their first {comparison.shared_tokens} of {tokens} tokens are equal)."


@dataclass(frozen=True)
class Line:
    """What is drawn in one line: a block, or a stretch of like blocks.

    Attributes:
        mark: ``=`` for shared, ``≠`` where both sides look alike and have different keys, ``A`` or ``B`` for one side,
            empty where there is one side only.
        state: ``shared``, ``first`` (the first block that differs), ``after``, or empty.
        side: the request that ``blocks`` belong to; A where both are drawn.
        others: the blocks of B where the mark is ``≠``.
    """

    mark: str
    state: str
    side: Explanation
    blocks: tuple[Block, ...]
    others: tuple[Block, ...] = ()

    @property
    def number(self) -> str:
        first, last = self.blocks[0].number, self.blocks[-1].number
        return str(first) if first == last else f"{first}-{last}"

    @property
    def span(self) -> str:
        return f"{self.blocks[0].start}-{self.blocks[-1].stop - 1}"

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of a block; for a stretch, the one piece that it is inside of."""
        if len(self.blocks) == 1:
            return self.blocks[0].pieces
        inside = self.blocks[0].pieces[0]
        return (Piece(inside.start, self.blocks[-1].stop, inside.item, inside.offset),)

    @property
    def key(self) -> str:
        """The keys, shortened to 17 characters."""
        first, last = self.blocks[0].key.hex(), self.blocks[-1].key.hex()
        if self.others:
            return f"{last[:8]} {self.others[-1].key.hex()[:8]}"
        return last[:16] if len(self.blocks) == 1 else f"{first[:7]}...{last[:7]}"


def lines(a: Explanation, b: Explanation | None = None, *, every: bool = False) -> list[Line]:
    """One request, or two against each other, line by line.

    Args:
        every: one line for each block; else stretches of three and more like blocks share one.
    """
    if b is None:
        return [Line("", "", a, a.blocks[i:j]) for i, j in _stretches([_insides(a.blocks)], every)]
    shared = compare(a, b).shared_blocks
    state = ["shared"] * shared + ["first"] + ["after"] * max(len(a.blocks), len(b.blocks))
    out = []
    for i, j in _stretches([_insides(a.blocks), _insides(b.blocks), state], every):
        ours, theirs = a.blocks[i:j], b.blocks[i:j]
        if state[i] == "shared":
            out.append(Line("=", state[i], a, ours))
        elif ours and theirs and _alike(a, ours, b, theirs):
            out.append(Line("≠", state[i], a, ours, theirs))
        else:
            sides = (("A", a, ours), ("B", b, theirs))
            out += [Line(mark, state[i], side, blocks) for mark, side, blocks in sides if blocks]
    return out


def _insides(blocks: Sequence[Block]) -> list[int | None]:
    """Per block the item (or ``TEXT``) that all of it is inside of, None where something begins or ends in it."""
    return [None if len(b.pieces) != 1 or b.pieces[0].begins or b.pieces[0].ends else b.pieces[0].item for b in blocks]


def _stretches(kinds: Sequence[Sequence[Any]], every: bool) -> list[tuple[int, int]]:
    """Ranges of block indices that are drawn together: where all of ``kinds`` stay what they are."""
    columns = [[kind[i] if i < len(kind) else "none" for kind in kinds] for i in range(max(map(len, kinds[:2])))]
    out = []
    start = 0
    for i in range(1, len(columns) + 1):
        if i < len(columns) and not every and None not in columns[i] and columns[i] == columns[start]:
            continue
        step = i - start if i - start >= 3 else 1
        out += [(at, at + step) for at in range(start, i, step)]
        start = i
    return out


def _alike(a: Explanation, ours: Sequence[Block], b: Explanation, theirs: Sequence[Block]) -> bool:
    if [block.pieces for block in ours] != [block.pieces for block in theirs]:
        return False
    texts = [piece for block in ours for piece in block.pieces if piece.item == TEXT]
    ids = [side.trace.prompt_token_ids for side in (a, b)]
    return all(ids[0][piece.start : piece.stop] == ids[1][piece.start : piece.stop] for piece in texts)
