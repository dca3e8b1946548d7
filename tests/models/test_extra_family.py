# SPDX-License-Identifier: Apache-2.0
"""A family in one file: InternVL, in no conformance file, against transformers; and one from outside this package."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from dynamo_epd import models
from dynamo_epd.contract.layout import expand
from dynamo_epd.models import Media

from .tiny import language_model_inputs, make_weights, write_model_dir


@pytest.fixture(scope="module")
def internvl(tmp_path_factory):
    """A tiny InternVL: family and whole model."""
    path = write_model_dir("qwen2_vl", tmp_path_factory.mktemp("extra") / "internvl")
    tokens = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    tokens["video_token"] = "<video>"
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    first = len(tokenizer["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    names = ["<|im_start|>", "<|im_end|>", *tokens.values()]
    tokenizer["added_tokens"] = [{"id": first + i, "content": name, **flags} for i, name in enumerate(names)]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings |= {"processor_class": "InternVLProcessor", "pad_token": "<|im_end|>", **tokens}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    picture = {
        "size": {"height": 56, "width": 56},
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    processor = {
        "processor_class": "InternVLProcessor",
        "image_seq_length": 4,
        "image_processor": {"image_processor_type": "GotOcr2ImageProcessor", "max_patches": 4, **picture},
        "video_processor": {"video_processor_type": "InternVLVideoProcessor", "do_sample_frames": False, **picture},
    }
    (path / "processor_config.json").write_text(json.dumps(processor))
    text = json.loads((path / "config.json").read_text())["text_config"]
    text |= {"model_type": "qwen2", "vocab_size": first + len(names)}
    text["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "default"}
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = {
        "model_type": "internvl",
        "architectures": ["InternVLForConditionalGeneration"],
        "image_token_id": first + names.index("<IMG_CONTEXT>"),
        "image_seq_length": 4,
        "vision_config": {"model_type": "internvl_vision", "image_size": [56, 56], "patch_size": [14, 14], **vision},
        "text_config": text,
    }
    (path / "config.json").write_text(json.dumps(config))
    whole = make_weights(path, 7)
    return models.load(path, tower=True), whole


def picture(height, width, seed):
    return Image.fromarray(np.random.RandomState(seed).randint(0, 255, (height, width, 3), dtype=np.uint8))


def test_prompt_and_embeddings_equal_transformers(internvl):
    family, whole = internvl
    images = [picture(60, 90, 1), picture(150, 40, 2)]
    frames = np.random.RandomState(3).randint(0, 255, (3, 60, 60, 3), dtype=np.uint8)
    prompt = "<|im_start|>user\n<IMG_CONTEXT>\nand <video>\nthen <IMG_CONTEXT>?<|im_end|>"
    ids = family.codec.encode(prompt)
    places = family.placeholders(ids, {"image": 2, "video": 1})
    media = [Media("image", images[0]), Media("video", frames, {"fps": 1.0}), Media("image", images[1])]
    items = [family.prepare(m, {}) for m in media]
    layout = expand(ids, family.replacements(ids, places, [item.expansion for item in items]), 3)
    plain = family.processor(text=[prompt], images=images, videos=[frames], return_tensors="pt")
    assert layout.token_ids.tolist() == plain["input_ids"][0].tolist()
    assert [len(layout.runs(i)) for i in range(3)] == [1, 3, 1]
    embeds = language_model_inputs(whole, dict(plain))["inputs_embeds"][0]
    for i, embedding in enumerate(family.encode(items)):
        torch.testing.assert_close(embedding, embeds[layout.slot_item == i], atol=1e-5, rtol=1e-5)
    for item in items:
        brought = family.prepare_embedding(item.modality, item.rows, None, {})
        assert brought.expansion == item.expansion


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
