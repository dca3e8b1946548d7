# SPDX-License-Identifier: Apache-2.0
"""Media made on the spot, and a media server on the loopback interface."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from aiohttp import web
from dynamo.common.http import close_http_client
from dynamo.common.http.url_validator import UrlValidationPolicy
from PIL import Image

from dynamo_epd.media.limits import MediaLimits

Maker = Callable[..., bytes]
MILLISECOND = Fraction(1, 1000)


@pytest.fixture
def limits() -> MediaLimits:
    return MediaLimits()


@pytest.fixture(scope="session")
def image_file() -> Maker:
    """``image_file(image, "PNG", **save_options)``."""

    def make(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
        out = BytesIO()
        image.save(out, file_format, **options)
        return out.getvalue()

    return make


@pytest.fixture(scope="session")
def video_file() -> Maker:
    """A video whose frame ``i`` has the grey value ``level(i)``; ``times`` are presentation times in 1/1000 s,
    ``start`` is the first frame's number."""

    def make(
        container: str = "mp4",
        codec: str = "libx264",
        *,
        count: int = 30,
        fps: int = 10,
        size: tuple[int, int] = (64, 48),
        times: list[int] | None = None,
        audio: str | None = None,
        picture: np.ndarray | None = None,
        start: int = 0,
        options: dict[str, str] | None = None,
        title: str = "",
    ) -> bytes:
        out = BytesIO()
        with av.open(out, "w", format=container, container_options=options) as file:
            file.metadata["title"] = title
            stream = file.add_stream(codec, rate=fps)
            stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
            if times is not None:
                stream.codec_context.time_base = stream.time_base = MILLISECOND
            sound = file.add_stream(audio, rate=16000, layout="mono") if audio else None
            for i in range(count):
                pixels = np.full((size[1], size[0], 3), 20 + i * 200 // count, np.uint8) if picture is None else picture
                frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
                frame.pts = start + i
                if times is not None:
                    frame.pts, frame.time_base = times[i], MILLISECOND
                for packet in stream.encode(frame):
                    file.mux(packet)
            for packet in stream.encode():
                file.mux(packet)
            if sound is not None:
                frame = av.AudioFrame.from_ndarray(tone(16000, count / fps)[None], format="fltp", layout="mono")
                frame.sample_rate, frame.pts = 16000, 0
                for packet in [*sound.encode(frame), *sound.encode()]:
                    file.mux(packet)
        return out.getvalue()

    return make


def tone(rate: int, seconds: float, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


@pytest.fixture(scope="session")
def sine() -> Callable[..., np.ndarray]:
    """``sine(rate, seconds, hertz=440.0)``: float32 samples."""
    return tone


@pytest.fixture(scope="session")
def audio_file() -> Maker:
    """``audio_file(samples, rate, "WAV", subtype)``."""

    def make(samples: np.ndarray, rate: int, file_format: str = "WAV", subtype: str | None = None) -> bytes:
        out = BytesIO()
        soundfile.write(out, samples, rate, format=file_format, subtype=subtype)
        return out.getvalue()

    return make


@pytest.fixture
def open_policy() -> UrlValidationPolicy:
    return UrlValidationPolicy(allow_http=True, allow_private_ips=True)


Handler = Callable[[web.Request], Any]


@pytest.fixture
async def serve(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[Handler], Any]]:
    """``base_url = await serve(handler)``; the handler sees every request of the test."""
    monkeypatch.setenv("DYN_MM_ALLOW_INTERNAL", "1")
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    runners: list[web.ServerRunner] = []

    async def start(handler: Handler) -> str:
        runner = web.ServerRunner(web.Server(handler), shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        return f"http://{host}:{port}"

    yield start
    await close_http_client()
    for runner in runners:
        await runner.cleanup()
