# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import torch
from safetensors.torch import save

from dynamo_epd.contract.digest import item_digest
from dynamo_epd.contract.errors import InvalidRequest
from dynamo_epd.media.embedding import EMBEDDING_KEY, PrecomputedEmbedding, decode_embedding
from dynamo_epd.media.limits import MediaLimits

LABEL = "image 1"
WIDTH = 8


def tensor(rows: int = 5, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * width).reshape(rows, width).to(dtype)


def decode(data: bytes, width: int = WIDTH, limits: MediaLimits | None = None) -> PrecomputedEmbedding:
    return decode_embedding(data, width=width, limits=limits or MediaLimits(), label=LABEL)


def refused(data: bytes, **options: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        decode(data, **options)
    assert caught.value.item == LABEL
    return str(caught.value)


def digest(data: bytes) -> str:
    return item_digest(modality="image", payload=decode(data).payload, payload_kind="embedding", model="m")


def raw_file(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + body


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_the_dtype_is_kept_and_a_leading_1_is_dropped(dtype: torch.dtype) -> None:
    value = tensor(dtype=dtype)
    for stored in (value, value[None].contiguous()):
        found = decode(save({"anything": stored}))
        assert found.embedding.dtype == dtype and found.embedding.shape == (5, WIDTH)
        assert torch.equal(found.embedding.view(torch.uint8), value.view(torch.uint8))
        assert found.auxiliary == {} and found.grid is None


def test_auxiliary_tensors() -> None:
    offsets = torch.tensor([0, 4], dtype=torch.int64)
    found = decode(save({"special_token_offsets": offsets, EMBEDDING_KEY: tensor(), "scale": torch.tensor(2.0)}))
    assert torch.equal(found.embedding, tensor())
    assert list(found.auxiliary) == ["scale", "special_token_offsets"]
    assert torch.equal(found.auxiliary["special_token_offsets"], offsets)


@pytest.mark.parametrize("key", ["grid_thw", "image_grid_thw", "video_grid_thw"])
def test_the_grid_from_a_tensor_or_from_metadata(key: str) -> None:
    for stored in ([[1, 4, 6], [2, 2, 2]], [1, 4, 6]):
        expected = tuple(map(tuple, stored if isinstance(stored[0], list) else [stored]))
        in_tensor = decode(save({EMBEDDING_KEY: tensor(), key: torch.tensor(stored)}))
        in_metadata = decode(save({"x": tensor()}, metadata={key: json.dumps(stored), "format": "pt"}))
        assert in_tensor.grid == in_metadata.grid == expected
        assert in_tensor.auxiliary == {}
    assert decode(save({"x": tensor(), key: torch.tensor([1, 4, 6])})).grid == ((1, 4, 6),)


@pytest.mark.parametrize(
    "grid",
    [[0, 4, 6], [1, 4], [[1, 4, 6], [1, 4]], [], [[]], [1.5, 4, 6], "[1,2,3]", {"t": 1}, [True, 1, 1], [1, 2, 1 << 40]],
)
def test_a_bad_grid(grid: Any) -> None:
    assert "grid_thw must be positive" in refused(save({"x": tensor()}, metadata={"grid_thw": json.dumps(grid)}))


def test_other_bad_grids() -> None:
    for text in ("", "nonsense", "[" * 100_000):
        assert "grid_thw must be positive" in refused(save({"x": tensor()}, metadata={"grid_thw": text}))
    for bad in (torch.tensor(3), torch.tensor([1.5, 2, 3]), torch.zeros(0, 3, dtype=torch.int64), torch.ones(1, 1, 3)):
        assert "grid_thw must be positive" in refused(save({"x": tensor(), "grid_thw": bad}))
    both = {"image_grid_thw": torch.tensor([1, 2, 3])}
    assert "different grids" in refused(save({"x": tensor(), **both}, metadata={"grid_thw": "[1, 2, 4]"}))
    assert decode(save({"x": tensor(), **both}, metadata={"grid_thw": "[1, 2, 3]"})).grid == ((1, 2, 3),)


def test_the_digest_sees_the_content_and_nothing_else() -> None:
    same = [
        save({"a": tensor()}),
        save({"b": tensor()}, metadata={"format": "pt", "note": "x"}),
        save({EMBEDDING_KEY: tensor()[None].contiguous()}),
    ]
    assert len({digest(data) for data in same}) == 1
    grids = [
        save({"a": tensor(), "image_grid_thw": torch.tensor([1, 5, 1])}),
        save({"a": tensor()}, {"grid_thw": "[[1,5,1]]"}),
    ]
    assert len({digest(data) for data in grids}) == 1
    nudged = tensor()
    nudged[4, 7] += 1e-6
    other = [
        *(same[0], grids[0]),
        save({"a": nudged}),
        save({"a": tensor(dtype=torch.float16)}),
        save({"a": tensor(dtype=torch.bfloat16)}),
        save({"a": tensor(), "grid_thw": torch.tensor([1, 1, 5])}),
        save({EMBEDDING_KEY: tensor(), "x": torch.tensor([1])}),
        save({EMBEDDING_KEY: tensor(), "y": torch.tensor([1])}),
        save({EMBEDDING_KEY: tensor(), "x": torch.tensor([2])}),
        save({EMBEDDING_KEY: tensor(), "x": torch.tensor([1], dtype=torch.int32)}),
    ]
    assert len({digest(data) for data in other}) == len(other)


@pytest.mark.parametrize(
    "stored, reason",
    [
        (torch.ones(4, WIDTH + 1), "shape [4, 9]"),
        (torch.ones(WIDTH), "shape [8]"),
        (torch.ones(2, 4, WIDTH), "shape [2, 4, 8]"),
        (torch.ones(1, 1, 4, WIDTH), "shape [1, 1, 4, 8]"),
        (torch.ones(0, WIDTH), "no rows"),
        (torch.ones(1, 0, WIDTH), "no rows"),
        (torch.ones(4, 0), "shape [4, 0]"),
        (torch.tensor(1.0), "shape []"),
        (torch.full((4, WIDTH), float("nan")), "NaN"),
        (torch.full((4, WIDTH), float("-inf")).half(), "NaN"),
        (torch.full((4, WIDTH), float("nan")).to(torch.float8_e4m3fn), "NaN"),
        (torch.full((4, WIDTH), float("nan")).bfloat16(), "NaN"),
        (torch.ones(4, WIDTH, dtype=torch.float64), "dtype float64"),
        (torch.ones(4, WIDTH, dtype=torch.int64), "dtype int64"),
        (torch.ones(4, WIDTH, dtype=torch.uint8), "dtype uint8"),
        (torch.ones(4, WIDTH, dtype=torch.complex64), "dtype complex64"),
    ],
)
def test_embeddings_that_do_not_fit(stored: torch.Tensor, reason: str) -> None:
    assert reason in refused(save({"x": stored}))
    assert reason in refused(save({EMBEDDING_KEY: stored, "other": torch.ones(1)}))


def test_which_tensor_is_the_embedding_must_be_clear() -> None:
    assert EMBEDDING_KEY in refused(save({"a": tensor(), "b": tensor()}))
    assert "0 tensors" in refused(save({"grid_thw": torch.tensor([1, 2, 3])}))
    assert "0 tensors" in refused(save({}))


def test_an_auxiliary_tensor_that_is_no_number() -> None:
    assert "auxiliary" in refused(save({EMBEDDING_KEY: tensor(), "x": torch.tensor([float("nan")])}))


def test_header_bombs() -> None:
    assert "header of" in refused(raw_file(b"{" + b" " * (2 << 20) + b"}"))
    for size in (1 << 60, 1 << 63, (1 << 64) - 1, 103):
        message = refused(struct.pack("<Q", size) + b"{}" + b"x" * 100)
        assert f"a header of {size}; it is damaged or incomplete" in message and "\n" not in message
    assert "damaged or incomplete" in refused(struct.pack("<Q", 0) + b"{}" + bytes(32))
    assert "65 tensors" in refused(save({f"t{i}": torch.ones(1) for i in range(65)}))
    for header in (
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"x":{"dtype":"F32","shape":[4294967296,4294967296,8],"data_offsets":[0,32]}}',
        b'{"x":{"dtype":"F32","shape":[1,8],"data_offsets":[0,1152921504606846976]}}',
        b'{"x":{"dtype":"F32","shape":[1,8],"data_offsets":[16,48]}}',
        b'{"x":{"dtype":"F32","shape":[2,8],"data_offsets":[0,32]}}',
        b'{"x":{"dtype":"F32","shape":[1,8],"data_offsets":[0,32]},"y":{"dtype":"F32","shape":[1,4],"data_offsets":[8,24]}}',
        b'{"x":{"dtype":"F32","shape":[1,8],"data_offsets":[32,0]}}',
        b'{"x":{"dtype":"F32","shape":[1.5,8],"data_offsets":[0,32]}}',
        b'{"x":{"dtype":"F32","shape":[18446744073709551616,8],"data_offsets":[0,32]}}',
        b'{"x":{"dtype":"OOPS","shape":[1,8],"data_offsets":[0,32]}}',
        b'{"x":{"dtype":"F32","shape":[-1,8],"data_offsets":[0,32]}}',
        b'{"__metadata__":{"grid_thw":[1,2,3]}}',
        b'{"x":',
        b"{}",
    ):
        message = refused(raw_file(header, bytes(32)))
        assert "embedding" in message and len(message) < 300 and "\n" not in message


@pytest.mark.parametrize(
    "data, found",
    [
        (b"", "empty"),
        (b"<html></html>", "an HTML page"),
        (b"\x80\x02}q\x00.", "a Python pickle"),
        (b"PK\x03\x04aaaaaaaaaa", "ZIP"),
    ],
)
def test_what_is_no_safetensors_file(data: bytes, found: str) -> None:
    assert found in refused(data)


def test_the_size_limit() -> None:
    assert "--max-file-size-mb" in refused(save({"x": tensor()}), limits=MediaLimits(max_file_size_bytes=100))
