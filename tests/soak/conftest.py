# SPDX-License-Identifier: Apache-2.0
"""Conversations with their right answers, and what the processes of a stack hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynamo_epd import models
from dynamo_epd.demo.toy_data import QUESTIONS, random_picture
from dynamo_epd.models import Media
from dynamo_epd.serve.stack import Stack, epd_services

from ..families import media_files
from ..families.plain import Plain
from ..models.tiny import make_weights, write_model_dir

MODEL = "tiny"
MAX_TOKENS = 6
ENGINE = {
    "kv_cache_config": {"tokens_per_block": 8, "max_tokens": 2048},
    "max_seq_len": 512,
    "max_batch_size": 8,
    "max_num_tokens": 128,
    "enable_chunked_prefill": True,
}


@dataclass(frozen=True)
class Turn:
    """One request of a conversation: all messages up to here, and plain transformers' answer."""

    messages: list[dict[str, Any]]
    expected: str


@dataclass(frozen=True)
class Tiny:
    """A model of random weights that takes images, video and audio, and what to say to it."""

    path: Path
    talks: list[list[Turn]]


def conversations(plain: Plain, count: int, seed: int) -> list[list[Turn]]:
    """``count`` conversations of one to four turns, about a few pictures, films and clips; some have uuids."""
    rng = np.random.default_rng(seed)
    pool = [Media("image", random_picture(rng, side).draw()) for side in (56, 84, 84, 112) for _ in range(3)]
    pool += [media_files.video(i, frames=6, size=(56, 56)) for i in range(4)]
    pool += [media_files.audio(i, seconds) for i, seconds in enumerate((0.7, 0.7, 0.7, 1.1))]
    urls = {id(item): media_files.url_of(item) for item in pool}
    alone = [tuple(plain.answer(_text(plain, [_user([item], "What?")]), [item]).tokens) for item in pool]
    assert len(set(alone)) == len(pool), "one item's KV in place of another's would not be noticed"
    return [_conversation(rng, plain, pool, urls) for _ in range(count)]


def _user(items: Sequence[Media], question: str) -> dict[str, Any]:
    content = [*({"type": item.modality} for item in items), {"type": "text", "text": question}]
    return {"role": "user", "content": content}


def _text(plain: Plain, messages: list[dict[str, Any]]) -> str:
    tokenizer: Any = plain.family.tokenizer
    template = plain.processor.chat_template
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)


def _conversation(rng: np.random.Generator, plain: Plain, pool: Sequence[Media], urls: dict[int, str]) -> list[Turn]:
    """Ends where transformers itself is not sure, so that no answer hangs on the last bit of a number."""
    tokenizer: Any = plain.family.tokenizer
    sent: list[dict[str, Any]] = []
    local: list[dict[str, Any]] = []
    media: list[Media] = []
    turns: list[Turn] = []
    uuid = {"uuid": f"u{rng.integers(1000)}"} if rng.random() < 0.2 else {}
    for turn in range(int(rng.integers(1, 5))):
        count = int(rng.integers(1, 4)) if turn == 0 else int(rng.random() < 0.3)
        items = [pool[int(rng.integers(len(pool)))] for _ in range(count)]
        media += items
        local.append(_user(items, QUESTIONS[int(rng.integers(len(QUESTIONS)))].text))
        kinds = [f"{item.modality}_url" for item in items]
        parts = [
            {"type": kind, kind: {"url": urls[id(item)]}, **(uuid if item.modality == "image" else {})}
            for kind, item in zip(kinds, items, strict=True)
        ]
        sent.append({"role": "user", "content": [*parts, local[-1]["content"][-1]]})
        expected = plain.answer(_text(plain, local), media)
        ids = expected.tokens[:MAX_TOKENS]
        length = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else MAX_TOKENS
        answer = tokenizer.decode(ids[:length], skip_special_tokens=True)
        if expected.sure(1e-3) < length or not answer.strip():
            break
        turns.append(Turn([*sent], answer))
        sent.append({"role": "assistant", "content": answer})
        local.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    return turns or _conversation(rng, plain, pool, urls)


@dataclass(frozen=True)
class Held:
    """What a process holds: its id, resident memory in MiB, open files."""

    pid: int
    rss: float
    files: int


def held(stack: Stack) -> dict[str, Held]:
    """By service; only of those that run."""
    found = {}
    for name, process in list(stack.processes.items()):
        with suppress(OSError):  # it may end while it is looked at
            files = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
            status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            rss = [int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS")]
            if rss:
                found[name] = Held(process.pid, rss[0], files)
    return found


def soak_stack(model: Path) -> Stack:
    services = epd_services(
        model,
        MODEL,
        topology="e-p-d",
        engine_args=("--engine", "reference", "--override-engine-args", json.dumps(ENGINE)),
        encode_args=("--multimodal-embedding-cache-capacity-gb", "0.02"),
        # A small arena: its pages count as used memory once they have been touched, all of them soon.
        common_args=(
            *("--verify-transfers", "--transfer-timeout", "5", "--transfer-arena-bytes", str(48 << 20)),
            "--publish-kv-events",
        ),
    )
    return Stack(services, MODEL, frontend_args=("--router-mode", "kv"), env={"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    path = write_model_dir("qwen2_5_omni", tmp_path_factory.mktemp("soak") / MODEL)
    model = make_weights(path, seed=5)
    with torch.no_grad():  # small random weights make every clip sound alike
        for parameter in (p for name, p in model.named_parameters() if "audio" in name):
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(path)
    return Tiny(path, conversations(Plain(model, models.load(path, tower=False)), 60, seed=11))
