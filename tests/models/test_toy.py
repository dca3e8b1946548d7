# SPDX-License-Identifier: Apache-2.0
"""The toy model answers, and its training script learns."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dynamo_epd.demo import train_toy
from dynamo_epd.demo.toy_data import (
    COLOURS,
    FIRST_COLOUR,
    QUESTIONS,
    SECOND_SHAPE,
    TOY_MODEL,
    Example,
    Picture,
    random_example,
    random_picture,
)


def test_pictures_lie_whole_inside_and_are_repeatable():
    rng = np.random.default_rng(1)
    for _ in range(50):
        picture = random_picture(rng)
        assert picture.background != picture.colour
        pixels = np.asarray(picture.draw())
        assert np.array_equal(pixels, np.asarray(picture.draw()))
        border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert (border == COLOURS[picture.background]).all(axis=1).mean() > 0.9
        assert {tuple(p) for p in pixels.reshape(-1, 3).tolist()} == {
            COLOURS[picture.background],
            COLOURS[picture.colour],
        }


def test_answers_are_read_off_the_right_picture():
    a, b = Picture("red", "blue", "circle"), Picture("white", "black", "square")
    assert Example((a, b), SECOND_SHAPE).answer == "square" and Example((b, a), SECOND_SHAPE).answer == "circle"
    assert Example((a, b), FIRST_COLOUR).answer == "blue" and Example((b, a), FIRST_COLOUR).answer == "black"
    assert a.recoloured("green").colour == "green" and a.colour == "blue"


@pytest.mark.parametrize(("pictures", "least"), [(1, 0.95), (2, 0.9)])
def test_the_toy_answers_what_it_was_not_trained_on(pictures, least):
    rng = np.random.default_rng(11)
    assert train_toy.accuracy(TOY_MODEL, [random_example(rng, pictures) for _ in range(40)]) >= least


def test_a_few_steps_of_training_learn_and_save(tmp_path):
    losses = train_toy.train(tmp_path, steps=6, batch_size=4, seed=3)
    assert min(losses[3:]) < losses[0] and np.isfinite(losses).all()
    shipped, made = (json.loads((path / "config.json").read_text()) for path in (TOY_MODEL, tmp_path))
    assert made["text_config"]["vocab_size"] == shipped["text_config"]["vocab_size"]
    assert made["vision_config"]["hidden_size"] == shipped["vision_config"]["hidden_size"]
    rng = np.random.default_rng(5)
    assert 0 <= train_toy.accuracy(tmp_path, [random_example(rng) for _ in range(2)]) <= 1
    again = train_toy.train(tmp_path / "again", steps=2, batch_size=4, seed=3)
    assert again == losses[:2] or np.allclose(again[0], losses[0])


def test_labels_cover_the_answer_and_nothing_else():
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(TOY_MODEL)
    examples = [Example((Picture("red", "blue", "circle"),) * q.pictures, q) for q in QUESTIONS]
    batch = train_toy.batch_of(processor, examples)
    for labels, ids, example in zip(batch["labels"], batch["input_ids"], examples, strict=True):
        kept = labels != -100
        assert processor.tokenizer.decode(ids[kept]) == f"{example.answer}<|im_end|>"
