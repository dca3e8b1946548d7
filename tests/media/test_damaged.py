# SPDX-License-Identifier: Apache-2.0
"""Damaged files of every kind give a result or ``InvalidRequest``, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, features
from safetensors.torch import save

from dynamo_epd.contract.errors import InvalidRequest
from dynamo_epd.media.audio import decode_audio
from dynamo_epd.media.embedding import decode_embedding
from dynamo_epd.media.image import decode_image
from dynamo_epd.media.limits import MediaLimits
from dynamo_epd.media.video import decode_video, sampler

LABEL = "item 1"
# Small, so that a header which lies cannot make a test slow.
LIMITS = MediaLimits(
    max_file_size_bytes=1 << 20,
    max_image_pixels=1 << 18,
    max_video_pixels=1 << 22,
    max_video_source_frames=200,
    max_video_duration=60.0,
    max_audio_duration=60.0,
)
ROUNDS = 60
EXIF_KINDS = [kind for kind in ("PNG", "JPEG", "WEBP", "TIFF", "AVIF") if kind != "AVIF" or features.check("avif")]

Decoder = Callable[[bytes], object]
DECODERS: dict[str, Decoder] = {
    "image": lambda data: decode_image(data, limits=LIMITS, label=LABEL),
    "video": lambda data: decode_video(
        data, sample=sampler(fps=2, max_frames=8), limits=LIMITS, label=LABEL, audio_rate=16000
    ),
    "audio": lambda data: decode_audio(data, rate=16000, limits=LIMITS, label=LABEL),
    "embedding": lambda data: decode_embedding(data, width=8, limits=LIMITS, label=LABEL),
}


@pytest.fixture(scope="module")
def files(image_file, video_file, audio_file, sine) -> dict[str, bytes]:
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 256, (24, 32, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    samples = sine(16000, 0.5)
    return {
        **{f"image {kind}": image_file(noise, kind, exif=exif) for kind in EXIF_KINDS},
        **{f"image {kind}": image_file(noise, kind) for kind in ("GIF", "BMP", "PPM", "JPEG2000")},
        "image PNG palette": image_file(noise.convert("P"), "PNG", transparency=3),
        "image PNG 16 bit": image_file(Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 999), "PNG"),
        "image TIFF float": image_file(Image.fromarray(np.ones((8, 8), np.float32)), "TIFF"),
        "video mp4": video_file(count=8, audio="aac"),
        "video webm": video_file("webm", "libvpx-vp9", count=8, audio="libopus"),
        "video avi": video_file("avi", "mpeg4", count=8),
        "video mpegts": video_file("mpegts", count=8),
        "audio WAV": audio_file(samples, 16000),
        "audio WAV float": audio_file(samples, 16000, "WAV", "FLOAT"),
        "audio FLAC": audio_file(samples, 16000, "FLAC"),
        "audio OGG": audio_file(samples, 16000, "OGG", "VORBIS"),
        "audio MP3": audio_file(samples, 16000, "MP3", "MPEG_LAYER_III"),
        "audio mp4": video_file(count=2, audio="aac"),
        "embedding one": save({"x": torch.ones(4, 8)}),
        "embedding grid": save({"mm_embeddings": torch.ones(4, 8).bfloat16(), "grid_thw": torch.tensor([1, 2, 2])}),
    }


NAMES = (
    [f"image {kind}" for kind in (*EXIF_KINDS, "GIF", "BMP", "PPM", "JPEG2000")]
    + ["image PNG palette", "image PNG 16 bit", "image TIFF float"]
    + [f"video {kind}" for kind in ("mp4", "webm", "avi", "mpegts")]
    + [f"audio {kind}" for kind in ("WAV", "WAV float", "FLAC", "OGG", "MP3", "mp4")]
    + ["embedding one", "embedding grid"]
)


def damage(data: bytes, random_: random.Random) -> bytes:
    """Cut off, flip bits, overwrite, remove or repeat a piece; often near the beginning, where headers are."""
    out = bytearray(data)
    reach = len(out) if random_.random() < 0.5 else min(len(out), 200)
    kind = random_.randrange(5)
    at = random_.randrange(reach)
    length = random_.randrange(1, 64)
    if kind == 0:
        del out[at:]
    elif kind == 1:
        for _ in range(random_.randrange(1, 12)):
            out[random_.randrange(reach)] ^= 1 << random_.randrange(8)
    elif kind == 2:
        out[at : at + length] = random_.choice((b"\0", b"\xff", random_.randbytes(1))) * length
    elif kind == 3:
        del out[at : at + length]
    else:
        out[at:at] = out[at : at + length]
    return bytes(out)


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_file_decodes(name: str, files: dict[str, bytes]) -> None:
    DECODERS[name.split()[0]](files[name])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_decodes_or_is_refused(name: str, files: dict[str, bytes]) -> None:
    random_ = random.Random(name)
    decode = DECODERS[name.split()[0]]
    refusals = 0
    for _ in range(ROUNDS):
        try:
            decode(damage(files[name], random_))
        except InvalidRequest as error:
            refusals += 1
            assert error.item == LABEL
            assert len(str(error)) < 500
    assert refusals > 0


@pytest.mark.parametrize(
    "kind, others",
    [
        ("image", set()),
        ("video", {"image GIF", "image AVIF", "audio mp4"}),
        ("audio", {"video mp4", "video webm"}),
        ("embedding", set()),
    ],
)
def test_files_of_another_kind_are_refused(kind: str, others: set[str], files: dict[str, bytes]) -> None:
    """Except those that are of both: a GIF moves, AVIF is MP4 inside, a video may have sound."""
    accepted = set()
    for name, data in files.items():
        try:
            DECODERS[kind](data)
        except InvalidRequest:
            continue
        accepted.add(name)
    assert accepted == others & files.keys() | {name for name in NAMES if name.startswith(kind)}
