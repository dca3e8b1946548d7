# SPDX-License-Identifier: Apache-2.0
"""Pictures that the toy model understands, questions about them, and the right answers.

A picture is one coloured shape on a background of another colour. The toy model was trained on pictures of about 84
pixels a side (one picture also up to 112), alone or two in one question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

TOY_MODEL = Path(__file__).parent / "toy_vlm"
"""The checkpoint that comes with the package."""

SIDE = 84
"""Default side of a picture in pixels: 3 x 3 = 9 tokens."""

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 170, 70),
    "blue": (50, 80, 220),
    "yellow": (240, 220, 60),
    "orange": (245, 145, 35),
    "purple": (150, 60, 180),
    "white": (245, 245, 245),
    "black": (20, 20, 20),
}

SHAPES = ("circle", "square", "triangle")


@dataclass(frozen=True)
class Picture:
    """One shape on a background.

    Attributes:
        background, colour: names in ``COLOURS``.
        shape: one of ``SHAPES``.
        width, height: pixels.
        centre: ``(x, y)`` of the shape, as fractions of width and height.
        radius: of the shape, as a fraction of the shorter side.
    """

    background: str
    colour: str
    shape: str
    width: int = SIDE
    height: int = SIDE
    centre: tuple[float, float] = (0.5, 0.5)
    radius: float = 0.33

    def draw(self) -> Image.Image:
        """The picture as an RGB image."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (self.width, self.height), COLOURS[self.background])
        x, y = self.centre[0] * self.width, self.centre[1] * self.height
        r = self.radius * min(self.width, self.height)
        pen, fill = ImageDraw.Draw(image), COLOURS[self.colour]
        if self.shape == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=fill)
        elif self.shape == "square":
            pen.rectangle((x - 0.85 * r, y - 0.85 * r, x + 0.85 * r, y + 0.85 * r), fill=fill)
        else:
            pen.polygon([(x, y - r), (x - 0.9 * r, y + 0.75 * r), (x + 0.9 * r, y + 0.75 * r)], fill=fill)
        return image

    def recoloured(self, colour: str) -> Picture:
        """The same picture with its shape in another colour."""
        return replace(self, colour=colour)


@dataclass(frozen=True)
class Question:
    """A question and how to answer it from the pictures that it is about."""

    text: str
    pictures: int
    answer: Callable[[Sequence[Picture]], str]


BACKGROUND = Question("What colour is the background?", 1, lambda p: p[0].background)
SHAPE = Question("What shape is it?", 1, lambda p: p[0].shape)
COLOUR = Question("What colour is the shape?", 1, lambda p: p[0].colour)
SECOND_SHAPE = Question("What shape is in the second image?", 2, lambda p: p[1].shape)
FIRST_COLOUR = Question("What colour is the shape in the first image?", 2, lambda p: p[0].colour)
QUESTIONS = (BACKGROUND, SHAPE, COLOUR, SECOND_SHAPE, FIRST_COLOUR)
"""All that the toy model was trained to answer."""


@dataclass(frozen=True)
class Example:
    """Pictures, a question about them, and the right answer."""

    pictures: tuple[Picture, ...]
    question: Question

    @property
    def answer(self) -> str:
        return self.question.answer(self.pictures)

    def messages(self) -> list[dict[str, Any]]:
        """The chat that asks it, as the model's chat template takes it; pictures come before the question."""
        content: list[dict[str, Any]] = [{"type": "image"} for _ in self.pictures]
        return [{"role": "user", "content": [*content, {"type": "text", "text": self.question.text}]}]


def random_picture(rng: np.random.Generator, side: int = SIDE) -> Picture:
    """A picture with everything but its size drawn at random; the shape lies whole inside it."""
    background, colour = rng.choice(list(COLOURS), 2, replace=False).tolist()
    radius = float(rng.uniform(0.25, 0.4))
    x, y = rng.uniform(radius, 1 - radius, 2).tolist()
    return Picture(background, colour, str(rng.choice(SHAPES)), side, side, (x, y), radius)


def random_example(rng: np.random.Generator, pictures: int | None = None) -> Example:
    """A question with as many random pictures as it is about.

    Args:
        pictures: 1 or 2 to draw among the questions about so many; None for all.
    """
    choices = [question for question in QUESTIONS if pictures in (None, question.pictures)]
    question = choices[int(rng.integers(len(choices)))]
    return Example(tuple(random_picture(rng) for _ in range(question.pictures)), question)
