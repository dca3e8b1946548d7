# SPDX-License-Identifier: Apache-2.0
"""The page that ``dynamo-epd explain --html`` writes: one file, nothing loaded from elsewhere, no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template

from ..contract.compare import Comparison, Line, compare, lines, verdict_words
from ..contract.explain import TEXT, Explanation, Piece, item_words, piece_words, summary_words

COLOURS = 6
SLIM = 24
"""A piece narrower than one part in this many of its block is drawn without a label."""


def page(sides: Sequence[Explanation], names: Sequence[str], *, every: bool = False) -> str:
    """The HTML of one request, or of two and their comparison; ``names`` are the files they came from."""
    title = "KV blocks of " + " and ".join(names)
    comparison = compare(*sides) if len(sides) > 1 else None
    parts = [f"<h1>{escape(title)}</h1>"]
    if comparison is not None:
        parts.append(_verdict(sides, comparison))
    parts.append('<div class="sides">')
    parts += [_side(side, name if len(sides) > 1 else "") for side, name in zip(sides, "AB", strict=False)]
    parts.append("</div>")
    parts.append(
        '<div class="row head"><div class="n">block</div><div class="range">tokens</div><div></div>'
        '<div>what is in it</div><div class="key">key</div></div>'
    )
    told = comparison is None
    for line in lines(*sides, every=every):
        if line.state == "after" and comparison is not None and not told:
            parts.append(f'<div class="row first"><div class="why">{escape(comparison.differences[0])}</div></div>')
            told = True
        parts.append(_line(line))
    if comparison is not None and comparison.differences and not told:
        parts.append(f'<div class="row first"><div class="why">{escape(comparison.differences[0])}</div></div>')
    template = resources.files(__package__).joinpath("explain_page.html").read_text(encoding="utf-8")
    return Template(template).substitute(title=escape(title), body="\n".join(parts))


def _verdict(sides: Sequence[Explanation], comparison: Comparison) -> str:
    lines = [f"<p>{escape(verdict_words(sides[0], sides[1], comparison))}</p>"]
    for i, line in enumerate(comparison.differences):
        lines.append(f'<p class="{"first" if i == 0 else "also"}">{"" if i == 0 else "also: "}{escape(line)}</p>')
    return f'<div class="verdict {"apart" if comparison.differences else "same"}">{"".join(lines)}</div>'


def _side(side: Explanation, name: str) -> str:
    title, facts = summary_words(side)
    items = [
        f'<li><i class="c{index % COLOURS}"></i>item {index + 1}: {escape(item_words(side, index))}</li>'
        for index in range(side.num_items)
    ]
    heading = f"{name}: {title}" if name else title
    return f'<section class="side"><h2>{escape(heading)}</h2><p>{escape(facts)}</p><ul>{"".join(items)}</ul></section>'


def _line(line: Line) -> str:
    length = line.blocks[-1].stop - line.blocks[0].start
    bar = "".join(_piece(piece, line.side, length) for piece in line.pieces)
    # A part-filled last block is drawn as wide as it is full.
    missing = line.side.trace.tokens_per_block - length
    if missing > 0:
        bar += f'<span class="pad" style="flex-grow:{missing}"></span>'
    keys = " and ".join(blocks[-1].key.hex() for blocks in (line.blocks, line.others) if blocks)
    return (
        f'<div class="row {line.state}"><div class="n">{line.number}</div><div class="range">{line.span}</div>'
        f'<div class="who">{line.mark}</div><div class="bar">{bar}</div>'
        f'<div class="key" title="{keys}">{line.key}</div></div>'
    )


def _piece(piece: Piece, side: Explanation, length: int) -> str:
    size = piece.stop - piece.start
    slim = size * SLIM < length
    classes = [
        *([] if piece.item == TEXT else [f"c{piece.item % COLOURS}"]),
        *(name for name, on in (("begins", piece.begins), ("ends", piece.ends), ("slim", slim)) if on),
    ]
    words = piece_words(side, piece)
    title = f"positions {piece.start}-{piece.stop - 1}: {words}"
    label = "" if slim else escape(side.text(piece.start, piece.stop) if piece.item == TEXT else words)
    return f'<span class="{" ".join(classes)}" style="flex-grow:{size}" title="{escape(title)}">{label}</span>'
