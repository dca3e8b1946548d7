# SPDX-License-Identifier: Apache-2.0
"""Audio bytes -> one channel of float32 samples at the rate that the model wants.

Channels are averaged, then the signal is resampled with soxr at its high quality: what ``librosa.load``, on which the
processors' reference code rests, does as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO

import av
import numpy as np
import soundfile
import soxr

from ..contract.errors import InvalidRequest
from .container import open_container
from .content import damaged
from .limits import MediaLimits

_RATES = range(1_000, 768_001)
_MAX_CHANNELS = 64
_BLOCK_VALUES = 1 << 20


@dataclass(frozen=True)
class DecodedAudio:
    """One clip.

    Attributes:
        samples: float32 ``[n]``, one channel, nominally in [-1, 1], all finite, n >= 1.
        sampling_rate: of ``samples``, in Hz.
        source_rate: of the file, in Hz.
        duration: seconds.
    """

    samples: np.ndarray
    sampling_rate: int
    source_rate: int
    duration: float


def decode_audio(data: bytes, *, rate: int, limits: MediaLimits, label: str) -> DecodedAudio:
    """Decode one audio file: libsndfile's formats (WAV, FLAC, MP3, Ogg), else what FFmpeg knows (AAC, WebM, ...).

    Args:
        rate: sampling rate of the result, in Hz.

    Raises:
        InvalidRequest: no sound in it, damaged, longer than ``limits.max_audio_duration``, or NaN or infinite samples.
    """
    limits.check_size(len(data), "the audio", label)
    try:
        file = soundfile.SoundFile(BytesIO(data))
    except soundfile.SoundFileError:
        decoded = decode_sound_track(data, rate=rate, limits=limits, label=label)
        if decoded is None:
            raise InvalidRequest(
                "the file has no sound track that can be decoded; send one that has", item=label
            ) from None
        return decoded
    with file:
        try:
            return _finish(_file_blocks(file), file.samplerate, file.channels, rate, limits, label)
        except soundfile.SoundFileError as error:
            raise damaged(data, error, label) from error


def decode_sound_track(data: bytes, *, rate: int, limits: MediaLimits, label: str) -> DecodedAudio | None:
    """The first sound track that FFmpeg can decode, or None where there is none; raises as ``decode_audio``."""
    with open_container(data, "audio", label) as container:
        # A codec that FFmpeg does not know has no context.
        stream = next((s for s in container.streams.audio if s.codec_context is not None), None)
        if stream is None:
            return None
        source_rate, channels = stream.codec_context.sample_rate, stream.codec_context.channels

        def blocks() -> Iterator[np.ndarray]:
            resampler = av.AudioResampler(format="fltp")
            for frame in container.decode(stream):
                if frame.sample_rate != source_rate or frame.layout.nb_channels != channels:
                    raise InvalidRequest("the sound track changes its format on the way; encode it again", item=label)
                for part in resampler.resample(frame):
                    yield part.to_ndarray().T

        return _finish(blocks(), source_rate, channels, rate, limits, label)


def _file_blocks(file: soundfile.SoundFile) -> Iterator[np.ndarray]:
    while len(block := file.read(max(1, _BLOCK_VALUES // file.channels), dtype="float32", always_2d=True)):
        yield block


def _finish(
    blocks: Iterator[np.ndarray], source_rate: int, channels: int, rate: int, limits: MediaLimits, label: str
) -> DecodedAudio:
    """``blocks`` are float32 ``[n, channels]``."""
    if source_rate not in _RATES or not 1 <= channels <= _MAX_CHANNELS:
        raise InvalidRequest(
            f"audio with {channels} channels at {source_rate} Hz is not supported (1 to {_MAX_CHANNELS} channels, "
            f"{_RATES.start} to {_RATES.stop - 1} Hz)",
            item=label,
        )
    parts: list[np.ndarray] = []
    count = 0
    for block in blocks:
        count += len(block)
        if count > limits.max_audio_duration * source_rate:
            raise InvalidRequest(
                f"the audio is longer than the limit of {limits.max_audio_duration:g} s; send a shorter piece",
                item=label,
            )
        parts.append(block.mean(axis=1, dtype=np.float32))
    if not parts:
        raise InvalidRequest("the audio has no samples", item=label)
    samples = np.concatenate(parts)
    if not np.isfinite(samples).all():
        raise InvalidRequest("the audio has samples that are NaN or infinite; encode it again", item=label)
    if source_rate != rate:
        samples = soxr.resample(samples, source_rate, rate, quality="HQ")
    if not len(samples):
        raise InvalidRequest(f"the audio is too short: {count} samples at {source_rate} Hz", item=label)
    return DecodedAudio(samples, rate, source_rate, count / source_rate)
