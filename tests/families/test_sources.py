# SPDX-License-Identifier: Apache-2.0
"""Files as people have them, through the workers: what each decodes to is what transformers is given."""

from __future__ import annotations

import base64
import http.server
import io
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from dynamo.llm.exceptions import InvalidArgument
from PIL import Image, ImageOps

from dynamo_epd.models import Media

from .cases import TAKES
from .conftest import Tiny, same
from .harness import Source
from .media_files import RATE, audio, image, url_of, video

PICTURES = [name for name, kinds in TAKES.items() if "image" in kinds]
QUESTION = ["Look: ", image(0), "What is it?"]
LISTEN = ["Listen: ", audio(0), "What is said?"]


def data_url(content: bytes) -> str:
    return f"data:application/octet-stream;base64,{base64.b64encode(content).decode()}"


def saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("size", [(1, 32), (32, 1)])
@pytest.mark.parametrize("tiny", PICTURES, indirect=True)
def test_the_thinnest_pictures(tiny: Tiny, size: tuple[int, int]) -> None:
    """Every family takes them as transformers does, or says which item it does not take."""
    thin = image(3, *size)
    text = tiny.text(QUESTION)
    try:
        expected = tiny.plain.answer(text, [thin])
    except ValueError as refused:
        with pytest.raises(InvalidArgument, match=r"image 1: .*refuses") as error:
            tiny.stack.ask(text, [thin])
        assert str(refused) in str(error.value)
        return
    same(tiny.stack.ask(text, [thin]), expected)


@pytest.mark.parametrize("tiny", ["mistral3"], indirect=True)
def test_a_picture_of_one_row(tiny: Tiny) -> None:
    """transformers fails for such a picture alone; beside another one it says what its row is."""
    small, other, salt = image(3, 20, 20), image(4), tiny.salt()
    alone = tiny.stack.ask(tiny.text(QUESTION), [small], salt=salt)
    assert alone.layout is not None and alone.layout.rows.tolist() == [1]
    parts = ["A ", small, "B ", other, "C"]
    answer = tiny.stack.ask(tiny.text(parts), [small, other], salt=salt)
    same(answer, tiny.plainly(parts))
    assert answer.digests[0] == alone.digests[0]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("BMP", {}), ("TIFF", {}), ("WEBP", {"lossless": True}), ("GIF", {}), ("PNG", {"compress_level": 0})],
    ids=["BMP", "TIFF", "WEBP", "GIF", "PNG"],
)
@pytest.mark.parametrize("tiny", ["qwen3_vl"], indirect=True)
def test_picture_formats(tiny: Tiny, kind: str, options: dict[str, Any]) -> None:
    content = saved(image(1).data, kind, **options)
    decoded = Media("image", Image.open(io.BytesIO(content)).convert("RGB"))
    answer = tiny.stack.ask(tiny.text(QUESTION), [Source("image", data_url(content))])
    same(answer, tiny.plain.answer(tiny.text(QUESTION), [decoded]))


def _layers(picture: Image.Image) -> dict[str, tuple[bytes, Image.Image]]:
    """Name -> a file of another kind of pixels, and what a person sees in it."""
    pixels, mask = np.asarray(picture), np.asarray(picture.convert("L")) > 127
    alpha = Image.fromarray(np.dstack([pixels, np.where(mask, 255, 0).astype(np.uint8)]))
    seen = Image.fromarray(np.where(mask[..., None], pixels, np.uint8(255)))
    grey, black = picture.convert("L"), Image.new("RGB", picture.size)
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    ink, colours, bits = picture.convert("CMYK"), picture.quantize(64), picture.convert("1")
    film = {"save_all": True, "append_images": [black]}
    return {
        "transparent": (saved(alpha, "PNG"), seen),
        "grey": (saved(grey, "PNG"), grey.convert("RGB")),
        "16 bits": (saved(deep, "PNG"), grey.convert("RGB")),
        "ink": (saved(ink, "TIFF"), ink.convert("RGB")),
        "palette": (saved(colours, "PNG"), colours.convert("RGB")),
        "black and white": (saved(bits, "PNG"), bits.convert("RGB")),
        "animated": (saved(picture, "WEBP", lossless=True, **film), picture),
        "animated palette": (saved(colours, "GIF", **film), colours.convert("RGB")),
    }


@pytest.mark.parametrize("kind", _layers(image(1).data))
@pytest.mark.parametrize("tiny", ["qwen3_vl"], indirect=True)
def test_kinds_of_pixels(tiny: Tiny, kind: str) -> None:
    content, seen = _layers(image(1).data)[kind]
    answer = tiny.stack.ask(tiny.text(QUESTION), [Source("image", data_url(content))])
    same(answer, tiny.plain.answer(tiny.text(QUESTION), [Media("image", seen)]))


