# SPDX-License-Identifier: Apache-2.0
"""What a request may ask for, and what it is told when it may not."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from dynamo_epd import models
from dynamo_epd.contract.errors import ConfigError, InvalidRequest
from dynamo_epd.models import FAMILIES, Media
from dynamo_epd.models.options import known_options

from .tiny import RATE, cases, media_of

IMAGE = Media("image", Image.fromarray(np.random.RandomState(0).randint(0, 255, (60, 90, 3), dtype=np.uint8)))
PAD = "<|vision_start|><|image_pad|><|vision_end|>"


def test_unknown_family_names_the_known(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt_neo"}')
    with pytest.raises(ConfigError) as error:
        models.load(tmp_path, tower=False)
    assert "'gpt_neo'" in str(error.value) and all(name in str(error.value) for name in FAMILIES)


@pytest.mark.parametrize(
    ("name", "old"), [("phi4_multimodal", "5.22.0"), ("qwen2_5_omni", "5.20.2"), ("qwen3_vl", "5.19.0.dev0")]
)
def test_a_transformers_that_is_too_old_is_named(model_dir, monkeypatch, name, old):
    """At the start, and not by whatever its processor fails with at the first request."""
    path = model_dir(name)
    monkeypatch.setattr("transformers.__version__", old)
    with pytest.raises(ConfigError, match=f"'{name}.*' needs transformers 5.2[03] or newer, here is {old}"):
        models.load(path, tower=False)


def test_every_family_is_found_by_its_types():
    known = {c["family"].removesuffix("_videotok") for c in cases()} - {"pixtral", "qwen2_5_omni", "qwen3_omni_moe"}
    assert known | {"llava", "qwen2_5_omni_thinker", "qwen2_5_omni", "qwen3_omni_moe"} <= FAMILIES.keys()
    assert all(name in kind.model_types for name, kind in FAMILIES.items())


@pytest.mark.parametrize("content", [None, "[1]", "{", '{"model_type": 3}'])
def test_directory_without_a_model(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json|type 3"):
        models.load(tmp_path, tower=True)


@pytest.mark.parametrize(
    ("text", "counts", "numbers"),
    [
        (f"a{PAD}b", {"image": 2}, "1 image placeholder and the request 2 image items"),
        (f"a{PAD}b{PAD}", {"image": 1}, "2 image placeholders and the request 1 image item"),
        (f"a{PAD}", {}, "1 image placeholder and the request 0 image items"),
        ("a", {"image": 1}, "0 image placeholders and the request 1 image item"),
        (f"{PAD}", {"image": 1, "audio": 1}, "takes no audio"),
        (PAD.replace("image", "video"), {"image": 1}, "0 image placeholders"),
    ],
)
def test_counts_that_differ_are_both_named(family, text, counts, numbers):
    f = family("qwen2_5_vl")
    with pytest.raises(InvalidRequest, match=numbers):
        f.placeholders(f.codec.encode(text), counts)


def test_expanded_prompt_is_not_expanded_again(family):
    case = next(c for c in cases() if c["family"] == "qwen2_5_vl" and c["case"] == "one_image")
    with pytest.raises(InvalidRequest, match="6 image placeholders and the request 1 image item"):
        family("qwen2_5_vl").placeholders(case["expanded_ids"], {"image": 1})


def test_placeholder_text_counts_where_it_is_no_token(family):
    f = family("nemotron_h_omni")
    ids = f.codec.encode("before <video>after<video>")
    assert [kind for _, _, kind in f.placeholders(ids, {"video": 2})] == ["video", "video"]
    assert f.placeholders(f.codec.encode("<vide o> and <videos"), {}) == []


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"foo": 1}, "foo is not an option"),
        ({"images_kwargs": {"foo": 1}}, "images_kwargs.foo is not an option"),
        ({"images_kwargs": 3}, "must be an object"),
        ({"patch_size": 16}, "patch_size is 14 in this model"),
        ({"max_pixels": 10**9}, "may be at most"),
        ({"size": {"shortest_edge": 10**9, "longest_edge": 10**9}}, "may be at most"),
        ({"device": "cuda"}, "set by the worker"),
        ({"return_tensors": "np"}, "set by the worker"),
        ({"do_resize": "maybe"}, "do_resize"),
        ({"do_resize": False}, "do_resize must stay on"),
        ({"crop_size": 100_000, "do_center_crop": True}, "crop_size is not used"),
        ({"size": "x"}, "size"),
        ({"padding": "max_length"}, "padding is not an option"),
        ({"size": []}, "mm_processor_kwargs: a size lacks a side"),
        ({"fps": 1e-320}, "fps is 1e-320, must be from 1e-06 to 1000000"),
        ({"videos_kwargs": {"fps": float("inf")}}, "fps is inf, must be from"),
        ({"num_frames": 1 << 31}, "num_frames is 2147483648, must be from 1 to 65536"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(family, kwargs, message):
    f = family("qwen2_5_vl")
    for ask in (lambda: f.resolved_options("image", kwargs), lambda: f.prepare(IMAGE, kwargs)):
        with pytest.raises(InvalidRequest, match=message):
            ask()


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("gemma3", "size", 2),
        ("internvl", "size", {"height": 28, "width": 28}),
        ("llama4", "size", {"height": 28, "width": 28}),
        ("phi4_multimodal", "size", {"height": 28, "width": 28}),
        ("llava_next", "crop_size", 1),
        ("idefics3", "max_image_size", {"longest_edge": 7}),
    ],
)
def test_what_the_encoder_is_made_for_cannot_be_chosen(family, name, option, value):
    """Another tile than the encoder's gives it other rows than the prompt has, or any number of tiles."""
    f = family(name)
    with pytest.raises(InvalidRequest, match=f"{option} is .* in this model and cannot be"):
        f.prepare(IMAGE, {option: value})
    usual = f.resolved_options("image", {})
    assert f.resolved_options("image", {option: usual[option]}) == usual


