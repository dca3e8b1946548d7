# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from io import BytesIO

import av
import numpy as np
import pytest

from dynamo_epd.contract.errors import InvalidRequest
from dynamo_epd.media.audio import DecodedAudio, decode_audio
from dynamo_epd.media.limits import MediaLimits

LABEL = "audio 1"


def decode(data: bytes, rate: int = 16000, limits: MediaLimits | None = None) -> DecodedAudio:
    audio = decode_audio(data, rate=rate, limits=limits or MediaLimits(), label=LABEL)
    assert audio.samples.dtype == np.float32 and audio.samples.ndim == 1 and audio.sampling_rate == rate
    return audio


def refused(data: bytes, limits: MediaLimits | None = None) -> str:
    with pytest.raises(InvalidRequest) as caught:
        decode(data, limits=limits)
    assert caught.value.item == LABEL
    return str(caught.value)


def pitch(audio: DecodedAudio) -> float:
    """The strongest frequency in Hz."""
    return float(np.argmax(np.abs(np.fft.rfft(audio.samples))) * audio.sampling_rate / len(audio.samples))


def with_ffmpeg(samples: np.ndarray, rate: int, container: str, codec: str, layout: str = "mono") -> bytes:
    out = BytesIO()
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.atleast_2d(samples), format="fltp", layout=layout)
        frame.sample_rate, frame.pts = rate, 0
        for packet in [*stream.encode(frame), *stream.encode()]:
            file.mux(packet)
    return out.getvalue()


@pytest.mark.parametrize(
    "subtype, tolerance", [("PCM_16", 4e-5), ("PCM_24", 1e-6), ("PCM_U8", 8e-3), ("FLOAT", 0.0), ("DOUBLE", 0.0)]
)
def test_wav_at_its_own_rate_is_exact(subtype: str, tolerance: float, audio_file, sine) -> None:
    samples = sine(16000, 0.5)
    audio = decode(audio_file(samples, 16000, "WAV", subtype))
    assert np.abs(audio.samples - samples).max() <= tolerance
    assert (audio.source_rate, audio.duration) == (16000, 0.5)


@pytest.mark.parametrize(
    "file_format, subtype", [("FLAC", "PCM_16"), ("MP3", "MPEG_LAYER_III"), ("OGG", "VORBIS"), ("AIFF", "PCM_16")]
)
@pytest.mark.parametrize("rate", [16000, 24000])
def test_formats_and_resampling(file_format: str, subtype: str, rate: int, audio_file, sine) -> None:
    audio = decode(audio_file(sine(44100, 1.0), 44100, file_format, subtype), rate)
    assert audio.source_rate == 44100
    assert len(audio.samples) == pytest.approx(rate, abs=rate * 0.06)
    assert pitch(audio) == pytest.approx(440, abs=2)
    middle = audio.samples[rate // 4 : rate // 2]
    assert np.sqrt(np.mean(middle**2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.03)


@pytest.mark.parametrize(
    "container, codec", [("ipod", "aac"), ("webm", "libopus"), ("matroska", "flac"), ("adts", "aac")]
)
def test_what_libsndfile_cannot_read(container: str, codec: str, sine) -> None:
    audio = decode(with_ffmpeg(sine(48000, 1.0), 48000, container, codec))
    assert pitch(audio) == pytest.approx(440, abs=2)
    assert audio.duration == pytest.approx(1.0, abs=0.06)


def test_both_ways_give_the_same_sound(audio_file, sine) -> None:
    samples = sine(16000, 0.5)
    left = decode(audio_file(samples, 16000, "FLAC")).samples
    right = decode(with_ffmpeg(samples, 16000, "matroska", "flac")).samples
    assert len(left) == len(right) and np.abs(left - right).max() < 1e-3


def test_channels_are_averaged(audio_file, sine) -> None:
    left, right = sine(16000, 0.5, 440), sine(16000, 0.5, 1000)
    audio = decode(audio_file(np.stack([left, right], axis=1), 16000, "WAV", "FLOAT"))
    assert np.allclose(audio.samples, (left + right) / 2, atol=1e-6)
    opposite = decode(audio_file(np.stack([left, -left], axis=1), 16000, "WAV", "FLOAT"))
    assert np.abs(opposite.samples).max() == 0
    sound = decode(with_ffmpeg(np.stack([left, left]), 16000, "matroska", "flac", "stereo"))
    assert np.abs(sound.samples - left).max() < 1e-3


def test_long_files_are_read_in_pieces(audio_file) -> None:
    """More than one block per channel count; nothing is lost at the seams."""
    samples = np.linspace(-1, 1, 1_200_000, dtype=np.float32)
    audio = decode(audio_file(np.stack([samples, samples], axis=1), 16000, "WAV", "FLOAT"))
    assert np.array_equal(audio.samples, samples)


def test_resampling_keeps_the_length_and_removes_what_does_not_fit(audio_file, sine) -> None:
    audio = decode(audio_file(sine(48000, 1.0, 440) + sine(48000, 1.0, 11000), 48000, "WAV", "FLOAT"))
    assert len(audio.samples) == 16000
    spectrum = np.abs(np.fft.rfft(audio.samples))
    assert spectrum[5000 - 100 : 5000 + 100].max() < spectrum[440] * 1e-3


def test_the_duration_limit_is_exact(audio_file, sine) -> None:
    data = audio_file(sine(16000, 1.0), 16000)
    assert decode(data, limits=MediaLimits(max_audio_duration=1.0)).duration == 1.0
    assert "limit of 0.999 s" in refused(data, MediaLimits(max_audio_duration=0.999))
    assert "limit of 0.5 s" in refused(
        with_ffmpeg(sine(16000, 1.0), 16000, "matroska", "flac"), MediaLimits(max_audio_duration=0.5)
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_samples_that_are_no_numbers(value: float, audio_file, sine) -> None:
    samples = sine(16000, 0.1)
    samples[100] = value
    assert "NaN" in refused(audio_file(samples, 16000, "WAV", "FLOAT"))


def test_nothing_to_hear(audio_file) -> None:
    assert "no samples" in refused(audio_file(np.zeros(0, np.float32), 16000))
    assert "too short" in refused(audio_file(np.zeros(1, np.float32), 768000))


def test_a_video_without_sound(video_file) -> None:
    assert "no sound track" in refused(video_file(count=2))


@pytest.mark.parametrize("rate", [100, 1_000_000])
def test_strange_rates(rate: int, audio_file) -> None:
    assert f"{rate} Hz" in refused(audio_file(np.zeros(100, np.float32), rate))


def test_too_many_channels(audio_file) -> None:
    assert "65 channels" in refused(audio_file(np.zeros((10, 65), np.float32), 16000))


@pytest.mark.parametrize(
    "data, found",
    [(b"", "empty"), (b"<html>", "an HTML page"), (b"hello", "plain text"), (b"\xff" * 64, "unknown format")],
)
def test_what_is_no_audio(data: bytes, found: str) -> None:
    assert found in refused(data)


def test_the_size_limit(audio_file, sine) -> None:
    assert "--max-file-size-mb" in refused(audio_file(sine(16000, 1.0), 16000), MediaLimits(max_file_size_bytes=1000))
