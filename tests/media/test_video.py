# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import struct
from dataclasses import replace
from fractions import Fraction
from io import BytesIO
from pathlib import Path

import av
import numpy as np
import pytest

from dynamo_epd.contract.errors import InvalidRequest
from dynamo_epd.media import video as module
from dynamo_epd.media.limits import MediaLimits
from dynamo_epd.media.video import DecodedVideo, Sampler, VideoInfo, decode_video, sampler

LABEL = "video 1"
EVERY = sampler()


def decode(data: bytes, sample: Sampler = EVERY, limits: MediaLimits | None = None, **options) -> DecodedVideo:
    return decode_video(data, sample=sample, limits=limits or MediaLimits(), label=LABEL, **options)


def refused(data: bytes, sample: Sampler = EVERY, limits: MediaLimits | None = None, **options) -> str:
    with pytest.raises(InvalidRequest) as caught:
        decode(data, sample, limits, **options)
    assert caught.value.item == LABEL
    return str(caught.value)


def levels(video: DecodedVideo) -> list[int]:
    """The grey value of each frame, which ``video_file`` makes ``20 + i * 200 // count``."""
    return np.median(video.frames.reshape(len(video.frames), -1), axis=1).astype(int).tolist()


KINDS = [("mp4", "libx264"), ("webm", "libvpx-vp9"), ("avi", "mpeg4"), ("mpegts", "libx264"), ("matroska", "libx265")]


