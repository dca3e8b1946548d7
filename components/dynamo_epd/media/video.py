# SPDX-License-Identifier: Apache-2.0
"""Video bytes -> sampled frames with the times at which they are shown, and the sound track.

Which frames are taken is decided by a ``Sampler`` that sees all presentation times before anything is decoded, so that
a model family can bring its own rule; ``sampler`` makes the usual ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from ..contract.errors import InvalidRequest
from .audio import DecodedAudio, decode_sound_track
from .container import open_container
from .limits import MediaLimits

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

# Videos are decoded next to each other; one must not take every core of the encode worker.
_DECODER_THREADS = 4
_DEFAULT_FPS = Fraction(25)


@dataclass(frozen=True)
class VideoInfo:
    """What is known of a video before it is decoded.

    Attributes:
        total_frames: frames in the video, >= 1.
        fps: average frame rate of the container, or where it tells none, of the presentation times.
        duration: seconds from the first frame's beginning to the last frame's end.
        timestamps: float64 ``[total_frames]``, seconds after the first frame, rising.
        width: of the stored picture, in pixels (before rotation).
        height: likewise.
    """

    total_frames: int
    fps: float
    duration: float
    timestamps: np.ndarray
    width: int
    height: int


Sampler = Callable[[VideoInfo], Sequence[int]]
"""Indices of the wanted frames, in ``range(total_frames)``, never falling; a repeated index repeats the frame."""


@dataclass(frozen=True)
class DecodedVideo:
    """The frames that were sampled from a video.

    Attributes:
        frames: uint8 ``[n, height, width, 3]``, upright RGB.
        timestamps: per frame, seconds after the video's first frame, from the container.
        frame_indices: per frame, its number in the video.
        fps: frame rate of the video (not of the sample).
        total_frames: frames in the video.
        duration: of the video, in seconds.
        audio: the first sound track, from its own beginning; None when it was not asked for or there is none.
    """

    frames: np.ndarray
    timestamps: tuple[float, ...]
    frame_indices: tuple[int, ...]
    fps: float
    total_frames: int
    duration: float
    audio: DecodedAudio | None = None


def sampler(*, fps: float | None = None, num_frames: int | None = None, max_frames: int | None = None) -> Sampler:
    """The sampler for a request's options.

    Args:
        fps: take the frame that is shown at 0, 1/fps, 2/fps, ... seconds; a frame is taken once.
        num_frames: take this many frames, evenly spread from the first to the last; all, when there are fewer.
        max_frames: where the rule gives more frames, take this many evenly spread ones instead.

    With neither ``fps`` nor ``num_frames`` every frame is taken.

    Raises:
        InvalidRequest: both rules at once, or a number that is not positive.
    """
    if fps is not None and num_frames is not None:
        raise InvalidRequest("fps and num_frames exclude each other; give one of them")
    for name, value, kinds in (
        ("fps", fps, (int, float)),
        ("num_frames", num_frames, int),
        ("max_frames", max_frames, int),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf):
            raise InvalidRequest(f"{name} must be a positive number, not {value!r}")

    def choose(info: VideoInfo) -> Sequence[int]:
        indices = np.arange(info.total_frames)
        if fps is not None and fps < info.total_frames / info.duration:
            times = np.arange(math.ceil(round(info.duration * fps, 6))) / fps
            # Half a microsecond: times from a container are rounded to its time base.
            indices = np.unique(np.searchsorted(info.timestamps, times + 5e-7, side="right") - 1)
        count = min(n for n in (num_frames, max_frames, len(indices)) if n is not None)
        return indices[np.rint(np.linspace(0, len(indices) - 1, count)).astype(np.int64)].tolist()

    return choose


def decode_video(
    data: bytes, *, sample: Sampler, limits: MediaLimits, label: str, audio_rate: int | None = None
) -> DecodedVideo:
    """Decode one video file. Thread-safe; frames are decoded in order up to the last that is wanted.

    Args:
        sample: see ``Sampler``. It is asked again when the video turns out to hold fewer frames than it announced.
        audio_rate: also decode the first sound track, to this sampling rate.

    Raises:
        InvalidRequest: not a video, damaged, without a frame, beyond a limit, or changing its size on the way.
    """
    limits.check_size(len(data), "the video", label)
    info, rate = _scan(data, limits, label)
    indices = _checked_indices(sample(info), info, limits, label)
    frames, times = _decode(data, info, rate, indices, limits, label)
    if len(times) <= indices[-1]:
        if not times:
            raise InvalidRequest("no frame of the video can be decoded; send the file again", item=label)
        info = _info(times, rate, info.width, info.height)
        indices = _checked_indices(sample(info), info, limits, label)
        frames, times = _decode(data, info, rate, indices, limits, label)
        if len(times) <= indices[-1]:
            raise InvalidRequest("the video does not decode to the same frames twice", item=label)
    shown_at = tuple(float(times[i] - times[0]) for i in indices)
    audio = decode_sound_track(data, rate=audio_rate, limits=limits, label=label) if audio_rate else None
    return DecodedVideo(frames, shown_at, tuple(indices), info.fps, info.total_frames, info.duration, audio)


def _video_stream(container: InputContainer, label: str) -> VideoStream:
    for stream in container.streams.video:
        # Cover art is a stream too, and a codec that FFmpeg does not know has no context.
        if not stream.disposition & type(stream.disposition).attached_pic and stream.codec_context is not None:
            return stream
    raise InvalidRequest("the file has no moving picture that can be decoded; send a video", item=label)


def _scan(data: bytes, limits: MediaLimits, label: str) -> tuple[VideoInfo, Fraction]:
    """What is known before decoding, and the frame rate where the stream tells one, else 0.

    Presentation times are those of the packets: headers often tell no or a wrong number of frames.
    """
    times: list[Fraction | None] = []
    with open_container(data, "a video", label) as container:
        stream = _video_stream(container, label)
        width, height = stream.codec_context.width, stream.codec_context.height
        if width * height > limits.max_image_pixels:
            raise InvalidRequest(
                f"the video has {width} x {height} pixels a frame, the limit is {limits.max_image_pixels} in all; "
                "scale it down",
                item=label,
            )
        for packet in container.demux(stream):
            if packet.size and not packet.is_discard:
                times.append(_seconds(packet.pts, packet.time_base))
            if len(times) > limits.max_video_source_frames:
                raise InvalidRequest(
                    f"the video has more than {limits.max_video_source_frames} frames; send a shorter piece", item=label
                )
        if not times:
            raise InvalidRequest("the video has no frame", item=label)
        rate = stream.average_rate or Fraction(0)
    info = _info(_complete(times, rate), rate, width, height)
    if info.duration > limits.max_video_duration:
        raise InvalidRequest(
            f"the video lasts {info.duration:.1f} s, the limit is {limits.max_video_duration:g} s; shorten it",
            item=label,
        )
    return info, rate


def _seconds(pts: int | None, time_base: Fraction | None) -> Fraction | None:
    return None if pts is None or not time_base else pts * time_base


def _complete(times: Sequence[Fraction | None], rate: Fraction) -> list[Fraction]:
    """``times`` in order of presentation; evenly spaced where the stream (raw H.264, say) has none."""
    known = [t for t in times if t is not None]
    return sorted(known) if len(known) == len(times) else [i / (rate or _DEFAULT_FPS) for i in range(len(times))]


def _info(times: Sequence[Fraction], rate: Fraction, width: int, height: int) -> VideoInfo:
    span = times[-1] - times[0]
    if rate <= 0:
        rate = (len(times) - 1) / span if span > 0 else _DEFAULT_FPS
    stamps = np.array([float(time - times[0]) for time in times])
    return VideoInfo(len(times), float(rate), float(span + 1 / rate), stamps, width, height)


def _checked_indices(indices: Sequence[int], info: VideoInfo, limits: MediaLimits, label: str) -> list[int]:
    wanted = [int(i) for i in indices]
    if not wanted or wanted != sorted(wanted) or wanted[0] < 0 or wanted[-1] >= info.total_frames:
        raise InvalidRequest(
            f"sampling asks for frames outside the {info.total_frames} of the video, or for none", item=label
        )
    most = min(limits.max_video_frames, limits.max_video_pixels // max(1, info.width * info.height))
    if len(wanted) > most:
        raise InvalidRequest(
            f"sampling gives {len(wanted)} frames of {info.width} x {info.height} pixels, the limit is {most}; "
            "lower fps or num_frames",
            item=label,
        )
    return wanted


def _decode(
    data: bytes, info: VideoInfo, rate: Fraction, indices: list[int], limits: MediaLimits, label: str
) -> tuple[np.ndarray, list[Fraction]]:
    """Frames ``indices``, and the times of all frames seen until the last of them."""
    times: list[Fraction | None] = []
    frames: np.ndarray | None = None
    with open_container(data, "a video", label) as container:
        stream = _video_stream(container, label)
        stream.codec_context.thread_count = _DECODER_THREADS
        stream.thread_type = "AUTO"
        # For sizes that are told inside the stream only; FFmpeg counts padding, hence twice.
        stream.codec_context.options = {"max_pixels": str(2 * limits.max_image_pixels + (1 << 20))}
        for number, frame in enumerate(container.decode(stream)):
            times.append(_seconds(frame.pts, frame.time_base))
            # ``indices`` never falls, so equal ones stand side by side.
            places = range(*np.searchsorted(indices, [number, number + 1]))
            if places:
                picture = _picture(frame, info, label)
                if frames is None:
                    frames = np.empty((len(indices), *picture.shape), dtype=np.uint8)
                if picture.shape != frames.shape[1:]:
                    raise InvalidRequest("the frames of the video are not all of one size; encode it again", item=label)
                frames[places.start : places.stop] = picture
            if number == indices[-1] or number >= limits.max_video_source_frames:
                break
    return frames if frames is not None else np.empty((0, 0, 0, 3), dtype=np.uint8), _complete(times, rate)


def _picture(frame: VideoFrame, info: VideoInfo, label: str) -> np.ndarray:
    if frame.width * frame.height > max(1, info.width * info.height):
        raise InvalidRequest("the frames of the video are larger than its header says; encode it again", item=label)
    # The display matrix turns counter-clockwise, as rot90 does.
    return np.rot90(frame.to_ndarray(format="rgb24"), k=round(frame.rotation / 90))
