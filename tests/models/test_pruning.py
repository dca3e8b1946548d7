# SPDX-License-Identifier: Apache-2.0
"""Video pruned by content: ids, rows and embedding agree, and the layouts of Nemotron Nano v2 VL come out."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models

from dynamo_epd import models
from dynamo_epd.contract.errors import InvalidMetadata, InvalidRequest
from dynamo_epd.contract.layout import expand
from dynamo_epd.models import Media
from dynamo_epd.models.nemotron import keep_rows, kept_rows, retention

from .tiny import language_model_inputs, media_of, plain_inputs, write_model_dir

VIDEO = {"kind": "video", "frames": 8, "width": 64, "height": 48, "seed": 4, "fps": 4.0}
NAME = "nemotron_h_omni_videotok"


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7, 0.99])
def test_pruned_video_equals_transformers_pruning_inside_its_forward(rate, family, full):
    f, whole = family(NAME), full(NAME)
    prompt = "<|im_start|>user\n<video>What happens?<|im_end|>\n<|im_start|>assistant\n"
    ids = f.codec.encode(prompt)
    item = f.prepare(media_of(VIDEO), {"video_pruning_rate": rate})
    pruned, embedding = f.prune(item, f.encode([item])[0])
    edits = f.replacements(ids, f.placeholders(ids, {"video": 1}), [pruned.expansion])
    layout = expand(ids, edits, 1)
    assert layout.rows[0] == pruned.rows == len(embedding) == kept_rows(24, 4, rate)
    case = {"family": NAME, "case": "x", "text": prompt, "media": [VIDEO]}
    whole.video_pruning_rate = rate
    try:
        seen = language_model_inputs(whole, plain_inputs(f, case))
    finally:
        whole.video_pruning_rate = 0.0
    assert seen["inputs_embeds"].shape[1] == len(layout)
    want = whole.get_input_embeddings()(torch.from_numpy(layout.token_ids.astype(np.int64)))
    want[layout.slot_item == 0] = embedding
    torch.testing.assert_close(seen["inputs_embeds"][0], want, atol=1e-5, rtol=1e-5)


def test_rate_is_in_the_digest_of_videos_only(family):
    f = family(NAME)
    assert f.resolved_options("video", {})["video_pruning_rate"] == 0.0
    assert f.resolved_options("video", {"video_pruning_rate": 0.5})["video_pruning_rate"] == 0.5
    assert f.resolved_options("image", {"video_pruning_rate": 0.5}) == f.resolved_options("image", {})
    for bad in (1.0, -0.1, "half", True, None):
        with pytest.raises(InvalidRequest, match="video_pruning_rate is"):
            f.resolved_options("video", {"video_pruning_rate": bad})
        with pytest.raises(InvalidRequest, match="video_pruning_rate is"):
            f.prepare(media_of(VIDEO), {"video_pruning_rate": bad})


def test_nothing_is_pruned_unless_asked(family):
    f = family(NAME)
    item = f.prepare(media_of(VIDEO), {})
    embedding = f.encode([item])[0]
    assert f.prune(item, embedding) == (item, embedding) and f.reserve(item) is item


def test_a_mask_that_does_not_fit_is_refused(family):
    item = family(NAME).prepare(media_of(VIDEO), {})
    for kept in (np.ones(23, bool), np.zeros(24, bool)):
        with pytest.raises(InvalidMetadata, match="kept"):
            keep_rows(item, kept)


def test_still_video_keeps_its_first_tubelet():
    still = torch.randn(6, 8).repeat(4, 1)
    assert retention(still, 4, 0.9).tolist() == [True] * 6 + [False] * 18


@pytest.fixture(scope="module")
def nano_v2(tmp_path_factory):
    """Nano v2 VL's preprocessing: one frame a tubelet, 512 x 512 pixels, and a tokenizer that splits digits."""
    path = write_model_dir(NAME, tmp_path_factory.mktemp("nano") / "v2")
    processor = json.loads((path / "processor_config.json").read_text())
    processor["video_temporal_patch_dim"] = 1
    processor["video_processor"] |= {"video_target_num_patches": 1024, "temporal_patch_size": 1}
    (path / "processor_config.json").write_text(json.dumps(processor))
    added = json.loads((path / "tokenizer.json").read_text())["added_tokens"]
    words = ["\n", "Frame", " ", " sampled", " at", " seconds", ":", ": ", ".", "x", *"0123456789"]
    tokenizer = Tokenizer(tokenizer_models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="x"))
    pattern = r"\n|Frame| sampled| at| seconds|: |:|\.|\d| |x"
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    raw = json.loads(tokenizer.to_str())
    raw["added_tokens"] = [{**token, "id": len(words) + i} for i, token in enumerate(added)]
    (path / "tokenizer.json").write_text(json.dumps(raw))
    return models.load(path, tower=False)


def test_layout_of_nano_v2_vl(nano_v2):
    frames = np.zeros((8, 512, 512, 3), np.uint8)
    item = nano_v2.prepare(Media("video", frames, {"fps": 2.0}), {"video_pruning_rate": 0.5})
    ids = nano_v2.codec.encode("<video>")
    places = nano_v2.placeholders(ids, {"video": 1})

    def runs(prepared):
        layout = expand(ids, nano_v2.replacements(ids, places, [prepared.expansion]), 1)
        found = layout.runs(0)
        gaps = [b - a - n for (a, n), (b, _) in zip(found, found[1:], strict=False)]
        return [length for _, length in found], gaps

    assert runs(item) == ([258] * 8, [13] * 7)
    assert runs(nano_v2.reserve(item)) == ([1026, 2, 2, 2, 2, 2, 2, 2], [13] * 7)
    assert nano_v2.reserve(item).rows == 1024 == kept_rows(2048, 8, 0.5)