@pytest.mark.parametrize("tiny", ["qwen3_vl"], indirect=True)
def test_a_turned_photograph_is_seen_upright(tiny: Tiny) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = saved(image(1).data, "JPEG", quality=95, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    answer = tiny.stack.ask(tiny.text(QUESTION), [Source("image", data_url(content))])
    same(answer, tiny.plain.answer(tiny.text(QUESTION), [Media("image", upright)]))
    lying = tiny.stack.ask(tiny.text(QUESTION), [Media("image", Image.open(io.BytesIO(content)))])
    assert lying.layout is not None and answer.layout is not None
    assert lying.top[0] != answer.top[0]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("FLAC", {}), ("WAV", {"subtype": "FLOAT"}), ("OGG", {}), ("MP3", {})],
    ids=["FLAC", "WAV", "OGG", "MP3"],
)
@pytest.mark.parametrize("tiny", ["qwen2_audio"], indirect=True)
def test_sound_formats(tiny: Tiny, kind: str, options: dict[str, Any]) -> None:
    """Twice each: the second time a clip used to fail."""
    buffer = io.BytesIO()
    soundfile.write(buffer, audio(1).data, RATE, format=kind, **options)
    samples, _ = soundfile.read(io.BytesIO(buffer.getvalue()), dtype="float32")
    expected = tiny.plain.answer(tiny.text(LISTEN), [Media("audio", samples, {"sampling_rate": RATE})])
    salt = tiny.salt()
    for turn in range(2):
        answer = tiny.stack.ask(tiny.text(LISTEN), [Source("audio", data_url(buffer.getvalue()))], salt=salt)
        same(answer, expected)
        assert answer.cached == turn * (answer.prompt_tokens - 1)


@pytest.mark.parametrize("tiny", ["qwen2_5_omni"], indirect=True)
def test_stereo_at_another_rate(tiny: Tiny) -> None:
    left, right = audio(1).data, audio(2).data
    stereo = np.stack([left, right], axis=1)
    buffer = io.BytesIO()
    soundfile.write(buffer, stereo, 22_050, format="WAV", subtype="FLOAT")
    mono = soxr.resample(stereo.mean(axis=1, dtype=np.float32), 22_050, RATE, quality="HQ")
    answer = tiny.stack.ask(tiny.text(LISTEN), [Source("audio", data_url(buffer.getvalue()))])
    same(answer, tiny.plain.answer(tiny.text(LISTEN), [Media("audio", mono, {"sampling_rate": RATE})]))


@contextmanager
def encoder(tiny: Tiny, *argv: str) -> Iterator[None]:
    """Requests go to an encode worker with other flags."""
    before = tiny.stack.encode
    tiny.stack.encode = tiny.stack.start("encode", *argv)
    try:
        yield
    finally:
        tiny.stack.encode = before


@contextmanager
def website(pages: Mapping[str, bytes]) -> Iterator[str]:
    """The address of a server of ``pages``."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = pages.get(self.path.partition("?")[0])
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("tiny", ["qwen2_5_omni"], indirect=True)
def test_media_of_every_modality_by_http(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same items as in ``data:`` URLs; a film is sampled as the request asks."""
    monkeypatch.setenv("DYN_MM_ALLOW_INTERNAL", "1")
    film, picture, sound = video(2, frames=12, fps=4.0), image(1), audio(3)
    parts = ["A ", film, "B ", picture, "C", sound, "D"]
    text, media, options = tiny.text(parts), [film, picture, sound], {"fps": 2.0}
    pages = {f"/{m.modality}": base64.b64decode(url_of(m).partition(",")[2]) for m in media}
    with website(pages) as address, encoder(tiny):
        links = [Source(m.modality, f"{address}/{m.modality}?signed=1") for m in media]
        answer = tiny.stack.ask(text, links, kwargs=options)
        with pytest.raises(InvalidArgument, match="video 1: .*404"):
            tiny.stack.ask(text, [Source("video", f"{address}/gone"), *links[1:]], kwargs=options)
    same(answer, tiny.plain.answer(text, media, {"videos_kwargs": {"fps": 2.0, "do_sample_frames": True}}))
    assert answer.digests == tiny.stack.ask(text, media, kwargs=options).digests


@pytest.mark.parametrize("tiny", ["qwen2_vl"], indirect=True)
def test_files_of_a_folder_that_is_allowed(tiny: Tiny, tmp_path: Path) -> None:
    """The same bytes are the same item by whatever URL they come; other folders stay closed."""
    (tmp_path / "open").mkdir()
    for folder in ("open", "."):
        (tmp_path / folder / "a.png").write_bytes(base64.b64decode(url_of(image(1)).partition(",")[2]))
        (tmp_path / folder / "a.mkv").write_bytes(base64.b64decode(url_of(video(2)).partition(",")[2]))
    text = tiny.text([image(1), "and ", video(2), "?"])
    with encoder(tiny, "--allowed-local-media-path", str(tmp_path / "open")):
        urls = [Source("image", f"file://{tmp_path}/open/a.png"), Source("video", str(tmp_path / "open" / "a.mkv"))]
        answer = tiny.stack.ask(text, urls)
        with pytest.raises(InvalidArgument, match="image 1: .*not a file that may be read"):
            tiny.stack.ask(text, [Source("image", f"file://{tmp_path}/a.png"), urls[1]])
    same(answer, tiny.plain.answer(text, [image(1), video(2)]))
    assert answer.digests == tiny.stack.ask(text, [image(1), video(2)]).digests


@pytest.mark.parametrize("tiny", ["qwen3_vl", "qwen2_audio"], indirect=True)
def test_what_cannot_be_decoded_is_refused_by_name(tiny: Tiny) -> None:
    kind = "audio" if tiny.name == "qwen2_audio" else "image"
    good = audio(1) if kind == "audio" else image(1)
    text = tiny.text(["A ", good, "B ", good])
    for content, message in (
        (b"hello there, this is text", "plain text"),
        (b"\xff\xd8\xff" + bytes(40), "damaged|JPEG"),
    ):
        with pytest.raises(InvalidArgument, match=f"{kind} 2: .*({message})"):
            tiny.stack.ask(text, [good, Source(kind, data_url(content))])
    same(tiny.stack.ask(text, [good, good]), tiny.plain.answer(text, [good, good]))
