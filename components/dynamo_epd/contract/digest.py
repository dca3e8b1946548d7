# SPDX-License-Identifier: Apache-2.0
"""Content digests: what a media item *is*, in 32 bytes.

BLAKE3 over a canonical serialisation. Every value is written as a one-byte type tag, an unsigned 64-bit little-endian
length, and that many bytes (or, for containers, that many values), so no two different values have the same
serialisation. Mappings are written in the order of their serialised keys. The first value names the purpose and the
version of the scheme: a change of anything below must change ``SCHEME``.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from blake3 import blake3

from .errors import InvalidMetadata

SCHEME = "dynamo-epd/content/1"
MAX_DEPTH = 64

Write = Callable[[Any], object]
PayloadKind = Literal["source", "decoded", "embedding"]

_EXIF_ORIENTATION = 0x0112


def item_digest(
    *,
    modality: str,
    payload: object,
    payload_kind: PayloadKind = "source",
    model: str,
    encoder: Mapping[str, Any] | str = "",
    dtype: str = "",
    lora: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    positions: Mapping[str, Any] | None = None,
    alpha_background: Sequence[int] | str | None = None,
    pruning: Mapping[str, Any] | None = None,
    use_audio_in_video: bool = False,
    joint_mode: str | None = None,
    uuid: str | None = None,
) -> str:
    """The digest of one media item: 64 lower-case hex digits.

    It covers all that the item's KV depends on and that the prompt's token ids do not say. Arguments that a caller
    leaves out are written as their defaults, so leaving out and giving the default is the same.

    Args:
        modality: ``image``, ``video`` or ``audio``.
        payload: the source bytes, or the decoded array, tensor or image, or the embedding (or a mapping of tensors).
        payload_kind: which of the three it is. Bytes are ``source``, and only they are.
        model: identity of the model (digest of configuration and weights, never a path).
        encoder: identity of the encoder and its revision, where ``model`` does not cover it.
        dtype: the dtype that the encoder computes in.
        lora: adapter on the encoder, with its revision.
        options: the resolved processor options that touch this modality, defaults filled in.
        positions: what moves positions or sampling without moving tokens: grid, image sizes, tile counts, frame
            indices, frames per second, timestamps, seconds per grid, sampling rate.
        alpha_background: what a transparent image is flattened onto.
        pruning: rate and seed of token pruning.
        use_audio_in_video: whether the audio was taken from the video; on both items of such a pair.
        joint_mode: the mode where the embedding depends on the other items of the request.
        uuid: the caller's id; it is mixed in and never stands for the content.

    Raises:
        InvalidMetadata: a value of a type that has no canonical form.
    """
    if isinstance(payload, (bytes, bytearray, memoryview)) != (payload_kind == "source"):
        raise InvalidMetadata("payload", f"of type {type(payload).__name__} cannot be of kind {payload_kind!r}")
    ingredients = {
        "modality": modality,
        "payload_kind": payload_kind,
        "payload": payload,
        "model": model,
        "encoder": encoder,
        "dtype": dtype,
        "lora": lora,
        "options": options or {},
        "positions": positions or {},
        "alpha_background": alpha_background,
        "pruning": pruning,
        "use_audio_in_video": use_audio_in_video,
        "joint_mode": joint_mode,
        "uuid": uuid,
    }
    return _digest("item", ingredients).hex()


def value_digest(value: object) -> str:
    """The digest (64 hex digits) of any value that has a canonical form; shares no value with ``item_digest``."""
    return _digest("value", value).hex()


def prompt_digest(token_ids: Sequence[int] | np.ndarray) -> str:
    """The digest (64 hex digits) of a prompt's ids, as in ``Handoff.prompt_digest``."""
    return _digest("prompt", np.asarray(token_ids, dtype="<i4").tobytes()).hex()


def bind_interleaving(digest: bytes, rank: int, pattern: Sequence[Sequence[tuple[int, int]]]) -> bytes:
    """The 32 bytes that stand for an item whose tokens alternate with another's.

    Args:
        digest: the item's own digest.
        rank: its index in ``pattern``.
        pattern: per item of the group its runs ``(start, length)``, counted from the group's first token.
    """
    return _digest("interleaved", [digest, rank, pattern])


def content_salt(digests: Sequence[str], cache_salt: str | None) -> str:
    """A cache salt that only a request with the same items, in the same order, under the same caller's salt has."""
    return "epd-content-" + _digest("salt", [list(digests), cache_salt]).hex()


def _digest(purpose: str, value: object) -> bytes:
    hasher = blake3()
    write_value(hasher.update, [SCHEME, purpose], 0)
    write_value(hasher.update, value, 0)
    return hasher.digest()


