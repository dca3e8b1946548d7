# SPDX-License-Identifier: Apache-2.0
"""The demo's chat requests: what goes wrong when media are keyed by placeholder tokens, and what must be shared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .toy_data import BACKGROUND, COLOUR, FIRST_COLOUR, SECOND_SHAPE, SHAPE, Picture

Part = str | Picture | Path
"""A piece of a user message: text, a picture sent inline, or a picture file sent by its URL."""


@dataclass(frozen=True)
class Ask:
    """One chat request.

    Attributes:
        name: unique; what the table calls it.
        turns: user messages; the answers between them are the ones that were given.
        together: requests with the same non-empty value in a row are sent at the same time.
    """

    name: str
    turns: tuple[tuple[Part, ...], ...]
    together: str = ""

    @property
    def question(self) -> str:
        return str(self.turns[-1][-1])

    @property
    def pictures(self) -> list[Picture | Path]:
        return [part for turn in self.turns for part in turn if not isinstance(part, str)]


RED = Picture("blue", "red", "circle")
GREEN = RED.recoloured("green")
PURPLE = Picture("yellow", "purple", "square")
BLACK = PURPLE.recoloured("black")
ORANGE = Picture("white", "orange", "triangle")


def once(name: str, *parts: Part, together: str = "") -> Ask:
    return Ask(name, (parts,), together)


def scenario(folder: Path) -> Iterator[Ask]:
    """All requests in order.

    Args:
        folder: where the workers may read files; two copies of one picture are put there.
    """
    yield once("red", RED, COLOUR.text)
    yield once("green, same question", GREEN, COLOUR.text)
    yield once("green again", GREEN, COLOUR.text)
    yield once("red again", RED, COLOUR.text)

    yield once("black first this time", BLACK, COLOUR.text)
    yield once("purple after it", PURPLE, COLOUR.text)
    yield once("black again", BLACK, COLOUR.text)
    yield once("purple again", PURPLE, COLOUR.text)

    yield once("red, another question", RED, BACKGROUND.text)
    yield once("purple, another question", PURPLE, BACKGROUND.text)
    yield once("red, a third question", RED, SHAPE.text)
    yield once("purple, a third question", PURPLE, SHAPE.text)

    yield once("two images", RED, PURPLE, SECOND_SHAPE.text)
    yield once("two images, swapped", PURPLE, RED, SECOND_SHAPE.text)
    yield once("two images again", RED, PURPLE, SECOND_SHAPE.text)
    yield once("swapped again", PURPLE, RED, SECOND_SHAPE.text)
    yield once("two images, the first", RED, PURPLE, FIRST_COLOUR.text)
    yield once("swapped, the first", PURPLE, RED, FIRST_COLOUR.text)
    yield once("the first is green", GREEN, PURPLE, FIRST_COLOUR.text)

    for name, picture in (("red", RED), ("green", GREEN)):
        first = (picture, COLOUR.text)
        yield Ask(f"chat about {name}, turn 1", (first,))
        yield Ask(f"chat about {name}, turn 2", (first, (SHAPE.text,)))
        yield Ask(f"chat about {name}, turn 3", (first, (SHAPE.text,), (PURPLE, COLOUR.text)))

    files = [folder / name for name in ("one.png", "another-name.png")]
    for file in files:
        ORANGE.draw().save(file)
    yield once("a file", files[0], COLOUR.text)
    yield once("same bytes, other name", files[1], COLOUR.text)

    crowd = ORANGE.recoloured("blue")
    for i in range(1, 7):
        yield once(f"six at once, {i}", crowd, COLOUR.text, together="six")

    yield once("no image", "Hello!")
    yield once("no image again", "Hello!")
