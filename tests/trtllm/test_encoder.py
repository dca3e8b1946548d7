# SPDX-License-Identifier: Apache-2.0
"""``--encoder trtllm``: handles become tensors that equal our own encoder's."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
import torch

from dynamo_epd.contract.errors import ConfigError, Unavailable
from dynamo_epd.demo.toy_data import TOY_MODEL, Picture
from dynamo_epd.engine.trtllm import encoder as module
from dynamo_epd.engine.trtllm.encoder import EncoderItem, TrtllmEncoder
from dynamo_epd.engine.trtllm.names import load_names
from dynamo_epd.models.base import Media

from .prompts import family

RED, BLUE = Picture("red", "white", "circle"), Picture("blue", "white", "circle", width=112, height=56)


def items(*pictures):
    made = [family().prepare(Media("image", p.draw()), {}) for p in pictures]
    return made, [EncoderItem("image", p.draw(), (366,), m.rows) for p, m in zip(pictures, made, strict=True)]


async def test_embeddings_equal_our_own_encoders(variant):
    encoder = TrtllmEncoder(TOY_MODEL, overrides='{"max_batch_size": 4, "kv_cache_config": {"tokens_per_block": 8}}')
    with pytest.raises(Unavailable, match="not running"):
        await encoder.encode([])
    await encoder.start()
    prepared, asked = items(RED, BLUE)
    for got, want in zip(await encoder.encode(asked), family().encode(prepared), strict=True):
        torch.testing.assert_close(got, want)
    await encoder.stop()
    await encoder.stop()


async def test_a_video_is_given_as_its_loaders_give_it(variant):
    frames = np.random.default_rng(0).integers(0, 255, (4, 56, 56, 3), dtype=np.uint8)
    media = Media("video", frames, {"fps": 2.0, "total_frames": 8, "frame_indices": [0, 2, 4, 6]})
    prepared = family().prepare(media, {})
    encoder = TrtllmEncoder(TOY_MODEL)
    await encoder.start()
    asked, real = [], encoder._encoder.generate

    def generate(prompts, use_tqdm):
        asked.extend(prompt["multi_modal_data"]["video"] for prompt in prompts)
        return real(prompts, use_tqdm=use_tqdm)

    encoder._encoder.generate = generate
    [got] = await encoder.encode([EncoderItem("video", frames, (367,), prepared.rows, {}, media.meta)])
    torch.testing.assert_close(got, family().encode([prepared])[0])
    [[video]] = asked
    assert video.metadata == {"total_num_frames": 8, "fps": 2.0, "duration": 4.0, "frames_indices": [0, 2, 4, 6]}
    assert sys.modules["tensorrt_llm._torch.shared_tensor"]._TENSORS == {}


async def test_what_it_must_not_give(seven):
    encoder = TrtllmEncoder(TOY_MODEL)
    await encoder.start()
    _, [item] = items(RED)
    with pytest.raises(Unavailable, match="item 1: .* the processor says 77 rows"):
        await encoder.encode([dataclasses.replace(item, rows=77)])
    encoder._encoder.generate = lambda prompts, use_tqdm: []
    with pytest.raises(Unavailable, match="0 answers for 1 items"):
        await encoder.encode([item])
    encoder._encoder.generate = lambda prompts, use_tqdm: [object()]
    with pytest.raises(Unavailable, match="item 1: .* 0 embeddings"):
        await encoder.encode([item])

    def broken(prompts, use_tqdm):
        raise RuntimeError("out of memory")

    encoder._encoder.generate = broken
    with pytest.raises(Unavailable, match="out of memory"):
        await encoder.encode([item])


async def test_versions_and_models_without_it(seven, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="does not start"):
        await TrtllmEncoder(tmp_path).start()
    names = dataclasses.replace(load_names(), SharedTensorContainer=None)
    monkeypatch.setattr(module, "load_names", lambda: names)
    with pytest.raises(ConfigError, match="--encoder hf"):
        TrtllmEncoder(TOY_MODEL)