def write_value(write: Write, value: object, depth: int = 0) -> None:
    """Write the canonical serialisation of ``value``.

    ``None``, bool, int, float, str, bytes, list and tuple (the same), mapping, numpy scalars (as Python's), numpy
    arrays, torch tensors and PIL images. Neither torch nor PIL is imported: their objects are known by what they offer.
    """
    if depth > MAX_DEPTH:
        raise InvalidMetadata("digest", f"the value is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, np.generic):
        value = value.item()
    writer = _WRITERS.get(type(value))
    if writer is None:
        writer = next((w for kind, w in _BY_BASE if isinstance(value, kind)), None)
    if writer is None:
        writer = next((w for looks, w in _BY_SHAPE if all(hasattr(value, name) for name in looks)), None)
    if writer is None:
        raise InvalidMetadata("digest", f"a value of type {type(value).__name__} has no canonical form")
    writer(write, value, depth)


def _tagged(write: Write, tag: bytes, data: Any, length: int) -> None:
    write(struct.pack("<cQ", tag, length))
    write(data)


def _none(write: Write, value: None, depth: int) -> None:
    _tagged(write, b"n", b"", 0)


def _bool(write: Write, value: bool, depth: int) -> None:
    _tagged(write, b"b", b"\1" if value else b"\0", 1)


def _int(write: Write, value: int, depth: int) -> None:
    data = int(value).to_bytes(value.bit_length() // 8 + 1, "big", signed=True)
    _tagged(write, b"i", data, len(data))


def _float(write: Write, value: float, depth: int) -> None:
    # One NaN: its payload and sign bits differ between machines and mean nothing.
    _tagged(write, b"f", struct.pack(">d", value if value == value else float("nan")), 8)


def _str(write: Write, value: str, depth: int) -> None:
    data = value.encode("utf-8", "surrogatepass")
    _tagged(write, b"s", data, len(data))


def _bytes(write: Write, value: bytes | bytearray | memoryview, depth: int) -> None:
    view = memoryview(value)
    data = view.cast("B") if view.c_contiguous and view.nbytes else view.tobytes()
    _tagged(write, b"y", data, view.nbytes)


def _list(write: Write, value: Sequence[Any], depth: int) -> None:
    write(struct.pack("<cQ", b"l", len(value)))
    for entry in value:
        write_value(write, entry, depth + 1)


def _mapping(write: Write, value: Mapping[Any, Any], depth: int) -> None:
    entries = []
    for key, entry in value.items():
        parts: list[bytes] = []
        write_value(parts.append, key, depth + 1)
        entries.append((b"".join(parts), entry))
    entries.sort(key=lambda pair: pair[0])
    write(struct.pack("<cQ", b"m", len(entries)))
    for key_bytes, entry in entries:
        write(key_bytes)
        write_value(write, entry, depth + 1)


def _ndarray(write: Write, value: np.ndarray, depth: int) -> None:
    if value.dtype.kind not in "biufcSU":
        raise InvalidMetadata("digest", f"an array of dtype {value.dtype} has no canonical form")
    write(struct.pack("<cQ", b"a", 3))
    _str(write, value.dtype.str, depth)
    _list(write, value.shape, depth)
    _bytes(write, _raw(value), depth)


def _tensor(write: Write, value: Any, depth: int) -> None:
    torch = sys.modules[type(value.dtype).__module__]
    if str(value.layout) != "torch.strided" or value.is_quantized or value.device.type == "meta":
        raise InvalidMetadata("digest", f"a {value.layout} tensor on {value.device} has no canonical form")
    dense = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    write(struct.pack("<cQ", b"t", 3))
    _str(write, str(value.dtype).removeprefix("torch."), depth)
    _list(write, tuple(value.shape), depth)
    _bytes(write, _raw(dense.reshape(-1).view(torch.uint8).numpy()), depth)


def _image(write: Write, value: Any, depth: int) -> None:
    # Loads a lazily opened file, which is what fills in the palette.
    pixels = value.tobytes()
    palette = value.getpalette("RGBA") if value.mode in ("P", "PA") else None
    write(struct.pack("<cQ", b"p", 6))
    _str(write, value.mode, depth)
    _list(write, value.size, depth)
    write_value(write, None if palette is None else bytes(palette).ljust(1024, b"\0"), depth + 1)
    write_value(write, value.info.get("transparency"), depth + 1)
    write_value(write, value.getexif().get(_EXIF_ORIENTATION, 1), depth + 1)
    _bytes(write, pixels, depth)


def _raw(array: np.ndarray) -> memoryview | bytes:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data if flat.nbytes else b""


_WRITERS: dict[type, Callable[..., None]] = {
    type(None): _none,
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
    bytes: _bytes,
    bytearray: _bytes,
    memoryview: _bytes,
    list: _list,
    tuple: _list,
    dict: _mapping,
    np.ndarray: _ndarray,
}
_BY_BASE: tuple[tuple[type, Callable[..., None]], ...] = (
    (bool, _bool),
    (int, _int),
    (float, _float),
    (str, _str),
    (list, _list),
    (tuple, _list),
    (Mapping, _mapping),
    (np.ndarray, _ndarray),
)
_BY_SHAPE: tuple[tuple[tuple[str, ...], Callable[..., None]], ...] = (
    (("dtype", "layout", "detach", "untyped_storage"), _tensor),
    (("mode", "size", "getpalette", "getexif", "tobytes"), _image),
)
