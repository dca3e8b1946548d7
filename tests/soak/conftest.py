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

from dynamo_epd.demo.plain import PlainTransformers
from dynamo_epd.demo.toy_data import QUESTIONS, TOY_MODEL, Picture, random_picture
from dynamo_epd.serve.client import png_data_url, user
from dynamo_epd.serve.stack import Stack, epd_services

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
    """``count`` conversations of one to four turns, about one to three pictures of a few; some have uuids."""
    rng = np.random.default_rng(seed)
    plain = PlainTransformers(TOY_MODEL)
    pool = [random_picture(rng, side) for side in (56, 84, 84, 112) for _ in range(3)]
    drawn = {picture: picture.draw() for picture in pool}
    urls = {picture: png_data_url(image) for picture, image in drawn.items()}
    return [_conversation(rng, plain, pool, drawn, urls) for _ in range(count)]


def _conversation(
    rng: np.random.Generator,
    plain: PlainTransformers,
    pool: Sequence[Picture],
    drawn: dict[Picture, Any],
    urls: dict[Picture, str],
) -> list[Turn]:
    sent: list[dict[str, Any]] = []
    local: list[dict[str, Any]] = []
    turns: list[Turn] = []
    uuid = f"u{rng.integers(1000)}" if rng.random() < 0.2 else None
    for turn in range(int(rng.integers(1, 5))):
        count = int(rng.integers(1, 4)) if turn == 0 else int(rng.random() < 0.3)
        pictures = [pool[int(rng.integers(len(pool)))] for _ in range(count)]
        question = QUESTIONS[int(rng.integers(len(QUESTIONS)))].text
        sent.append(user(*(urls[picture] for picture in pictures), question, uuid=uuid))
        parts = [{"type": "image", "image": drawn[picture]} for picture in pictures]
        local.append({"role": "user", "content": [*parts, {"type": "text", "text": question}]})
        expected, _ = plain.answer(local, MAX_TOKENS)
        turns.append(Turn([*sent], expected))
        sent.append({"role": "assistant", "content": expected})
        local.append({"role": "assistant", "content": [{"type": "text", "text": expected}]})
    return turns


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