@pytest.mark.parametrize("name", ["phi4_multimodal", "qwen2_audio", "qwen2_5_omni"])
def test_a_clip_is_filled_up_as_the_model_does(family, name):
    for kwargs in ({"pad_to_multiple_of": 1 << 31}, {"max_length": 1 << 31}):
        with pytest.raises(InvalidRequest, match="is not (used by|an option of) this model"):
            family(name).resolved_options("audio", kwargs)


def test_a_default_given_explicitly_changes_nothing(family):
    f = family("qwen2_5_vl")
    usual = f.resolved_options("image", {})
    assert usual["size"] == {"longest_edge": 50176, "shortest_edge": 3136} and "encoder" in usual
    for same in (
        {"max_pixels": 50176},
        {"size": {"longest_edge": 50176, "shortest_edge": 3136}},
        {"images_kwargs": {"do_resize": True}},
        {"fps": 3.0},
        {"videos_kwargs": {"max_pixels": 4000}},
    ):
        assert f.resolved_options("image", same) == usual, same
    assert f.resolved_options("image", {"max_pixels": 40000}) != usual
    assert f.resolved_options("video", {"fps": 3.0})["fps"] == 3.0
    json.dumps(usual)


@pytest.mark.parametrize("name", sorted({c["family"] for c in cases()}))
def test_resolved_options_are_json_for_every_modality(name, family):
    f = family(name)
    for modality in {kind for _, kind in f.markers()}:
        options = f.resolved_options(modality, {})
        assert json.loads(json.dumps(options)) == options and len(options) > 1


@pytest.mark.parametrize("name", sorted({c["family"] for c in cases()}))
def test_what_resolves_to_the_same_prepares_the_same(name, family):
    """A null too: transformers' processors take some for the default and some for "do not"."""
    f = family(name)
    if all(kind != "image" for _, kind in f.markers()):
        return

    def features(kwargs):
        return {
            key: (value.shape, value.double().sum().item()) for key, value in f.prepare(IMAGE, kwargs).features.items()
        }

    usual, made = f.resolved_options("image", {}), features({})
    for option in ("do_resize", "do_rescale", "do_normalize", "resample", "image_mean", "do_convert_rgb", "size"):
        if option not in known_options(f.processor, "image"):
            continue
        for kwargs in ({option: None}, {"images_kwargs": {option: None}}):
            assert f.resolved_options("image", kwargs) == usual, kwargs
            assert features(kwargs) == made, kwargs


def test_options_reach_the_processor(family):
    f = family("qwen2_5_vl")
    assert f.prepare(IMAGE, {"max_pixels": 3136}).rows < f.prepare(IMAGE, {}).rows
    assert f.prepare(IMAGE, {"images_kwargs": {"max_pixels": 3136}}).rows < f.prepare(IMAGE, {}).rows


@pytest.mark.parametrize("size", [(1, 1), (1, 32), (32, 1), (1, 199)])
def test_tiny_images(family, size):
    image = Media("image", Image.new("RGB", size, (1, 2, 3)))
    for name in ("qwen2_5_vl", "qwen3_vl", "gemma3", "llama4"):
        item = family(name).prepare(image, {})
        assert family(name).encode([item])[0].shape[0] == item.rows > 0


