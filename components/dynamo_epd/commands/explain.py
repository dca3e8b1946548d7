# SPDX-License-Identifier: Apache-2.0
"""``dynamo-epd explain``: a prompt as blocks, and why two requests do, or do not, share them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..contract.compare import Comparison, Line, compare, lines, verdict_words
from ..contract.errors import InvalidRequest
from ..contract.explain import TEXT, Explanation, Piece, explain, item_words, piece_words, summary_words
from .explain_page import page
from .keys import read_trace

ITEM_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "bright_red")
STYLES = {"": "", "shared": "green", "first": "bold red", "after": "dim"}
BAR_WIDTH = 16


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="say why two requests do, or do not, share KV blocks",
        description="Show a prompt as KV blocks and, given a second one, how far the two share and what differs first.",
        epilog="The files are those that workers write with --trace-requests DIR, or inputs of 'dynamo-epd keys'.",
    )
    parser.add_argument("a", metavar="A.json", help="a request ('-' reads standard input)")
    parser.add_argument("b", metavar="B.json", nargs="?", help="a request to compare it with")
    parser.add_argument("--html", metavar="FILE", help="also write the same as one self-contained page")
    parser.add_argument("--all", action="store_true", help="one row for every block, also inside long items")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    sides = [explain(read_trace(file)) for file in (args.a, args.b) if file is not None]
    if args.html:
        names = [Path(file).name for file in (args.a, args.b) if file is not None]
        try:
            Path(args.html).write_text(page(sides, names, every=args.all), encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(f"{args.html} cannot be written: {error.strerror}") from error
    show(Console(highlight=False), sides, every=args.all)
    return 0


def show(console: Console, sides: Sequence[Explanation], *, every: bool = False) -> None:
    """Print one request, or two and their comparison."""
    for name, side in zip("AB", sides, strict=False):
        _summary(console, side, name if len(sides) > 1 else "")
    comparison = compare(*sides) if len(sides) > 1 else None
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("block", justify="right", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, width=BAR_WIDTH)
    table.add_column("what is in it", ratio=1, overflow="fold")
    table.add_column("key", no_wrap=True)
    for line in lines(*sides, every=every):
        table.add_row(*_cells(line))
    console.print(table)
    if comparison is not None:
        console.print()
        _verdict(console, sides, comparison)


def _summary(console: Console, side: Explanation, name: str) -> None:
    title, facts = summary_words(side)
    console.print(Text.assemble((f"{name}: {title}  " if name else f"{title}  ", "bold"), facts))
    for index in range(side.num_items):
        line = f"  item {index + 1}  {item_words(side, index)}"
        console.print(Text(line, style=_colour(index)), soft_wrap=True)
    console.print()


def _cells(line: Line) -> tuple[str, str, Text, Text, Text]:
    style = STYLES[line.state]
    what = Text(f"{line.mark} " if line.mark else "", style=style)
    for i, piece in enumerate(line.pieces):
        what.append(" | " if i else "", style="dim")
        what.append(piece_words(line.side, piece), style=_colour(piece.item))
    return line.number, line.span, _bar(line.pieces), what, Text(line.key, style=style)


def _bar(pieces: Sequence[Piece]) -> Text:
    """The block drawn ``BAR_WIDTH`` cells wide, each cell in the colour of what stands there."""
    bar = Text()
    start, length = pieces[0].start, pieces[-1].stop - pieces[0].start
    for cell in range(min(BAR_WIDTH, length)):
        position = start + cell * length // min(BAR_WIDTH, length)
        piece = next(piece for piece in pieces if piece.start <= position < piece.stop)
        bar.append("·" if piece.item == TEXT else "█", style=_colour(piece.item))
    return bar


def _verdict(console: Console, sides: Sequence[Explanation], comparison: Comparison) -> None:
    console.print(Text(verdict_words(sides[0], sides[1], comparison), style="bold"))
    for i, line in enumerate(comparison.differences):
        console.print(f"[{'bold red' if i == 0 else 'default'}]{'' if i == 0 else 'also: '}{escape(line)}[/]")


def _colour(item: int) -> str:
    return "default" if item == TEXT else ITEM_COLOURS[item % len(ITEM_COLOURS)]
