# SPDX-License-Identifier: Apache-2.0
"""Image bytes -> an 8-bit RGB picture as a person sees it.

- The EXIF orientation is applied.
- An animated or many-page file stands for its first frame.
- What is transparent is laid over white. Most transformers processors call ``convert("RGB")``, which drops alpha and so
  brings out colours that no viewer shows; an opaque picture comes out the same both ways.
- 16-bit grey is scaled by 255 / 65535, where ``convert`` would clip it. Grey of a mode without a range of its own: see
  ``to_rgb``. Colour profiles are ignored, as the processors ignore them.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError

from ..contract.errors import InvalidRequest
from .content import damaged, not_decodable
from .limits import MediaLimits

Image.init()
FORMATS = tuple(
    name for name in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM") if name in Image.OPEN
)
"""Formats that are tried, where Pillow has them; others run programs (EPS) or take any bytes for an image (TGA)."""

ALPHA_BACKGROUND = (255, 255, 255)
"""What shows through where a picture is transparent; an ingredient of the content digest."""

_ORIENTATION_TAG = 0x0112
# EXIF 2.3, tag 0x0112: how the stored picture must be moved to stand upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class DecodedImage:
    """One picture.

    Attributes:
        image: mode ``RGB``, in memory, upright.
        source_format: Pillow's name of the file format.
        source_mode: Pillow's name of the pixel layout in the file.
    """

    image: Image.Image
    source_format: str
    source_mode: str


def decode_image(data: bytes, *, limits: MediaLimits, label: str) -> DecodedImage:
    """Decode one image file. Thread-safe; no state of Pillow is changed.

    Raises:
        InvalidRequest: not an image in one of ``FORMATS``, damaged, or of more pixels than ``limits.max_image_pixels``
            (read from the header, before memory for the pixels is taken).
    """
    limits.check_size(len(data), "the image", label)
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            _check_pixels(image.width, image.height, limits, label)
            source_mode = image.mode
            image.load()
            # Some formats hold their metadata behind the pixels, and TIFF turns the picture itself and drops the tag.
            upright = _UPRIGHT.get(_orientation(image))
            rgb = to_rgb(image, label=label)
            rgb = rgb.transpose(upright) if upright is not None else rgb
            return DecodedImage(rgb, image.format or "", source_mode)
    except InvalidRequest:
        raise
    except UnidentifiedImageError as error:
        raise not_decodable(data, f"an image that can be decoded ({', '.join(FORMATS)})", label) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidRequest("the image has more pixels than Pillow decodes; scale it down", item=label) from error
    except Exception as error:  # Pillow's decoders raise nearly every built-in exception on damaged files
        raise damaged(data, error, label) from error


def to_rgb(image: Image.Image, *, label: str = "image") -> Image.Image:
    """A new ``RGB`` image from one of any Pillow mode.

    Grey of 32 bits: ``I`` is 16-bit grey in a wider type; ``F`` reaches to the first of 1, 255 and 65535 that holds its
    largest value. Values outside (negative, larger) stretch the scale from their minimum to their maximum.

    Raises:
        InvalidRequest: a pixel of mode ``F`` is NaN or infinite.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        rgb = Image.fromarray(_grey8(np.asarray(image), label)).convert("RGB")
    elif image.mode == "LAB":
        rgb = _lab_to_rgb(image)
    elif image.has_transparency_data:
        # Premultiplied modes know only the way to their plain counterpart.
        plain = image.convert("LA") if image.mode == "La" else image
        rgba = plain.convert("RGBA")
        rgb = Image.new("RGB", image.size, ALPHA_BACKGROUND)
        rgb.paste(rgba, mask=rgba.getchannel("A"))
    else:
        rgb = image.convert("RGB")
    rgb.info.clear()
    return rgb


def _check_pixels(width: int, height: int, limits: MediaLimits, label: str) -> None:
    if width * height > limits.max_image_pixels:
        raise InvalidRequest(
            f"the image has {width} x {height} pixels, the limit is {limits.max_image_pixels} in all; scale it down",
            item=label,
        )


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:  # a broken EXIF block says nothing about the pixels: as in browsers, it counts as none
        return 1


def _grey8(values: np.ndarray, label: str) -> np.ndarray:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise InvalidRequest("the image has pixels that are NaN or infinite; convert it to 8 bits", item=label)
    low, high = float(values.min()), float(values.max())
    ranges = (1.0, 255.0, 65535.0) if values.dtype.kind == "f" else (65535.0,)
    top = next((r for r in ranges if low >= 0 and high <= r), None)
    if top is not None:
        low, high = 0.0, top
    return np.rint((values.astype(np.float64) - low) * 255.0 / (high - low or 1.0)).astype(np.uint8)


def _lab_to_rgb(image: Image.Image) -> Image.Image:
    transform = ImageCms.buildTransform(ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), "LAB", "RGB")
    rgb = ImageCms.applyTransform(image, transform)
    if rgb is None:
        raise ValueError("no LAB conversion")
    return rgb