def test_what_the_processor_refuses_is_the_callers_fault(family):
    with pytest.raises(InvalidRequest, match="aspect ratio"):
        family("qwen2_5_vl").prepare(Media("image", Image.new("RGB", (4000, 3))), {})
    with pytest.raises(InvalidRequest, match="takes no audio"):
        family("qwen2_5_vl").prepare(Media("audio", np.zeros(16000, np.float32)), {})
    with pytest.raises(InvalidRequest, match="44100 samples a second"):
        family("qwen2_audio").prepare(Media("audio", np.zeros(16000, np.float32), {"sampling_rate": 44100}), {})
    with pytest.raises(InvalidRequest, match="3 frames and 2 frame indices"):
        frames = np.zeros((3, 60, 60, 3), np.uint8)
        family("qwen3_vl").prepare(Media("video", frames, {"fps": 2.0, "frame_indices": [0, 1]}), {})


def test_preparing_in_threads_gives_the_same(family):
    f = family("qwen3_vl")
    video = media_of({"kind": "video", "frames": 8, "width": 64, "height": 48, "seed": 4, "fps": 4.0})
    want = [f.prepare(m, {}) for m in (IMAGE, video)]
    with ThreadPoolExecutor(4) as pool:
        for i, got in enumerate(pool.map(lambda i: f.prepare((IMAGE, video)[i % 2], {}), range(24))):
            assert got.expansion == want[i % 2].expansion
            for name, value in got.features.items():
                assert torch.equal(value, want[i % 2].features[name])


def test_real_times_stand_between_the_frames(family):
    f = family("qwen3_vl")
    frames = np.zeros((4, 60, 60, 3), np.uint8)
    by_index = f.prepare(Media("video", frames, {"fps": 10.0, "frame_indices": [0, 10, 20, 30]}), {})
    by_time = f.prepare(Media("video", frames, {"fps": 10.0, "timestamps": (0.0, 1.0, 2.0, 3.0)}), {})
    assert by_index.expansion == by_time.expansion
    text = f.codec.decode([s.token_id for g in by_index.expansion.groups for s in g.segments if s.item < 0])
    assert "<0.5 seconds>" in text and "<2.5 seconds>" in text


def test_frames_are_sampled_by_the_processors_rule(family):
    f = family("qwen3_vl")  # two a second by default, at least four
    assert f.frame_indices(100, 10.0, {}) == np.linspace(0, 99, 20).round().astype(int).tolist()
    assert len(f.frame_indices(100, 10.0, {"fps": 1.0})) == 10
    assert len(f.frame_indices(100, 10.0, {"num_frames": 7})) == 7
    assert len(f.frame_indices(100, 10.0, {"do_sample_frames": False})) == 100
    with pytest.raises(InvalidRequest, match="mutually exclusive"):
        f.frame_indices(100, 10.0, {"fps": 1.0, "num_frames": 7})
    plain = family("qwen2_5_vl")  # takes all frames unless asked
    assert plain.frame_indices(9, 3.0, {}) == list(range(9))
    assert len(plain.frame_indices(90, 30.0, {"fps": 2.0})) == 6


def test_the_other_items_of_a_request_choose_phi4s_audio_projection(family):
    f = family("phi4_multimodal")
    audio = media_of({"kind": "audio", "seconds": 1.3, "sampling_rate": RATE, "seed": 6})
    alone = f.request_options({"audio": 1}, {})
    joint = f.request_options({"audio": 1, "image": 1}, {})
    assert f.resolved_options("audio", alone) != f.resolved_options("audio", joint)
    assert f.resolved_options("image", alone) == f.resolved_options("image", joint)
    a, b = f.encode([f.prepare(audio, alone), f.prepare(audio, joint)])
    assert a.shape == b.shape and not torch.allclose(a, b, atol=1e-3)


def test_own_sound_is_refused_where_the_model_takes_none(family):
    with pytest.raises(InvalidRequest, match="load_audio_from_video is not an option"):
        family("qwen2_5_vl").resolved_options("video", {"load_audio_from_video": True})
    f = family("qwen2_5_omni")
    assert f.resolved_options("video", {"use_audio_in_video": True})["load_audio_from_video"] is True
    assert f.resolved_options("video", {"videos_kwargs": {"use_audio_in_video": True}})["load_audio_from_video"] is True
    assert "load_audio_from_video" not in f.resolved_options("audio", {"use_audio_in_video": True})
    with pytest.raises(InvalidRequest, match="seconds_per_chunk is 2.0"):
        f.resolved_options("video", {"seconds_per_chunk": 1.0})


