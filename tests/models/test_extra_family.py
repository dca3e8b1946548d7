# SPDX-License-Identifier: Apache-2.0
"""A family in one file: those in no conformance file against transformers, and one from outside this package."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from dynamo_epd import models
from dynamo_epd.contract.layout import expand
from dynamo_epd.models import Media

from .tiny import language_model_inputs


def picture(height, width, seed):
    return Image.fromarray(np.random.RandomState(seed).randint(0, 255, (height, width, 3), dtype=np.uint8))


# Per family: item and the grid of its embedding, in prompt order.
PROMPTS: dict[str, list[tuple[Media, tuple[int, int, int] | None]]] = {
    "internvl": [
        (Media("image", picture(60, 90, 1)), None),
        (Media("video", np.random.RandomState(3).randint(0, 255, (3, 60, 60, 3), dtype=np.uint8), {"fps": 1.0}), None),
        (Media("image", picture(150, 40, 2)), None),
    ],
    "idefics3": [
        (Media("image", picture(60, 90, 1)), (1, 2, 2)),
        (Media("image", picture(150, 40, 2)), (1, 2, 1)),
        (Media("image", picture(90, 60, 3)), (1, 2, 2)),
    ],
}
RUNS = {"internvl": [1, 3, 1], "idefics3": [5, 3, 5]}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompt_and_embeddings_equal_transformers(name, family, full):
    f, prompts = family(name), PROMPTS[name]
    markers = {modality: marker for marker, modality in f.markers()}
    media = [item for item, _ in prompts]
    first, second, third = (markers[item.modality] for item in media)
    prompt = f"<|im_start|>user\n{first}\nand {second}\nthen {third}?<|im_end|>"
    ids = f.codec.encode(prompt)
    places = f.placeholders(ids, Counter(item.modality for item in media))
    items = [f.prepare(item, {}) for item in media]
    layout = expand(ids, f.replacements(ids, places, [item.expansion for item in items]), 3)
    call = {f"{kind}s": [m.data for m in media if m.modality == kind] for kind in markers}
    plain = f.processor(text=[prompt], return_tensors="pt", **call)
    assert layout.token_ids.tolist() == plain["input_ids"][0].tolist()
    assert [len(layout.runs(i)) for i in range(3)] == RUNS[name]
    embeds = language_model_inputs(full(name), dict(plain))["inputs_embeds"][0]
    for i, embedding in enumerate(f.encode(items)):
        torch.testing.assert_close(embedding, embeds[layout.slot_item == i], atol=1e-5, rtol=1e-5)
    for item, (_, grid) in zip(items, prompts, strict=True):
        assert f.prepare_embedding(item.modality, item.rows, grid, {}).expansion == item.expansion


_FAMILY = """
from dynamo_epd.models.general import GeneralFamily


class Plain(GeneralFamily):
    model_types = ("toyformer",)
"""


def test_a_new_family_is_one_file(tmp_path, monkeypatch, model_dir):
    """What the general path knows of a checkpoint is enough where transformers says all that there is to say."""
    (tmp_path / "toyformer.py").write_text(_FAMILY)
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    monkeypatch.setattr(models, "FAMILIES", models._families())
    assert models.FAMILIES["toyformer"].__name__ == "Plain"
    config = json.loads((model_dir("llava_next") / "config.json").read_text())
    raw = {**config, "model_type": "toyformer"}
    arguments = {"tower": True, "device": "cpu", "dtype": None}
    family = models.FAMILIES["toyformer"].from_pretrained(model_dir("llava_next"), raw, **arguments)
    item = family.prepare(Media("image", picture(60, 90, 1)), {})
    assert family.encode([item])[0].shape == (item.rows, 64)
