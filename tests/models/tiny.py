# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every family, from files in ``tests/data`` and a seed, and requests for them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from dynamo_epd.contract.handoff import ItemHandoff, TensorRef
from dynamo_epd.contract.layout import PromptLayout, expand
from dynamo_epd.models import Family, Media, Prepared

DATA = Path(__file__).parents[1] / "data"
RATE = 16000

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def write_model_dir(name: str, target: Path) -> Path:
    """Everything but the weights of the tiny model ``name``."""
    shutil.copytree(DATA / "models" / name, target, dirs_exist_ok=True)
    tokenizer = json.loads((DATA / "models" / "tokenizer.json").read_text())
    first = len(tokenizer["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = json.loads((target / "added_tokens.json").read_text())
    (target / "added_tokens.json").unlink()
    tokenizer["added_tokens"] = [{"id": first + i, "content": content, **flags} for i, content in enumerate(added)]
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    return target


def make_weights(target: Path, seed: int) -> Any:
    """A model of random weights, saved in ``target``. No tensor is all zeros or ones, so that each matters."""
    config = transformers.AutoConfig.from_pretrained(target)
    torch.manual_seed(seed)
    model = getattr(transformers, config.architectures[0])(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(target)
    return model


def media_of(recipe: dict[str, Any]) -> Media:
    """The item that ``layouts.json`` describes by a recipe."""
    random = np.random.RandomState(recipe["seed"])
    if recipe["kind"] == "image":
        pixels = random.randint(0, 255, (recipe["height"], recipe["width"], 3), dtype=np.uint8)
        return Media("image", Image.fromarray(pixels))
    if recipe["kind"] == "video":
        shape = (recipe["frames"], recipe["height"], recipe["width"], 3)
        return Media("video", random.randint(0, 255, shape, dtype=np.uint8), {"fps": recipe["fps"]})
    t = np.arange(int(RATE * recipe["seconds"])) / RATE
    wave = (0.3 * np.sin(2 * np.pi * 440 * t) + 0.05 * random.randn(len(t))).astype(np.float32)
    return Media("audio", wave, {"sampling_rate": RATE})


def cases() -> list[dict[str, Any]]:
    """All prompts of ``layouts.json``."""
    return json.loads((DATA / "layouts.json").read_text())["cases"]


def case_id(case: dict[str, Any]) -> str:
    return f"{case['family']}-{case['case']}"


def case_request(case: dict[str, Any]) -> tuple[list[Media], dict[str, Any]]:
    """Media with a placeholder each, in prompt order, and the request's processor options."""
    media = [media_of(recipe) for recipe in case["media"]]
    if case["case"] == "x_video_with_own_audio_interleaved":
        video, audio = media
        media = [Media("video", video.data, {**video.meta, "audio": audio})]
        return media, {"load_audio_from_video": True, "fps": 2.0}
    if case["case"] == "x_pan_and_scan":
        return media, {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 50}
    return media, {}


def prepare_all(
    family: Family, token_ids: list[int], media: list[Media], kwargs: dict[str, Any]
) -> tuple[PromptLayout, list[Prepared]]:
    """The expanded prompt and its items, as the encode worker makes them."""
    counts = Counter(item.modality for item in media)
    kwargs = dict(family.request_options(counts, kwargs))
    queues = {modality: iter([m for m in media if m.modality == modality]) for modality in counts}
    places = family.placeholders(token_ids, counts)
    prepared = [family.prepare(next(queues[modality]), kwargs) for _, _, modality in places]
    edits = family.replacements(token_ids, places, [item.expansion for item in prepared])
    items = [part for item in prepared for part in (item.parts or (item,))]
    return expand(token_ids, edits, len(items)), items


def handoff_items(family: Family, items: list[Prepared]) -> list[ItemHandoff]:
    """``items`` as prefill and decode receive them."""
    digest = "0" * 64
    return [
        ItemHandoff(
            item.modality,
            digest,
            item.rows,
            TensorRef("h:1", "a", 1, 1, digest, (item.rows, family.embedding_width), "float32"),
            None,
            json.loads(json.dumps(dict(item.positions))),
        )
        for item in items
    ]


class _Reached(Exception):
    pass


def plain_inputs(family: Any, case: dict[str, Any]) -> dict[str, Any]:
    """What transformers' own processor makes of the case."""
    media = [media_of(recipe) for recipe in case["media"]]
    images = [m.data for m in media if m.modality == "image"]
    videos = [m for m in media if m.modality == "video"]
    audio = [m.data for m in media if m.modality == "audio"]
    call: dict[str, Any] = {"images": images} if images else {}
    if videos:
        metadata = [
            {"total_num_frames": len(v.data), "fps": v.meta["fps"], "frames_indices": list(range(len(v.data)))}
            for v in videos
        ]
        call["videos"] = [v.data for v in videos]
        call["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": metadata, "return_metadata": True}
        if "omni" in case["family"] and case["family"].startswith("qwen"):
            # The class of these processors sets another size than the checkpoint does.
            call["videos_kwargs"]["size"] = dict(family.processor.video_processor.size)
    if audio:
        call["audio"] = audio
    if case["case"] == "x_video_with_own_audio_interleaved":
        call |= {"load_audio_from_video": True, "audio_from_video_indices": [0]}
        call["videos_kwargs"]["fps"] = 2.0
    if case["case"] == "x_pan_and_scan":
        call["images_kwargs"] = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 50}
    if case["family"] == "cosmos3_edge":
        call["return_mm_token_type_ids"] = True
    inputs = dict(family.processor(text=[case["text"]], return_tensors="pt", **call))
    if case["family"] == "llama4":
        inputs["pixel_values"] = inputs["pixel_values"].float()
    if case["case"] == "x_video_with_own_audio_interleaved":
        inputs["use_audio_in_video"] = True
    return {name: value for name, value in inputs.items() if name not in ("video_metadata", "num_crops")}


def language_model_inputs(full: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """What the whole model gives its language model: ``inputs_embeds``, ``position_ids``, deepstack features."""
    seen: dict[str, Any] = {}
    decoder = full.model.layers[0] if full.config.model_type == "phi4_multimodal" else full.get_decoder()

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        seen.update(kwargs)
        if args:
            seen["inputs_embeds"] = args[0]
        raise _Reached

    handle = decoder.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        with torch.no_grad():
            full(**inputs)
    except _Reached:
        pass
    finally:
        handle.remove()
    return seen
