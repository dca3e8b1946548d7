# SPDX-License-Identifier: Apache-2.0
"""Engines on tiny models, random prompts with media, and what plain transformers makes of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
import transformers

from dynamo_epd.contract.layout import PromptLayout
from dynamo_epd.contract.multimodal_input import MultimodalInput
from dynamo_epd.demo.toy_data import TOY_MODEL
from dynamo_epd.engine.base import EngineOutput, EngineRequest, Logprob, RemoteKV, SamplingParams
from dynamo_epd.engine.reference import ReferenceEngine, create
from dynamo_epd.engine.reference.runner import PagedRunner
from dynamo_epd.engine.reference.scheduler import Chunk

DATA = Path(__file__).parents[1] / "data" / "models"
GAP = 1e-3
"""Least difference between the two best logits for a prompt to be used: closer ones are ties in floating point."""

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@dataclass(frozen=True)
class Item:
    """A media item: its tokens (-1 for an embedding slot), its embedding, and the grid of its positions."""

    tokens: tuple[int, ...]
    embedding: torch.Tensor
    width: int
    features: dict[str, torch.Tensor] = field(default_factory=dict, compare=False)

    @property
    def digest(self) -> str:
        return sha256(self.embedding.numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class Prompt:
    """Text ids and items in order, expanded."""

    layout: PromptLayout
    items: tuple[Item, ...]
    position_ids: np.ndarray | None
    position_delta: int

    @property
    def multimodal_input(self) -> MultimodalInput | None:
        return self.layout.multimodal_input([item.digest for item in self.items])

    def request(self, request_id: str, sampling: SamplingParams, **options: Any) -> EngineRequest:
        base = EngineRequest(
            request_id,
            self.layout,
            sampling,
            multimodal_input=self.multimodal_input,
            embeddings=[item.embedding for item in self.items],
            position_ids=self.position_ids,
            position_delta=self.position_delta,
        )
        return replace(base, **options)


def make_prompt(parts: list[list[int] | Item], placeholder: int, mrope: bool) -> Prompt:
    """Text and items as one prompt, with positions as the M-RoPE families lay them out."""
    ids: list[int] = []
    member: list[int] = []
    framing: list[bool] = []
    axes: list[np.ndarray] = []
    items: list[Item] = []
    position = 0
    for part in parts:
        if not isinstance(part, Item):
            ids += part
            member += [-1] * len(part)
            framing += [False] * len(part)
            axes.append(np.tile(np.arange(position, position + len(part)), (3, 1)))
            position += len(part)
            continue
        slot = 0
        for token in part.tokens:
            ids.append(placeholder if token < 0 else token)
            member.append(len(items))
            framing.append(token >= 0)
            if token < 0:
                axes.append(position + np.array([[0], [slot // part.width], [slot % part.width]]))
                slot += 1
            else:
                axes.append(np.full((3, 1), position))
                position += 1
            if slot == len(part.embedding):
                position += max(part.width, -(-slot // part.width))
                slot += 1
        items.append(part)
    layout = PromptLayout.from_flat(ids, np.array(member), np.array(framing), len(items))
    if not mrope:
        return Prompt(layout, tuple(items), None, 0)
    return Prompt(layout, tuple(items), np.concatenate(axes, 1).astype(np.int64), position - len(ids))


@dataclass
class Answer:
    """All that an engine said to one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    cached: int = 0
    outputs: list[EngineOutput] = field(default_factory=list)

    @property
    def last(self) -> EngineOutput:
        return self.outputs[-1]


async def ask(engine: ReferenceEngine, request: EngineRequest) -> Answer:
    answer = Answer()
    async for output in engine.generate(request):
        answer.outputs.append(output)
        answer.tokens += output.token_ids
        answer.logprobs += output.logprobs
        answer.cached = output.cached_tokens
    return answer


@dataclass
class Fetch:
    """A prefill worker's KV as a decode worker fetches it; counts what was asked for."""

    kv: torch.Tensor
    first_blocks: list[int] = field(default_factory=list)

    async def __call__(self, first_block: int) -> torch.Tensor:
        self.first_blocks.append(first_block)
        await asyncio.sleep(0)
        return self.kv[first_block:].clone()


