# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageFile, features

from dynamo_epd.contract.errors import InvalidRequest
from dynamo_epd.media.image import decode_image, to_rgb
from dynamo_epd.media.limits import MediaLimits

LABEL = "image 1"


def picture(width: int = 8, height: int = 6) -> Image.Image:
    """Every pixel has a colour of its own."""
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([x * 30, y * 40, (x + y) * 10], axis=-1).astype(np.uint8))


def pixels(data: bytes, limits: MediaLimits | None = None) -> np.ndarray:
    image = decode_image(data, limits=limits or MediaLimits(), label=LABEL).image
    assert image.mode == "RGB"
    return np.asarray(image)


def refused(data: bytes, limits: MediaLimits | None = None) -> str:
    with pytest.raises(InvalidRequest) as caught:
        decode_image(data, limits=limits or MediaLimits(), label=LABEL)
    assert caught.value.item == LABEL
    return str(caught.value)


@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000"])
def test_lossless_formats(file_format: str, image_file) -> None:
    options = {"WEBP": {"lossless": True}}.get(file_format, {})
    data = image_file(picture(), file_format, **options)
    decoded = decode_image(data, limits=MediaLimits(), label=LABEL)
    assert decoded.source_format == file_format
    assert np.array_equal(np.asarray(decoded.image), np.asarray(picture()))


@pytest.mark.parametrize(
    "file_format",
    ["JPEG", pytest.param("AVIF", marks=pytest.mark.skipif(not features.check("avif"), reason="Pillow without AVIF"))],
)
def test_lossy_formats(file_format: str, image_file) -> None:
    data = image_file(Image.new("RGB", (16, 16), (200, 40, 90)), file_format, quality=95)
    assert np.abs(pixels(data).astype(int) - (200, 40, 90)).max() <= 6


@pytest.mark.parametrize("size", [(1, 32), (32, 1), (1, 1)])
def test_thin_images_keep_their_shape(size: tuple[int, int], image_file) -> None:
    assert pixels(image_file(picture(*size))).shape == (size[1], size[0], 3)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "HSV"])
def test_opaque_modes_are_converted_as_pillow_converts_them(mode: str) -> None:
    image = picture().convert(mode)
    assert np.array_equal(np.asarray(to_rgb(image)), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["LA", "La", "PA", "RGBA", "RGBa"])
def test_transparency_lies_over_white(mode: str) -> None:
    grey = mode in ("LA", "La")
    rgba = Image.new("RGBA", (3, 1), (100, 100, 100, 255) if grey else (100, 50, 0, 255))
    for x, alpha in enumerate((0, 128, 255)):
        rgba.putpixel((x, 0), (*rgba.getpixel((x, 0))[:3], alpha))
    image = {
        "LA": lambda: rgba.convert("LA"),
        "La": lambda: rgba.convert("LA").convert("La"),
        "PA": lambda: _with_palette_alpha(rgba),
    }.get(mode, lambda: rgba.convert(mode))()
    assert image.mode == mode
    colour = np.array((100, 100, 100) if grey else (100, 50, 0))
    expected = [255 + (colour - 255) * (a / 255) for a in (0, 128, 255)]
    assert np.abs(np.asarray(to_rgb(image))[0] - np.array(expected)).max() <= 2


def _with_palette_alpha(rgba: Image.Image) -> Image.Image:
    image = Image.new("PA", rgba.size)
    image.putpalette([100, 50, 0] * 256)
    image.putalpha(rgba.getchannel("A"))
    return image


def test_a_transparent_palette_entry_and_a_transparent_colour(image_file) -> None:
    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    assert pixels(image_file(palette, transparency=0)).tolist() == [[[255, 255, 255], [0, 0, 255]]]
    assert pixels(image_file(palette)).tolist() == [[[255, 0, 0], [0, 0, 255]]]
    keyed = palette.convert("RGB")
    assert pixels(image_file(keyed, transparency=(255, 0, 0))).tolist() == [[[255, 255, 255], [0, 0, 255]]]
    grey = Image.fromarray(np.array([[7, 200]], np.uint8))
    assert pixels(image_file(grey, transparency=7))[0, :, 0].tolist() == [255, 200]


