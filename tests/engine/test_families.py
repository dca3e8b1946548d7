# SPDX-License-Identifier: Apache-2.0
"""Every model family runs as the plain model does: positions, windows, chunks, deepstack, attention inside items."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dynamo_epd.contract.errors import ConfigError, InvalidRequest, TransferError
from dynamo_epd.engine.base import SamplingParams
from dynamo_epd.engine.reference.attention import PagedAttention
from dynamo_epd.engine.reference.scheduler import Chunk

from .conftest import GAP, Item, MakeEngine, Prompt, Tiny, ask, prefill, write_tiny

# What the language model's configuration is changed to, so that prompts of about 100 tokens meet its special cases.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {},
    "qwen2_5_vl": {
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "qwen3_vl": {},
    "qwen3_vl_moe": {},
    "cosmos3_omni": {},
    "cosmos3_edge": {},
    "llava_next": {},
    "mistral3": {"sliding_window": 24},
    "pixtral": {},
    "llama4": {"attention_chunk_size": 32, "floor_scale": 16, "attn_temperature_tuning": True},
    "phi4_multimodal": {"sliding_window": 40},
    "qwen2_audio": {},
    "qwen2_5_omni": {},
    "qwen3_omni_moe": {},
    "gemma3": {"sliding_window": 24},
    "nemotron_h_omni": {},
}
ANSWER = 4


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(write_tiny(request.param, tmp_path_factory.mktemp(request.param), FAMILIES[request.param]))


def prompts(tiny: Tiny, count: int) -> list[tuple[Prompt, list[int]]]:
    """Prompts of 30 to 150 tokens that begin alike, with their answers; without those that rounding decides."""
    rng = np.random.default_rng(3)
    items = [tiny.item(rng, rows, width) for rows, width in ((12, 4), (30, 5), (20, 20))]
    texts = [rng.integers(5, 1400, n).tolist() for n in (3, 9, 17)]
    chosen: list[tuple[Prompt, list[int]]] = []
    while len(chosen) < count:
        parts: list[list[int] | Item] = [texts[1]]
        for _ in range(int(rng.integers(1, 4))):
            parts += [items[rng.integers(3)], texts[rng.integers(3)]]
        prompt = tiny.prompt(parts)
        answer, gap = tiny.plain(prompt, ANSWER)
        if gap > GAP:
            chosen.append((prompt, answer))
    return chosen


async def test_family(tiny: Tiny, make_engine: MakeEngine) -> None:
    """Alone, together, repeated, and handed from prefill to decode."""
    engine = await make_engine(tiny.path, enable_chunked_prefill=True, max_num_tokens=33, max_tokens=640)
    cases = prompts(tiny, 5)
    params = SamplingParams(max_tokens=ANSWER)
    recurrent = "nemotron" in tiny.text.model_type
    first, want = cases[0]
    assert (await ask(engine, first.request("alone", params))).tokens == want
    for turn in range(2):
        answers = await asyncio.gather(
            *(ask(engine, prompt.request(f"{turn}.{i}", params)) for i, (prompt, _) in enumerate(cases))
        )
        engine.check()
        assert [answer.tokens for answer in answers] == [want for _, want in cases]
        if turn and not recurrent:
            assert all(a.cached >= len(p.layout) - 8 for a, (p, _) in zip(answers, cases, strict=True))
    if recurrent:
        assert not engine.info.block_reuse
        with pytest.raises(InvalidRequest, match="recurrent"):
            await ask(engine, first.request("export", params, prefill_only=True))
        return
    decode = await make_engine(tiny.path, enable_chunked_prefill=True, max_num_tokens=33, max_tokens=640)
    for i, (prompt, want) in enumerate(cases):
        remote, _, _ = await prefill(engine, prompt.request(f"p{i}", params))
        request = prompt.request(f"d{i}", params, remote_kv=remote, embeddings=())
        assert (await ask(decode, request)).tokens == want


async def test_items_that_attend_in_both_directions_are_not_cut(
    tmp_path_factory: pytest.TempPathFactory, make_engine: MakeEngine, computed: list[list[Chunk]]
) -> None:
    tiny = Tiny(write_tiny("gemma3", tmp_path_factory.mktemp("gemma3"), {}))
    rng = np.random.default_rng(0)
    item = tiny.item(rng, 30, 30)
    prompt = tiny.prompt([[5, 6, 7], item, [8, 9]])
    engine = await make_engine(tiny.path, enable_chunked_prefill=True, max_num_tokens=30)
    params = SamplingParams(max_tokens=1)
    await ask(engine, prompt.request("a", params))
    # Another question about the item: all of it is shared. Another item: nothing of it.
    assert (await ask(engine, tiny.prompt([[5, 6, 7], item, [9]]).request("b", params))).cached == 35
    other = tiny.item(rng, 30, 30)
    assert (await ask(engine, tiny.prompt([[5, 6, 7], other, [8]]).request("c", params))).cached <= 4
    long = tiny.prompt([[5], *(tiny.item(rng, 20, 5 + i) for i in range(4)), [8]])
    together = [long.request("long", params), tiny.prompt([[6], item, item, [9]]).request("e", params)]
    await asyncio.gather(*(ask(engine, request) for request in together))
    for chunk in [chunk for chunks in computed for chunk in chunks]:
        slots = chunk.seq.request.layout.slot_item
        for cut in {chunk.start, chunk.end} - {0, chunk.seq.n}:
            assert slots[cut - 1] < 0 or slots[cut] < 0
    with pytest.raises(InvalidRequest, match="31 tokens that are computed at once"):
        await ask(engine, tiny.prompt([[5], tiny.item(rng, 31, 31), [8]]).request("d", params))


async def test_positions_that_change_with_the_length_are_refused(
    tmp_path_factory: pytest.TempPathFactory, make_engine: MakeEngine
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    path = write_tiny("llava_next", tmp_path_factory.mktemp("dynamic"), {"rope_parameters": rope})
    with pytest.raises(ConfigError, match="dynamic rotary positions"):
        await make_engine(path)


async def test_an_omni_checkpoint_runs_its_thinker(
    tmp_path_factory: pytest.TempPathFactory, make_engine: MakeEngine
) -> None:
    """The published checkpoints hold a thinker, a talker and more under one configuration."""
    thinker = write_tiny("qwen2_5_omni", tmp_path_factory.mktemp("thinker"), {})
    tiny = Tiny(thinker)
    prompt, want = prompts(tiny, 1)[0]
    whole = tmp_path_factory.mktemp("omni")
    inner = json.loads((thinker / "config.json").read_text())
    config = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniForConditionalGeneration"]}
    (whole / "config.json").write_text(json.dumps({**config, "thinker_config": inner}))
    weights = load_file(thinker / "model.safetensors")
    weights = {f"thinker.{name}": tensor for name, tensor in weights.items()}
    save_file({**weights, "talker.head.weight": torch.zeros(1)}, whole / "model.safetensors", {"format": "pt"})
    engine = await make_engine(whole)
    assert (await ask(engine, prompt.request("x", SamplingParams(max_tokens=ANSWER)))).tokens == want


async def test_missing_weights_are_not_made_up(
    tmp_path_factory: pytest.TempPathFactory, make_engine: MakeEngine
) -> None:
    path = write_tiny("qwen3_vl", tmp_path_factory.mktemp("missing"), {})
    weights = load_file(path / "model.safetensors")
    name = next(name for name in weights if "layers.1.self_attn.q_proj" in name)
    del weights[name]
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"no weights.*layers.1.self_attn.q_proj"):
        await make_engine(path)


async def test_half_precision_is_handed_on_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, make_engine: MakeEngine
) -> None:
    path = write_tiny("qwen3_vl", tmp_path_factory.mktemp("bf16"), {})
    tiny = Tiny(path)
    rng = np.random.default_rng(1)
    prompt = tiny.prompt([[5, 6, 7], tiny.item(rng, 12, 4), [8, 9]])
    source, target = [await make_engine(path, dtype="bfloat16") for _ in range(2)]
    params = SamplingParams(max_tokens=ANSWER)
    want = await ask(source, prompt.request("whole", params))
    remote, fetch, _ = await prefill(source, prompt.request("p", params))
    assert fetch.kv.dtype == torch.bfloat16
    answer = await ask(target, prompt.request("d", params, remote_kv=remote, embeddings=()))
    assert answer.tokens == want.tokens
    other = await make_engine(path)
    with pytest.raises(TransferError, match="bfloat16"):
        await ask(other, prompt.request("d", params, remote_kv=remote, embeddings=()))


def test_attention_that_is_not_implemented_is_refused() -> None:
    key = torch.zeros(1, 2, 4, 8)
    attention = PagedAttention(SimpleNamespace(layer_types=["full_attention", "new_attention"]))
    with pytest.raises(ConfigError, match="softcap"):
        attention.record(SimpleNamespace(layer_idx=0), key, {"softcap": 30.0})
    with pytest.raises(ConfigError, match="new_attention"):
        attention.record(SimpleNamespace(layer_idx=1), key, {})
    attention.record(SimpleNamespace(layer_idx=0), key, {"sliding_window": None})
    with pytest.raises(ConfigError, match="differ"):
        attention.record(SimpleNamespace(layer_idx=0), torch.zeros(1, 4, 4, 8), {})