@pytest.mark.parametrize("container, codec", KINDS, ids=[f"{a}-{b}" for a, b in KINDS])
def test_frames_times_and_indices(container: str, codec: str, video_file) -> None:
    video = decode(video_file(container, codec))
    assert video.frames.dtype == np.uint8 and video.frames.shape == (30, 48, 64, 3)
    assert video.frame_indices == tuple(range(30))
    assert video.timestamps == tuple(i / 10 for i in range(30))
    assert (video.fps, video.total_frames, video.audio) == (10.0, 30, None)
    assert video.duration == pytest.approx(3.0)
    assert np.abs(np.array(levels(video)) - [20 + i * 200 // 30 for i in range(30)]).max() <= 4


def test_sampling_takes_the_frames_it_names(video_file) -> None:
    data = video_file()
    every = decode(data)
    sampled = decode(data, sampler(fps=2))
    assert sampled.frame_indices == (0, 5, 10, 15, 20, 25)
    assert sampled.timestamps == (0.0, 0.5, 1.0, 1.5, 2.0, 2.5)
    assert np.array_equal(sampled.frames, every.frames[list(sampled.frame_indices)])
    counted = decode(data, sampler(num_frames=4))
    assert counted.frame_indices == (0, 10, 19, 29)
    assert np.array_equal(counted.frames, every.frames[[0, 10, 19, 29]])
    assert (counted.fps, counted.total_frames) == (10.0, 30)


def test_a_rule_of_a_family_sees_the_video_and_may_repeat_frames(video_file) -> None:
    seen: list[VideoInfo] = []

    def rule(info: VideoInfo) -> list[int]:
        seen.append(info)
        return [0, 3, 3, 29]

    data = video_file()
    video = decode(data, rule)
    assert video.frame_indices == (0, 3, 3, 29) and video.timestamps == (0.0, 0.3, 0.3, 2.9)
    assert np.array_equal(video.frames, decode(data).frames[[0, 3, 3, 29]])
    (info,) = seen
    assert (info.total_frames, info.fps, info.width, info.height) == (30, 10.0, 64, 48)
    assert info.timestamps.tolist() == [i / 10 for i in range(30)]


@pytest.mark.parametrize("indices", [[], [30], [-1], [2, 1]])
def test_a_rule_that_names_frames_that_are_not_there(indices: list[int], video_file) -> None:
    assert "30 of the video" in refused(video_file(), lambda info: indices)


def test_frames_at_uneven_times(video_file) -> None:
    """One second of many frames, then a still of four seconds: sampling by time, not by number."""
    times = [*range(0, 1000, 50), 1000, 5000]
    video = decode(video_file("matroska", count=len(times), times=times, fps=20))
    assert video.timestamps == tuple(t / 1000 for t in times)
    sampled = decode(video_file("matroska", count=len(times), times=times, fps=20), sampler(fps=1))
    assert sampled.timestamps == (0.0, 1.0, 5.0)
    assert sampled.frame_indices == (0, 20, 21)


def test_a_raw_stream_has_evenly_spaced_times(video_file) -> None:
    video = decode(video_file("h264"), sampler(num_frames=2))
    assert video.frame_indices == (0, 29) and video.timestamps == (0.0, pytest.approx(29 / video.fps))


def test_a_single_frame(video_file) -> None:
    video = decode(video_file(count=1), sampler(fps=2))
    assert video.timestamps == (0.0,) and video.frames.shape[0] == 1 and video.duration == pytest.approx(0.1)


def test_odd_sizes_have_no_padding(video_file) -> None:
    picture = np.zeros((34, 50, 3), np.uint8)
    picture[:, 25:] = 255
    video = decode(video_file(count=3, size=(50, 34), picture=picture))
    assert video.frames.shape == (3, 34, 50, 3)
    assert video.frames[:, :, :20].max() < 30 and video.frames[:, :, 30:].min() > 225


@pytest.mark.parametrize("turn", [0, 90, 180, 270])
def test_the_display_matrix_is_applied(turn: int, video_file) -> None:
    """As phones store upright videos."""
    upright = np.full((48, 64, 3), 120, np.uint8)
    upright[:16, :24] = 250
    stored = np.ascontiguousarray(np.rot90(upright, k=turn // 90))
    data = bytearray(video_file(count=2, size=(stored.shape[1], stored.shape[0]), picture=stored))
    # tkhd, version 0: 36 bytes of other fields stand between the box's name and its matrix (ISO 14496-12, 8.3.2).
    at = data.index(b"tkhd") + 4 + 4 + 36
    assert struct.unpack_from(">9i", data, at) == (65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30)
    a, b = {0: (1, 0), 90: (0, 1), 180: (-1, 0), 270: (0, -1)}[turn]
    struct.pack_into(">9i", data, at, a << 16, b << 16, 0, -b << 16, a << 16, 0, 0, 0, 1 << 30)
    frame = decode(bytes(data)).frames[0]
    assert frame.shape == (48, 64, 3)
    assert np.abs(frame.astype(int) - upright).mean() < 6


def test_the_sound_track(video_file) -> None:
    video = decode(video_file(audio="aac"), sampler(num_frames=2), audio_rate=8000)
    assert video.audio is not None and video.audio.sampling_rate == 8000
    assert video.audio.samples.dtype == np.float32
    assert video.audio.duration == pytest.approx(3.0, abs=0.1)
    spectrum = np.abs(np.fft.rfft(video.audio.samples[4000:12000]))
    assert np.argmax(spectrum) == 440
    assert decode(video_file(audio="aac"), sampler(num_frames=2)).audio is None
    assert decode(video_file(), sampler(num_frames=2), audio_rate=8000).audio is None


def test_limits(video_file) -> None:
    data = video_file()
    assert "30 frames" in refused(data, limits=MediaLimits(max_video_frames=29))
    assert "30 frames" in refused(data, limits=MediaLimits(max_video_pixels=30 * 64 * 48 - 1))
    assert len(decode(data, limits=MediaLimits(max_video_frames=30, max_video_pixels=30 * 64 * 48)).frames) == 30
    assert "3.0 s" in refused(data, sampler(num_frames=1), MediaLimits(max_video_duration=2.9))
    assert "more than 29 frames" in refused(data, sampler(num_frames=1), MediaLimits(max_video_source_frames=29))
    assert "64 x 48 pixels" in refused(data, limits=MediaLimits(max_image_pixels=64 * 48 - 1))
    assert decode(data, sampler(max_frames=7), MediaLimits(max_video_frames=7)).frame_indices == (
        0,
        5,
        10,
        14,
        19,
        24,
        29,
    )
    assert "--max-file-size-mb" in refused(data, limits=MediaLimits(max_file_size_bytes=100))


@pytest.mark.parametrize(
    "data, found", [(b"", "empty"), (b"<html>", "an HTML page"), (b"AAAA", "plain text"), (b"\0" * 4, "unknown format")]
)
def test_what_is_no_video(data: bytes, found: str) -> None:
    assert found in refused(data)


def test_sound_only(audio_file, sine) -> None:
    assert "no moving picture" in refused(audio_file(sine(16000, 1), 16000))


def test_a_truncated_mp4(video_file) -> None:
    data = video_file()
    assert "not a video" in refused(data[: len(data) // 2])


@pytest.mark.parametrize("text", ["#EXTM3U\n#EXTINF:3,\n{}\n#EXT-X-ENDLIST\n", "ffconcat version 1.0\nfile {}\n"])
def test_a_playlist_opens_no_other_file(text: str, video_file, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret.mp4").write_bytes(video_file())
    monkeypatch.chdir(tmp_path)
    for name in ("secret.mp4", f"file://{tmp_path}/secret.mp4"):
        assert "not a video" in refused(text.format(name).encode())


def test_a_title_in_another_encoding(video_file) -> None:
    data = video_file("matroska", count=2, title="TITLE")
    assert data.count(b"TITLE") == 1
    assert decode(data.replace(b"TITLE", b"\xe9\xff\xfe\x80\xc0")).total_frames == 2


def test_cover_art_is_no_moving_picture(sine) -> None:
    out = BytesIO()
    with av.open(out, "w", format="mp4") as file:
        sound, cover = file.add_stream("aac", rate=16000, layout="mono"), file.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 32, 32, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        wave = av.AudioFrame.from_ndarray(sine(16000, 1)[None], format="fltp", layout="mono")
        wave.sample_rate, wave.pts = 16000, 0
        for stream, frame in ((cover, av.VideoFrame(32, 32, "rgb24")), (sound, wave)):
            for packet in [*stream.encode(frame), *stream.encode()]:
                file.mux(packet)
    assert "no moving picture" in refused(out.getvalue())


def test_frames_that_an_edit_list_cuts_off_are_not_counted(video_file) -> None:
    """The first 5 of 20 frames are needed to decode the rest, and are not shown."""
    data = video_file(count=20, start=-5, options={"avoid_negative_ts": "disabled", "use_editlist": "1"})
    with av.open(BytesIO(data)) as file:
        assert sum(packet.is_discard for packet in file.demux(video=0)) == 5
    video = decode(data, sampler(num_frames=2))
    assert (video.total_frames, video.frame_indices, video.timestamps) == (15, (0, 14), (0.0, 1.4))
    assert np.abs(np.array(levels(video)) - [70, 210]).max() <= 4
    assert decode(data, lambda info: [info.total_frames // 2]).frame_indices == (7,)


def test_fewer_frames_than_the_packets_announce(video_file, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some codecs have packets that show nothing; the rule is asked again with the frames that there are."""
    scan = module._scan

    def announce_more(data: bytes, limits: MediaLimits, label: str) -> tuple[VideoInfo, Fraction]:
        found, rate = scan(data, limits, label)
        return replace(found, total_frames=40, duration=4.0, timestamps=np.arange(40) / 10), rate

    monkeypatch.setattr(module, "_scan", announce_more)
    video = decode(video_file(), sampler(num_frames=2))
    assert (video.total_frames, video.frame_indices, video.timestamps) == (30, (0, 29), (0.0, 2.9))
    assert video.duration == pytest.approx(3.0)
    assert np.array_equal(video.frames[1], decode(video_file()).frames[-1])


def test_a_stream_that_begins_in_the_middle(video_file) -> None:
    """Refused, or with the frames that can be decoded; never with frames under other times."""
    data = video_file("mpegts")
    packet = 188
    cut = data[: 3 * packet] + data[len(data) // packet // 3 * packet :]
    try:
        part = decode(cut)
    except InvalidRequest as error:
        assert error.item == LABEL
    else:
        assert 0 < len(part.frames) == part.total_frames == len(part.timestamps) < 30


def info(total: int, fps: float) -> VideoInfo:
    return VideoInfo(total, fps, total / fps, np.arange(total) / fps, 64, 48)


@pytest.mark.parametrize(
    "total, fps, options, expected",
    [
        (10, 10.0, {}, range(10)),
        (10, 10.0, {"fps": 10}, range(10)),
        (10, 10.0, {"fps": 1000}, range(10)),
        (10, 10.0, {"fps": 1}, [0]),
        (10, 10.0, {"fps": 0.01}, [0]),
        (11, 10.0, {"fps": 1}, [0, 10]),
        (60, 29.97, {"fps": 2}, [0, 14, 29, 44, 59]),
        (90, 30.0, {"fps": 4}, [0, 7, 15, 22, 30, 37, 45, 52, 60, 67, 75, 82]),
        (10, 10.0, {"num_frames": 1}, [0]),
        (10, 10.0, {"num_frames": 2}, [0, 9]),
        (10, 10.0, {"num_frames": 99}, range(10)),
        (100, 10.0, {"fps": 5, "max_frames": 3}, [0, 48, 98]),
        (100, 10.0, {"num_frames": 50, "max_frames": 2}, [0, 99]),
        (1, 10.0, {"num_frames": 5}, [0]),
    ],
)
def test_sampler(total: int, fps: float, options: dict, expected) -> None:
    indices = sampler(**options)(info(total, fps))
    assert list(indices) == list(expected)
    assert all(type(i) is int for i in indices)


@pytest.mark.parametrize(
    "options",
    [
        {"fps": 1, "num_frames": 2},
        {"fps": 0},
        {"fps": -1.0},
        {"fps": float("nan")},
        {"fps": float("inf")},
        {"fps": "2"},
        {"fps": True},
        {"num_frames": 0},
        {"num_frames": 2.5},
        {"max_frames": -3},
    ],
)
def test_sampler_refuses(options: dict) -> None:
    with pytest.raises(InvalidRequest):
        sampler(**options)
