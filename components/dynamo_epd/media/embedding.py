# SPDX-License-Identifier: Apache-2.0
"""Precomputed embeddings from safetensors bytes. Pickle-based files are never opened: they can run code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import safetensors
import safetensors.torch
import torch

from ..contract.errors import InvalidRequest
from ..contract.handoff import DTYPE_BYTES
from .content import not_decodable
from .limits import MediaLimits

EMBEDDING_KEY = "mm_embeddings"
"""Name of the embedding in a file of several tensors, as TensorRT-LLM and Dynamo call it."""

GRID_KEYS = ("grid_thw", "image_grid_thw", "video_grid_thw")
"""Names under which a file may hold its grid: an integer tensor ``[n, 3]`` or ``[3]``, or metadata with such JSON."""

_MAX_HEADER_BYTES = 1 << 20
_MAX_TENSORS = 64
_MAX_GRIDS = 4096

Grid = tuple[tuple[int, int, int], ...]


class _Header(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


@dataclass(frozen=True)
class PrecomputedEmbedding:
    """One item whose encoder ran somewhere else.

    Attributes:
        embedding: ``[rows, width]`` on the CPU, in the dtype of the file (one of ``DTYPE_BYTES``, floating point).
        auxiliary: the file's other tensors by name, without the grid.
        grid: ``(t, h, w)`` per image or video in patches, or None where the file tells none.
    """

    embedding: torch.Tensor
    auxiliary: Mapping[str, torch.Tensor]
    grid: Grid | None

    @property
    def payload(self) -> dict[str, Any]:
        """What the item is, for its content digest: all of the above, whatever the file looked like.

        The order of tensors, the name of a single one, a leading 1 and the place of the grid make no difference.
        """
        return {**self.auxiliary, EMBEDDING_KEY: self.embedding, GRID_KEYS[0]: self.grid}


def decode_embedding(data: bytes, *, width: int, limits: MediaLimits, label: str) -> PrecomputedEmbedding:
    """Read one ``.safetensors`` file: one tensor of any name, or ``mm_embeddings`` and auxiliary tensors.

    Args:
        width: columns that the model takes (``Family.embedding_width``).

    Raises:
        InvalidRequest: not a safetensors file, no or several candidates for the embedding, rank other than 2 (or 3 with
            a leading 1), another width, no rows, NaN or infinite values, a dtype that is not transferred, a bad grid.
    """
    limits.check_size(len(data), "the embedding file", label)
    tensors, metadata = _read(data, label)
    grid = _grid(tensors, metadata, label)
    auxiliary = {name: tensor for name, tensor in sorted(tensors.items()) if name not in GRID_KEYS}
    name = EMBEDDING_KEY if EMBEDDING_KEY in auxiliary or len(auxiliary) != 1 else next(iter(auxiliary))
    if name not in auxiliary:
        raise InvalidRequest(
            f"the embedding file holds {len(auxiliary)} tensors and none is named {EMBEDDING_KEY}; name it so, or keep "
            "one tensor only",
            item=label,
        )
    embedding = _checked(auxiliary.pop(name), width, label)
    for other in auxiliary.values():
        _check_finite(other, "an auxiliary tensor", label)
    return PrecomputedEmbedding(embedding, auxiliary, grid)


def _read(data: bytes, label: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    # Eight bytes of header length, the header (JSON), the tensors: https://huggingface.co/docs/safetensors
    header_size = int.from_bytes(data[:8], "little")
    if len(data) < 10 or data[8:9] != b"{":
        raise not_decodable(data, "an embedding in the safetensors format", label)
    if header_size > len(data) - 8:
        raise InvalidRequest(
            f"the embedding file has {len(data)} bytes and names a header of {header_size}; it is damaged or "
            "incomplete, save it again",
            item=label,
        )
    if header_size > _MAX_HEADER_BYTES:
        raise InvalidRequest(
            f"the embedding file has a header of {header_size} bytes, the limit is {_MAX_HEADER_BYTES}", item=label
        )
    try:
        tensors = safetensors.torch.load(data)
        metadata = msgspec.json.decode(data[8 : 8 + header_size], type=_Header).metadata
    except (safetensors.SafetensorError, msgspec.MsgspecError) as error:
        raise InvalidRequest(
            "the embedding file is not a valid safetensors file; it is damaged or incomplete, save it again", item=label
        ) from error
    except (KeyError, ValueError, RuntimeError) as error:
        raise InvalidRequest(
            "the embedding file has a tensor that has no elements or a dtype that is not supported", item=label
        ) from error
    if len(tensors) > _MAX_TENSORS:
        raise InvalidRequest(
            f"the embedding file holds {len(tensors)} tensors, the limit is {_MAX_TENSORS}", item=label
        )
    return tensors, metadata


def _checked(tensor: torch.Tensor, width: int, label: str) -> torch.Tensor:
    shape = list(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES or not tensor.is_floating_point():
        raise InvalidRequest(f"the embedding has dtype {dtype}; convert it to bfloat16, float16 or float32", item=label)
    if tensor.ndim == 3 and shape[0] == 1:
        tensor = tensor[0]
    if tensor.ndim != 2:
        raise InvalidRequest(
            f"the embedding has shape {shape}, it must be [rows, {width}] or [1, rows, {width}]; put each item into a "
            "file of its own",
            item=label,
        )
    if tensor.shape[0] == 0:
        raise InvalidRequest(f"the embedding has no rows (shape {shape})", item=label)
    if tensor.shape[1] != width:
        raise InvalidRequest(
            f"the embedding has shape {shape}, but the model takes rows of {width} values; compute it with "
            "this model's encoder",
            item=label,
        )
    _check_finite(tensor, "the embedding", label)
    return tensor


def _check_finite(tensor: torch.Tensor, what: str, label: str) -> None:
    if not tensor.is_floating_point() and not tensor.is_complex():
        return
    # Not every operation exists for the 8-bit types.
    values = tensor.to(torch.float32) if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
    if not torch.isfinite(values).all():
        raise InvalidRequest(f"{what} has values that are NaN or infinite; compute it again", item=label)


def _grid(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], label: str) -> Grid | None:
    found: dict[str, object] = {}
    for key in GRID_KEYS:
        if key in tensors:
            found[f"tensor {key}"] = tensors[key][: _MAX_GRIDS + 1].tolist() if tensors[key].ndim else None
        if key in metadata:
            try:
                found[f"metadata {key}"] = msgspec.json.decode(metadata[key])
            except (msgspec.DecodeError, RecursionError):
                found[f"metadata {key}"] = None
    grids = {_as_grid(value, name, label) for name, value in found.items()}
    if len(grids) > 1:
        raise InvalidRequest(f"the embedding file gives different grids ({', '.join(found)})", item=label)
    return next(iter(grids), None)


def _as_grid(value: object, name: str, label: str) -> Grid:
    rows = [value] if isinstance(value, list) and value and not isinstance(value[0], list) else value
    try:
        grid = msgspec.convert(rows, tuple[tuple[int, int, int], ...])
    except msgspec.ValidationError:
        grid = ()
    if not 0 < len(grid) <= _MAX_GRIDS or any(not 0 < n < 1 << 31 for row in grid for n in row):
        raise InvalidRequest(
            f"the embedding file's {name} must be positive integers [t, h, w] for each image or video", item=label
        )
    return grid