@pytest.mark.parametrize(
    ("name", "modality", "rows", "grid", "kwargs"),
    [
        ("qwen2_5_vl", "image", 6, (1, 4, 6), {}),
        ("qwen2_5_vl", "video", 16, (4, 4, 4), {"fps": 4.0}),
        ("qwen3_vl", "image", 6, (1, 4, 6), {}),
        ("qwen3_vl", "video", 16, (4, 4, 4), {"fps": 4.0}),
        ("cosmos3_edge", "video", 32, (8, 4, 4), {"fps": 4.0}),
        ("mistral3", "image", 12, (1, 6, 8), {}),
        ("pixtral", "image", 35, (1, 5, 7), {}),
        ("llava_next", "image", 70, None, {}),
        ("llama4", "image", 20, (1, 2, 2), {}),
        ("gemma3", "image", 4, None, {}),
        ("phi4_multimodal", "image", 460, None, {}),
        ("phi4_multimodal", "audio", 16, None, {}),
        ("qwen2_audio", "audio", 32, None, {}),
        ("qwen2_5_omni", "image", 6, (1, 4, 6), {}),
        ("qwen2_5_omni", "audio", 32, None, {}),
        ("qwen3_omni_moe", "video", 16, (4, 4, 4), {"fps": 1.0}),
        ("nemotron_h_omni", "image", 6, None, {}),
        ("nemotron_h_omni", "audio", 17, None, {}),
    ],
)
def test_embeddings_that_the_caller_brings_are_laid_out_like_encoded_ones(family, name, modality, rows, grid, kwargs):
    f = family(name)
    recipe = next(r for c in cases() if c["family"] == name for r in c["media"] if r["kind"] == modality)
    made = f.prepare(media_of(recipe), kwargs)
    brought = f.prepare_embedding(modality, rows, grid, kwargs)
    assert (brought.expansion, brought.rows) == (made.expansion, made.rows)
    assert brought.positions.keys() <= made.positions.keys()
    assert all(made.positions[key] == value for key, value in brought.positions.items())
    assert not brought.features


@pytest.mark.parametrize(
    ("name", "modality", "rows", "grid", "message"),
    [
        ("qwen2_5_vl", "image", 6, None, "needs grid_thw"),
        ("qwen2_5_vl", "image", 7, (1, 4, 6), "7 rows, its grid .* makes 6"),
        ("qwen2_5_omni", "image", 7, (1, 4, 6), "7 rows, its grid .* makes 6"),
        ("qwen2_5_vl", "image", 6, (1, 4), "three positive integers"),
        ("qwen2_5_vl", "image", 6, (0, 4, 6), "three positive integers"),
        ("qwen3_vl", "video", 16, (4, 4, 4), "needs mm_processor_kwargs.fps"),
        ("gemma3", "image", 5, None, "5 rows"),
        ("pixtral", "image", 35, None, "needs grid_thw"),
        ("qwen2_vl", "image", 6, (1, 5, 5), "multiples of 2"),
        ("qwen2_5_vl", "video", 6, (1, 4, 7), "multiples of 2"),
        ("qwen3_vl", "image", 8, (1, 5, 7), "multiples of 2"),
        ("qwen3_vl_moe", "image", 4, (1, 1, 16), "multiples of 2"),
        ("cosmos3_omni", "video", 6, (2, 4, 3), "multiples of 2"),
        ("cosmos3_edge", "image", 6, (1, 8, 3), "multiples of 2"),
        ("qwen2_5_omni", "image", 8, (1, 5, 7), "multiples of 2"),
        ("qwen3_omni_moe", "video", 8, (1, 5, 7), "multiples of 2"),
        ("mistral3", "image", 12, (1, 7, 8), "multiples of 2"),
        *(
            (name, "image", 6, (1, 1 << 30, 1 << 30), "6 rows, its grid .* makes at least")
            for name in ("qwen2_5_vl", "qwen3_vl", "qwen3_omni_moe", "cosmos3_edge", "mistral3", "pixtral", "llama4")
        ),
        ("qwen2_5_vl", "audio", 35, None, "takes no audio"),
        ("nemotron_h_omni", "video", 35, None, "send the video"),
    ],
)
def test_embeddings_that_do_not_fit_are_refused(family, name, modality, rows, grid, message):
    with pytest.raises(InvalidRequest, match=message):
        family(name).prepare_embedding(modality, rows, grid, {})