def test_sixteen_bit_grey_is_scaled_not_clipped(image_file) -> None:
    values = np.array([[0, 128, 257, 32768, 65535]], np.uint16)
    image = Image.fromarray(values)
    assert image.mode == "I;16"
    for file_format in ("PNG", "TIFF"):
        assert pixels(image_file(image, file_format))[0, :, 1].tolist() == [0, 0, 1, 128, 255]
    assert np.asarray(to_rgb(Image.frombytes("I;16B", (5, 1), values.astype(">u2").tobytes())))[0, :, 0].tolist() == [
        0,
        0,
        1,
        128,
        255,
    ]
    assert np.asarray(to_rgb(Image.fromarray(values.astype(np.int32))))[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def test_sixteen_bit_colour(image_file) -> None:
    rows = b"".join(b"\0" + struct.pack(">6H", 0, 65535, 32768, 257, 65280, 255) for _ in range(2))
    chunks = [(b"IHDR", struct.pack(">2I5B", 2, 2, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )
    expected = np.array([[0, 255, 127.5], [1, 254, 1]])
    assert np.abs(pixels(data) - expected).max() <= 1


@pytest.mark.parametrize(
    "values, expected",
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 100.0, 255.0], [0, 100, 255]),
        ([0.0, 257.0, 65535.0], [0, 1, 255]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([0.0, 50_000.0, 100_000.0], [0, 128, 255]),
        ([0.0, 0.0, 0.0], [0, 0, 0]),
        ([-5.0, -5.0, -5.0], [0, 0, 0]),
    ],
)
def test_float_grey(values: list[float], expected: list[int], image_file) -> None:
    image = Image.fromarray(np.array([values], np.float32))
    assert image.mode == "F"
    assert pixels(image_file(image, "TIFF"))[0, :, 2].tolist() == expected


def test_integer_grey_beyond_sixteen_bits_is_stretched() -> None:
    image = Image.fromarray(np.array([[-100, 0, 100]], np.int32))
    assert np.asarray(to_rgb(image))[0, :, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_float_pixels_that_are_no_numbers(value: float, image_file) -> None:
    assert "NaN" in refused(image_file(Image.fromarray(np.array([[0.0, value]], np.float32)), "TIFF"))


def test_lab(image_file) -> None:
    srgb = Image.new("RGB", (4, 4), (200, 60, 30))
    lab = ImageCms.profileToProfile(
        srgb, ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), outputMode="LAB"
    )
    assert lab.mode == "LAB"
    assert np.abs(pixels(image_file(lab, "TIFF")).astype(int) - (200, 60, 30)).max() <= 3


def test_cmyk_jpeg(image_file) -> None:
    data = image_file(Image.new("RGB", (16, 16), (0, 128, 255)).convert("CMYK"), "JPEG", quality=95)
    assert np.abs(pixels(data).astype(int) - (0, 128, 255)).max() <= 6


@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "TIFF", "JPEG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation: int, file_format: str, image_file) -> None:
    """The eight ways to store one upright picture all decode to it."""
    upright = picture(4, 2).resize((64, 32), Image.Resampling.NEAREST)
    array = np.asarray(upright)
    stored = {
        1: array,
        2: array[:, ::-1],
        3: array[::-1, ::-1],
        4: array[::-1],
        5: array.transpose(1, 0, 2),
        6: np.rot90(array),
        7: array[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(array, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(file_format, {})
    data = image_file(Image.fromarray(np.ascontiguousarray(stored)), file_format, exif=exif, **options)
    assert np.abs(pixels(data).astype(int) - array).max() <= (6 if file_format == "JPEG" else 0)


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_an_unknown_orientation_counts_as_none(value: int, image_file) -> None:
    exif = Image.Exif()
    exif[0x0112] = value
    assert np.array_equal(pixels(image_file(picture(), exif=exif)), np.asarray(picture()))


def test_a_broken_exif_block_counts_as_none(image_file) -> None:
    data = image_file(picture(), "PNG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff broken")
    assert np.array_equal(pixels(data), np.asarray(picture()))


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_stands_for_its_first_frame(file_format: str, image_file) -> None:
    first, second = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    options = {"lossless": True} if file_format == "WEBP" else {}
    data = image_file(first, file_format, save_all=True, append_images=[second], **options)
    assert Image.open(BytesIO(data)).n_frames == 2
    assert pixels(data).reshape(-1, 3).tolist() == [[255, 0, 0]] * 64


@pytest.mark.parametrize(
    "data, found",
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html><body>login</body></html>", "an HTML page"),
        (b"\n\n  <HTML>", "an HTML page"),
        (b'<svg xmlns="x"></svg>', "an SVG drawing"),
        (b'<?xml version="1.0"?><a/>', "an XML or HTML document"),
        (b'{"error": "SECRET"}', "JSON text"),
        (b"Not found SECRET", "plain text"),
        (b"%PDF-1.7", "a PDF document"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "a PostScript document"),
        (b"version https://git-lfs.github.com/spec/v1", "a Git LFS pointer"),
        (b"\x00\x00\x00\x18ftypheic", "a HEIC image"),
        (b"\x01\x02\x03SECRET\xff", "of an unknown format"),
        (b"\x80\x02}q\x00.", "a Python pickle"),
    ],
)
def test_what_is_no_image_is_called_by_its_name(data: bytes, found: str) -> None:
    message = refused(data)
    assert found in message and "SECRET" not in message


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "TIFF", "BMP"])
def test_truncated_files(file_format: str, image_file) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    data = image_file(noise, file_format)
    for length in (len(data) // 2, len(data) // 10 * 9):
        message = refused(data[:length])
        assert "damaged" in message or "not an image" in message


def test_a_bomb_is_refused_by_its_header() -> None:
    """A valid PNG of 1 MB for 20,000 x 20,000 pixels would take 1.2 GB."""
    header = struct.pack(">2I5B", 20_000, 20_000, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + header
    data += struct.pack(">I", zlib.crc32(b"IHDR" + header)) + struct.pack(">I", 9999) + b"IDAT"
    message = refused(data, MediaLimits(max_image_pixels=100_000_000))
    assert "pixels" in message and "scale it down" in message


def test_the_pixel_limit_is_exact_and_ignores_orientation(image_file) -> None:
    data = image_file(picture(8, 6))
    assert pixels(data, MediaLimits(max_image_pixels=48)).shape == (6, 8, 3)
    assert "8 x 6 pixels, the limit is 47" in refused(data, MediaLimits(max_image_pixels=47))


def test_a_file_beyond_the_size_limit(image_file) -> None:
    assert "--max-file-size-mb" in refused(image_file(picture()), MediaLimits(max_file_size_bytes=10))


def test_no_state_of_pillow_is_changed_and_threads_do_not_mix(image_file) -> None:
    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
    images = [picture(8 + i, 6) for i in range(16)]
    files = [image_file(image) for image in images] * 4
    with ThreadPoolExecutor(4) as pool:
        decoded = list(pool.map(pixels, files))
    for image, result in zip(images * 4, decoded, strict=True):
        assert np.array_equal(result, np.asarray(image))
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