async def prefill(engine: ReferenceEngine, request: EngineRequest) -> tuple[RemoteKV, Fetch, Answer]:
    """Run the prompt on a prefill engine and take its KV away."""
    answer = await ask(engine, replace(request, prefill_only=True))
    export = answer.last.kv
    assert export is not None
    kv = torch.full(export.shape, torch.nan, dtype=export.dtype)
    export.copy_to(kv)
    export.release()
    fetch = Fetch(kv)
    logprob = answer.logprobs[0] if answer.logprobs else None
    remote = RemoteKV(len(request.layout), engine.info.tokens_per_block, answer.tokens[0], fetch, logprob)
    return remote, fetch, answer


MakeEngine = Callable[..., Awaitable[ReferenceEngine]]


@pytest_asyncio.fixture
async def make_engine() -> AsyncIterator[MakeEngine]:
    """Starts engines: ``make_engine(model_dir, tokens_per_block=8, max_tokens=512, ...)``; they are stopped and
    checked at the end."""
    engines: list[ReferenceEngine] = []

    async def make(
        model_dir: Path = TOY_MODEL, keys: Any = "exact", dtype: str = "auto", **config: Any
    ) -> ReferenceEngine:
        nested = {k: config.pop(k) for k in list(config) if k in ("tokens_per_block", "max_tokens") or "reuse" in k}
        overrides = json.dumps(
            {"max_seq_len": 512, "kv_cache_config": {"tokens_per_block": 8, "max_tokens": 2048, **nested}, **config}
        )
        engine = create(model_dir=model_dir, overrides=overrides, keys=keys, device="cpu", dtype=dtype)
        await engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        await engine.stop()
        engine.check()
        assert not engine.scheduler.running and not engine.scheduler.waiting and not engine.scheduler.exported


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[list[Chunk]]:
    """The chunks of every step from now on."""
    steps: list[list[Chunk]] = []
    run = PagedRunner.run

    def counting(self: PagedRunner, chunks: Sequence[Chunk]) -> Any:
        steps.append(list(chunks))
        return run(self, chunks)

    monkeypatch.setattr(PagedRunner, "run", counting)
    return steps


