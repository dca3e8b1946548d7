# SPDX-License-Identifier: Apache-2.0
"""Media as callers send them: lossless files behind ``data:`` URLs, so that what is decoded is known bit for bit."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import av
import numpy as np
import soundfile
import torch
from PIL import Image
from safetensors.torch import save

from dynamo_epd.models import Media

RATE = 16000


def image(seed: int, width: int = 90, height: int = 60) -> Media:
    pixels = np.random.RandomState(seed).randint(0, 255, (height, width, 3), dtype=np.uint8)
    return Media("image", Image.fromarray(pixels))


def video(seed: int, frames: int = 8, fps: float = 4.0, size: tuple[int, int] = (64, 48), sound: int = 0) -> Media:
    """Noise, every frame another.

    Args:
        sound: seed of a sound track as long as the frames; 0 for a silent film.
    """
    shape = (frames, size[1], size[0], 3)
    meta: dict[str, Any] = {"fps": fps}
    if sound:
        meta["audio"] = audio(sound, frames / fps)
    return Media("video", np.random.RandomState(seed).randint(0, 255, shape, dtype=np.uint8), meta)


def still(seed: int, frames: int = 8, fps: float = 4.0, size: tuple[int, int] = (64, 48)) -> Media:
    """A video in which little happens: one picture, of which a growing part changes."""
    moving = video(seed, frames, fps, size)
    frames_of = np.repeat(moving.data[:1], frames, axis=0)
    for number in range(1, frames):
        frames_of[number, : 4 * number] = moving.data[number, : 4 * number]
    return Media("video", frames_of, moving.meta)


def audio(seed: int, seconds: float = 1.3) -> Media:
    """A tone in noise, in steps of 16 bits."""
    t = np.arange(int(RATE * seconds)) / RATE
    wave = 0.3 * np.sin(2 * np.pi * (300 + 40 * (seed % 7)) * t) + 0.05 * np.random.RandomState(seed).randn(len(t))
    return Media("audio", (np.rint(wave * 2**15) / 2**15).astype(np.float32), {"sampling_rate": RATE})


def url_of(media: Media) -> str:
    """The item as a file of a lossless format: PNG, FFV1 in Matroska, WAV."""
    return {"image": _png, "video": _matroska, "audio": _wav}[media.modality](media)


def embedding_url(embedding: torch.Tensor | Mapping[str, torch.Tensor], **metadata: Any) -> str:
    """A safetensors file of one tensor, or of several; ``metadata`` are JSON values."""
    tensors = {"embedding": embedding} if isinstance(embedding, torch.Tensor) else dict(embedding)
    text = {name: json.dumps(value) for name, value in metadata.items()}
    return _data("application/x-safetensors", save({k: v.contiguous() for k, v in tensors.items()}, text or None))


def _data(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _png(media: Media) -> str:
    buffer = io.BytesIO()
    media.data.save(buffer, "PNG")
    return _data("image/png", buffer.getvalue())


def _wav(media: Media) -> str:
    buffer = io.BytesIO()
    soundfile.write(buffer, media.data, RATE, format="WAV", subtype="PCM_16")
    return _data("audio/wav", buffer.getvalue())


def _matroska(media: Media) -> str:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska", options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream("ffv1", rate=Fraction(media.meta["fps"]))
        stream.height, stream.width = media.data.shape[1:3]
        stream.pix_fmt = "bgr0"
        sound = media.meta.get("audio")
        track = None if sound is None else container.add_stream("pcm_s16le", rate=RATE, layout="mono")
        for picture in media.data:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="bgr0")))
        container.mux(stream.encode())
        if track is not None and sound is not None:
            samples = np.rint(sound.data * 2**15).astype(np.int16)[None]
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            frame.sample_rate = RATE
            container.mux(track.encode(frame))
            container.mux(track.encode())
    return _data("video/x-matroska", buffer.getvalue())
