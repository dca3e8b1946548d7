# SPDX-License-Identifier: Apache-2.0
"""What plain transformers answers: its own processor and the whole model's ``generate``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynamo_epd.models import Family, Media

from ..models.tiny import language_model_inputs
from .media_files import RATE

ANSWER = 6
"""Tokens of an answer."""


@dataclass(frozen=True)
class Expected:
    """Attributes:
    ids: the expanded prompt.
    logprobs: float32 ``[tokens, vocab]``, of every token of the answer.
    tokens: the greedy answer.
    routing: least distance, over all tokens and layers, of the router logits of the last expert chosen and the first
        not chosen; infinite without experts.
    """

    ids: list[int]
    logprobs: torch.Tensor
    tokens: list[int]
    routing: float

    def sure(self, gap: float) -> int:
        """Leading tokens whose distance to the next most likely one is more than ``gap``."""
        best = self.logprobs.topk(2).values
        return int((best[:, 0] - best[:, 1] > gap).cumprod(0).sum())


class Plain:
    """Args:
    model: the whole model.
    family: gives the processor, and which token takes an item's rows.
    """

    def __init__(self, model: Any, family: Family):
        self.model, self.family = model, family
        self.processor: Any = family.processor
        self._routing = math.inf
        for module in model.modules():
            if type(module).__name__.endswith("Router") and hasattr(module, "top_k"):
                module.register_forward_hook(self._routed)

    def _routed(self, router: Any, args: tuple[torch.Tensor, ...], output: object) -> None:
        """A forward hook: notes how close the router's choice was."""
        logits = torch.nn.functional.linear(args[0], router.weight)
        if logits.shape[-1] > router.top_k:
            best = logits.topk(router.top_k + 1).values
            self._routing = min(self._routing, float((best[..., -2] - best[..., -1]).min()))

    def answer(
        self,
        text: str,
        media: Sequence[Media] = (),
        kwargs: Mapping[str, Any] | None = None,
        more: Sequence[int] = (),
    ) -> Expected:
        """The answer to a prompt with one placeholder per item.

        Args:
            kwargs: of the processor, by section; ``own_sound``: whether the videos' own sound is heard.
            more: ids of text behind ``text``.
        """
        inputs = self.inputs(text, media, kwargs or {})
        if more:
            ids = torch.tensor([list(more)])
            tails = dict.fromkeys(("mm_token_type_ids", "token_type_ids"), torch.zeros_like(ids))
            tails |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            inputs |= {n: torch.cat([inputs[n], t.to(inputs[n].dtype)], 1) for n, t in tails.items() if n in inputs}
        return self._generate(inputs["input_ids"][0].tolist(), inputs)

    def answer_item_by_item(self, text: str, media: Sequence[Media]) -> Expected:
        """The same where transformers takes the items one at a time only, or changes them when they come together.

        Each is expanded and encoded in a prompt of its own; then the language model gets the whole.
        """
        markers: Mapping[str, str] = {modality: marker for marker, modality in self.family.markers()}
        rows: dict[int, list[torch.Tensor]] = {}
        end = 0
        for item in media:
            marker = markers[item.modality]
            inputs = self.inputs(marker, [item], {})
            ids, slot = inputs["input_ids"][0], self.family.slot_id(item.modality)
            embeds = language_model_inputs(self.model, inputs)["inputs_embeds"]
            rows.setdefault(slot, []).append(embeds.reshape(len(ids), -1)[ids == slot])
            begin, expansion = text.index(marker, end), self.processor.tokenizer.decode(ids)
            end = begin + len(expansion)
            text = text[:begin] + expansion + text[begin + len(marker) :]
        ids = self.processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            embeds = self.model.get_input_embeddings()(ids)
            for slot, values in rows.items():
                embeds[0, ids[0] == slot] = torch.cat(values)
        inputs = {"inputs_embeds": embeds, "attention_mask": torch.ones_like(ids)}
        return self._generate(ids[0].tolist(), inputs)

    def inputs(self, text: str, media: Sequence[Media], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What the processor makes of a prompt."""
        sections = {name: dict(values) for name, values in kwargs.items() if name.endswith("_kwargs")}
        own = kwargs.get("own_sound", False)
        images = [m.data for m in media if m.modality == "image"]
        videos = [m for m in media if m.modality == "video"]
        clips = [m.meta["audio"] if m.modality == "video" else m for m in media if m.modality == "audio" or own]
        call: dict[str, Any] = {"images": images} if images else {}
        if videos:
            call["videos"] = [v.data for v in videos]
            section = sections.setdefault("videos_kwargs", {})
            section |= {"return_metadata": True, "video_metadata": [_metadata(v) for v in videos]}
            if self.model.config.model_type.startswith("qwen") and "omni" in self.model.config.model_type:
                # The processor's class has a size of its own, which would come before the checkpoint's.
                section.setdefault("size", dict(self.processor.video_processor.size))
        if clips:
            call["audio"] = [clip.data for clip in clips]
            sections.setdefault("audio_kwargs", {})["sampling_rate"] = RATE
        if own:
            call |= {"load_audio_from_video": True, "audio_from_video_indices": list(range(len(videos)))}
        if "mm_token_type_ids" in inspect.signature(type(self.model).forward).parameters:
            call["return_mm_token_type_ids"] = True
        found = self.processor(text=[text], return_tensors="pt", **call, **sections)
        inputs = {
            name: value.to(self.model.dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in found.items()
            if name not in ("video_metadata", "num_crops")
        }
        return inputs | ({"use_audio_in_video": True} if own else {})

    def _generate(self, ids: list[int], inputs: Mapping[str, Any]) -> Expected:
        self._routing = math.inf
        with torch.inference_mode():
            out = self.model.generate(
                **inputs,
                max_new_tokens=ANSWER,
                do_sample=False,
                eos_token_id=None,
                return_dict_in_generate=True,
                output_logits=True,
            )
        logprobs = torch.stack([logits[0].float().log_softmax(-1) for logits in out.logits])
        return Expected(ids, logprobs, out.sequences[0, -ANSWER:].tolist(), self._routing)


def _metadata(video: Media) -> dict[str, Any]:
    count, fps = len(video.data), video.meta["fps"]
    return {
        "total_num_frames": count,
        "fps": fps,
        "duration": count / fps,
        "frames_indices": list(range(count)),
    }