class Toy:
    """The toy model in plain transformers, and random prompts for it."""

    VISION_START, VISION_END, PAD, END = 363, 364, 366, 360
    TEXT = 256

    def __init__(self) -> None:
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(TOY_MODEL).eval()

    def item(self, rng: np.random.Generator) -> Item:
        """A picture of noise, 4 to 48 embedding rows."""
        height, width = 2 * rng.integers(2, 6, 2)
        pixels = torch.tensor(rng.standard_normal((height * width, 3 * 2 * 14 * 14)), dtype=torch.float32)
        grid = torch.tensor([[1, height, width]])
        with torch.inference_mode():
            (embedding,) = self.model.get_image_features(pixels, grid).pooler_output
        tokens = (-1,) * len(embedding)
        return Item(tokens, embedding.clone(), int(width) // 2, {"pixel_values": pixels, "image_grid_thw": grid})

    def prompt(self, parts: list[list[int] | Item]) -> Prompt:
        framed: list[list[int] | Item] = []
        for part in parts:
            framed += [[self.VISION_START], part, [self.VISION_END]] if isinstance(part, Item) else [part]
        return make_prompt(framed, self.PAD, mrope=True)

    def plain(self, prompt: Prompt, max_tokens: int) -> tuple[list[int], float]:
        """Greedy answer of ``generate`` on the whole model, and the least gap between its two best logits."""
        ids = torch.tensor(prompt.layout.token_ids[None].astype(np.int64))
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if prompt.items:
            inputs |= {k: torch.cat([item.features[k] for item in prompt.items]) for k in prompt.items[0].features}
            inputs["mm_token_type_ids"] = torch.tensor(prompt.layout.slot_item[None] >= 0).int()
        with torch.inference_mode():
            out = self.model.generate(
                **inputs,
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=self.END,
                return_dict_in_generate=True,
                output_logits=True,
            )
        best = torch.stack(out.logits).squeeze(1).topk(2).values
        return out.sequences[0, ids.shape[1] :].tolist(), float((best[:, 0] - best[:, 1]).min())


@pytest.fixture(scope="session")
def toy() -> Toy:
    return Toy()


def write_tiny(name: str, target: Path, text: dict[str, Any]) -> Path:
    """A tiny model of a family with seeded random weights; ``text`` overrides its language model's configuration."""
    config = transformers.AutoConfig.from_pretrained(DATA / name)
    for key, value in text.items():
        setattr(config.get_text_config(decoder=True), key, value)
    torch.manual_seed(7)
    model = getattr(transformers, config.architectures[0])(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(target)
    return target


class Tiny:
    """A tiny model of random weights in plain transformers, and random prompts with random embeddings for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        config = transformers.AutoConfig.from_pretrained(path)
        self.model = getattr(transformers, config.architectures[0]).from_pretrained(path).eval()
        self.decoder = self.model.get_decoder()
        self.head = self.model.get_output_embeddings()
        if hasattr(self.decoder, "lm_head"):
            self.head, self.decoder = self.decoder.lm_head, self.decoder.model
        self.text = config.get_text_config(decoder=True)
        self.mrope = any(hasattr(m, "mrope_section") for m in self.decoder.modules())
        self.deepstack = len(getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ())

    def item(self, rng: np.random.Generator, rows: int, width: int) -> Item:
        """``rows`` slots; after each ``width`` of them a framing token, and one before the first."""
        tokens = [3]
        for i in range(rows):
            tokens += [-1, 4] if i % width == width - 1 else [-1]
        columns = self.text.hidden_size * (1 + self.deepstack)
        scale = float(self.model.get_input_embeddings().weight.detach().std()) * getattr(
            self.text, "hidden_size", 1
        ) ** (0.5 if self.text.model_type == "gemma3_text" else 0)
        embedding = torch.tensor(rng.standard_normal((rows, columns)) * scale, dtype=torch.float32)
        return Item(tuple(tokens), embedding, width)

    def prompt(self, parts: list[list[int] | Item]) -> Prompt:
        return make_prompt(parts, 10**6, self.mrope)

    def plain(self, prompt: Prompt, max_tokens: int) -> tuple[list[int], float]:
        """Greedy answer of the plain model, everything computed again for each token, and the least gap."""
        hidden, n = self.text.hidden_size, len(prompt.layout)
        slots = torch.tensor(prompt.layout.slot_item >= 0)
        ids = torch.tensor(prompt.layout.token_ids.astype(np.int64)).masked_fill(slots, 0)
        tokens: list[int] = []
        gap = float("inf")
        with torch.inference_mode():
            for _ in range(max_tokens):
                embeds = self.model.get_input_embeddings()(torch.cat([ids, torch.tensor(tokens, dtype=torch.int64)]))
                options: dict[str, Any] = {}
                if prompt.items:
                    rows = torch.cat([item.embedding for item in prompt.items])
                    embeds[:n][slots] = rows[:, :hidden]
                    if self.deepstack:
                        mask = torch.cat([slots, torch.zeros(len(tokens), dtype=torch.bool)])[None]
                        levels = list(rows[:, hidden:].split(hidden, 1))
                        options = {"visual_pos_masks": mask, "deepstack_visual_embeds": levels}
                length = n + len(tokens)
                positions = torch.arange(length)[None]
                if prompt.position_ids is not None:
                    later = torch.arange(n, length).expand(3, -1) + prompt.position_delta
                    positions = torch.cat([torch.tensor(prompt.position_ids), later], 1)[:, None]
                if self.text.model_type == "gemma3_text":
                    types = torch.cat([slots.long(), torch.zeros(len(tokens), dtype=torch.int64)])[None]
                    logits = self.model(inputs_embeds=embeds[None], position_ids=positions, token_type_ids=types).logits
                else:
                    out = self.decoder(inputs_embeds=embeds[None], position_ids=positions, use_cache=False, **options)
                    logits = self.head(out.last_hidden_state)
                best = logits[0, -1].topk(2)
                gap = min(gap, float(best.values[0] - best.values[1]))
                tokens.append(int(best.indices[0]))
        return tokens, gap


ONE = SamplingParams(max_tokens=1)
FOUR = SamplingParams(max_tokens=4)


def text(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, Toy.TEXT, n).tolist()


@pytest.fixture(scope="session")
def pictures(toy: Toy) -> list[Item]:
    """Three pictures with 16 rows each."""
    rng = np.random.default_rng(5)
    found: list[Item] = []
    while len(found) < 3:
        item = toy.item(rng)
        if len(item.embedding) == 16:
            found.append(item)
    return found
