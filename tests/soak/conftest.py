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
from transformers import AutoModelForImageTextToText

from dynamo_epd import models
from dynamo_epd.demo.toy_data import QUESTIONS, TOY_MODEL, random_picture
from dynamo_epd.models import Media
from dynamo_epd.serve.stack import Stack, epd_services

from ..families import media_files
from ..families.plain import Plain

MODEL = "toy"
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


def conversations(count: int, seed: int) -> list[list[Turn]]:
    """``count`` conversations of one to four turns, about a few pictures and films; some have uuids."""
    rng = np.random.default_rng(seed)
    plain = Plain(
        AutoModelForImageTextToText.from_pretrained(TOY_MODEL, local_files_only=True).eval(),
        models.load(TOY_MODEL, tower=False),
    )
    pool = [Media("image", random_picture(rng, side).draw()) for side in (56, 84, 84, 112) for _ in range(3)]
    pool += [media_files.video(i, frames=6, size=(56, 56)) for i in range(3)]
    urls = {id(item): media_files.url_of(item) for item in pool}
    return [_conversation(rng, plain, pool, urls) for _ in range(count)]


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
        question = {"type": "text", "text": QUESTIONS[int(rng.integers(len(QUESTIONS)))].text}
        kinds = [f"{item.modality}_url" for item in items]
        parts = [
            {"type": kind, kind: {"url": urls[id(item)]}, **(uuid if item.modality == "image" else {})}
            for kind, item in zip(kinds, items, strict=True)
        ]
        sent.append({"role": "user", "content": [*parts, question]})
        local.append({"role": "user", "content": [*({"type": item.modality} for item in items), question]})
        text = tokenizer.apply_chat_template(local, tokenize=False, add_generation_prompt=True)
        expected = plain.answer(text, media)
        ids = expected.tokens[:MAX_TOKENS]
        length = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else MAX_TOKENS
        if expected.sure(1e-3) < length:
            break
        answer = tokenizer.decode(ids[:length], skip_special_tokens=True)
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


def soak_stack() -> Stack:
    services = epd_services(
        TOY_MODEL,
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
def talks() -> list[list[Turn]]:
    return conversations(60, seed=11)
