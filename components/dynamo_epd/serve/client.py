# SPDX-License-Identifier: Apache-2.0
"""An OpenAI chat client that measures: for the demo, the benchmarks and the tests."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from PIL import Image


@dataclass(frozen=True)
class Answer:
    """What came back for one chat request.

    Attributes:
        status: HTTP status; 0 where the connection failed.
        text: the answer, or the error message.
        prompt_tokens, completion_tokens, cached_tokens: usage as reported.
        ttft_ms: milliseconds to the first token.
        total_ms: milliseconds to the end.
        finish_reason: OpenAI's, or None.
    """

    status: int
    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    finish_reason: str | None = None


def open_client() -> aiohttp.ClientSession:
    """A client whose times to first token are the server's: each request has a connection of its own.

    Dynamo 1.6.1's frontend leaves Nagle's algorithm on. On a connection that is used again, a first token that is ready
    soon after the headers waits until the client's kernel acknowledges these, 40 ms on Linux.
    """
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))


async def chat(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    messages: Sequence[dict[str, Any]],
    *,
    max_tokens: int = 16,
    timeout: float = 60.0,
    **options: Any,
) -> Answer:
    """Stream one chat completion. Errors of the server are returned, not raised.

    Args:
        url: ``http://host:port`` of the frontend.
        options: further fields of the request body.
    """
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **options,
    }
    start = time.perf_counter()
    text, ttft, finish = "", 0.0, None
    usage: dict[str, Any] = {}
    try:
        async with session.post(
            f"{url}/v1/chat/completions", json=body, timeout=aiohttp.ClientTimeout(total=timeout)
        ) as response:
            if response.status != 200:
                return Answer(response.status, _message(await response.text()))
            async for line in response.content:
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                chunk = json.loads(line[5:])
                if "error" in chunk:
                    return Answer(int(chunk["error"].get("code") or 500), _message(line[5:].decode()))
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices") or ():
                    piece = (choice.get("delta") or {}).get("content") or ""
                    if piece and not text:
                        ttft = time.perf_counter() - start
                    text += piece
                    finish = choice.get("finish_reason") or finish
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        return Answer(0, f"{type(error).__name__}: {error}")
    total = time.perf_counter() - start
    return Answer(
        200,
        text,
        usage.get("prompt_tokens", 0),
        usage.get("completion_tokens", 0),
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        (ttft or total) * 1e3,
        total * 1e3,
        finish,
    )


def png_data_url(image: Image.Image) -> str:
    """``image`` as a ``data:`` URL."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def user(*parts: str | Image.Image, uuid: str | None = None) -> dict[str, Any]:
    """A user message of texts and images, in order; strings that look like URLs are image URLs."""
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str) and not part.startswith(("data:", "http:", "https:", "file:")):
            content.append({"type": "text", "text": part})
            continue
        url = part if isinstance(part, str) else png_data_url(part)
        content.append({"type": "image_url", "image_url": {"url": url}, **({"uuid": uuid} if uuid else {})})
    return {"role": "user", "content": content}


def _message(text: str) -> str:
    try:
        body = json.loads(text)
    except ValueError:
        return text
    return str(body.get("message") or (body.get("error") or {}).get("message") or text)
