# SPDX-License-Identifier: Apache-2.0
"""What bytes that no decoder wants look like, for an error message that helps."""

from __future__ import annotations

from ..contract.errors import InvalidRequest

_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"GIF8", "a GIF image"),
    (0, b"BM", "a BMP image"),
    (0, b"II*\x00", "a TIFF image"),
    (0, b"MM\x00*", "a TIFF image"),
    (8, b"WEBP", "a WebP image"),
    (8, b"WAVE", "a WAV file"),
    (8, b"AVI ", "an AVI video"),
    (4, b"ftypheic", "a HEIC image"),
    (4, b"ftypmif1", "a HEIF image"),
    (4, b"ftypavif", "an AVIF image"),
    (4, b"ftyp", "an MP4 file"),
    (0, b"\x1aE\xdf\xa3", "a Matroska or WebM file"),
    (0, b"OggS", "an Ogg file"),
    (0, b"fLaC", "a FLAC file"),
    (0, b"ID3", "an MP3 file"),
    (0, b"%PDF", "a PDF document"),
    (0, b"%!PS", "a PostScript document"),
    (0, b"8BPS", "a Photoshop document"),
    (0, b"\x00\x00\x01\x00", "an ICO icon"),
    (0, b"PK\x03\x04", "a ZIP archive or a PyTorch checkpoint"),
    (0, b"\x80\x02", "a Python pickle"),
    (0, b"\x1f\x8b", "gzip-compressed data"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"version https://git-lfs", "a Git LFS pointer"),
    (0, b"#EXTM3U", "a playlist"),
)


def describe_content(data: bytes) -> str:
    """A noun phrase for what ``data`` looks like (``"an HTML page"``); never any of its bytes."""
    for offset, magic, name in _MAGIC:
        if data[offset : offset + len(magic)] == magic:
            return name
    if data[8:10] == b'{"':
        return "a safetensors file"
    head = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if head.startswith(b"<"):
        if b"<svg" in head:
            return "an SVG drawing"
        return "an HTML page" if b"html" in head else "an XML or HTML document"
    if head.startswith((b"{", b"[")):
        return "JSON text"
    if head and all(byte in b"\t\r\n" or 32 <= byte < 127 for byte in head):
        return "plain text"
    return "of an unknown format"


def not_decodable(data: bytes, wanted: str, label: str) -> InvalidRequest:
    """The error for bytes that are not ``wanted`` (``"an image"``) or not in a format that is decoded."""
    found = describe_content(data)
    return InvalidRequest(f"the content is {found}, not {wanted}; check the URL or convert the file", item=label)


def damaged(data: bytes, error: Exception, label: str) -> InvalidRequest:
    """The error for bytes of a known format that cannot be decoded to the end."""
    reason = " ".join(str(error).split())[:120] or type(error).__name__
    return InvalidRequest(
        f"the content looks like {describe_content(data)} but cannot be decoded ({reason}); "
        "it is damaged or incomplete, send the file again",
        item=label,
    )
