# SPDX-License-Identifier: Apache-2.0
"""What a digest must tell apart, what it must not, and values that must never change within a scheme version."""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dynamo_epd.contract.digest import (
    SCHEME,
    bind_interleaving,
    content_salt,
    item_digest,
    prompt_digest,
    value_digest,
)
from dynamo_epd.contract.errors import InvalidMetadata


def image(**changes: Any) -> str:
    """The digest of one image, with some ingredients changed."""
    base: dict[str, Any] = {
        "modality": "image",
        "payload": b"some bytes",
        "model": "m1",
        "encoder": {"revision": "r1"},
        "dtype": "bfloat16",
        "options": {"min_pixels": 3136, "max_pixels": 1003520},
        "positions": {"grid_thw": [1, 34, 46]},
    }
    return item_digest(**{**base, **changes})


def decoded(payload: object, **changes: Any) -> str:
    return image(payload=payload, payload_kind="decoded", **changes)


def embedding(payload: object, **changes: Any) -> str:
    return image(payload=payload, payload_kind="embedding", **changes)


def palette_image(second: tuple[int, int, int]) -> Image.Image:
    picture = Image.new("P", (2, 2))
    picture.putpalette([0, 0, 0, *second])
    picture.putdata([0, 1, 1, 0])
    return picture


def png(picture: Image.Image, **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, "PNG", **options)
    return out.getvalue()


def oriented(picture: Image.Image, orientation: int) -> Image.Image:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return Image.open(io.BytesIO(png(picture, exif=exif)))


PIXELS = bytes(range(256)) * (28 * 56 * 3 // 256) + bytes(28 * 56 * 3 % 256)
FRAMES = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
WAVE = np.linspace(-1, 1, 100, dtype=np.float32)
BF16 = torch.arange(32, dtype=torch.float32).reshape(4, 8).to(torch.bfloat16)
RGBA = Image.frombytes("RGBA", (2, 2), bytes(range(16)))
GRAY = Image.frombytes("L", (2, 3), bytes(range(6)))

APART: dict[str, list[str]] = {
    "rgb 28x56 and 56x28": [
        decoded(Image.frombytes("RGB", (28, 56), PIXELS)),
        decoded(Image.frombytes("RGB", (56, 28), PIXELS)),
    ],
    "array shapes": [decoded(np.zeros((3, 8, 8), np.uint8)), decoded(np.zeros((1, 3, 8, 8), np.uint8))],
    "array dtypes of equal bytes": [decoded(np.zeros(8, np.uint8)), decoded(np.zeros(8, np.int8))],
    "byte order": [decoded(np.arange(4, dtype="<u2")), decoded(np.arange(4, dtype="<u2").view(">u2"))],
    "image modes": [
        decoded(Image.new("L", (3, 4))),
        decoded(Image.new("P", (3, 4))),
        decoded(Image.new("RGB", (3, 4))),
    ],
    "palettes": [decoded(palette_image((255, 0, 0))), decoded(palette_image((0, 0, 255)))],
    "orientation": [decoded(oriented(GRAY, 1)), decoded(oriented(GRAY, 6))],
    "alpha background": [decoded(RGBA, alpha_background=bg) for bg in (None, (255, 255, 255), (0, 0, 0))],
    "fps": [
        item_digest(modality="video", payload=FRAMES, payload_kind="decoded", model="m", positions={"fps": fps})
        for fps in (1.0, 2.0)
    ],
    "frame indices": [image(positions={"frame_indices": indices}) for indices in ([0, 2], [0, 3])],
    "sampling rate": [
        item_digest(
            modality="audio", payload=WAVE, payload_kind="decoded", model="m", positions={"sampling_rate": rate}
        )
        for rate in (16000, 24000)
    ],
    "audio of the video": [image(modality="video", use_audio_in_video=flag) for flag in (False, True)],
    "modality": [image(modality=modality) for modality in ("image", "video", "audio")],
    "grids": [embedding(BF16, positions={"grid_thw": grid}) for grid in ([1, 17, 23], [1, 23, 17])],
    "kinds of equal tensors": [decoded(BF16), embedding(BF16)],
    "tensor dtypes of equal bytes": [
        embedding(BF16),
        embedding(BF16.view(torch.float16)),
        embedding(BF16.view(torch.int16)),
    ],
    "float8 kinds": [
        embedding(torch.zeros(4, 8).to(dtype)) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
    ],
    "tensor shapes": [embedding(BF16), embedding(BF16.reshape(8, 4)), embedding(BF16.T)],
    "model": [image(model="m1"), image(model="m2")],
    "encoder revision": [image(), image(encoder={"revision": "r2"}), image(encoder="r1")],
    "dtype": [image(dtype="bfloat16"), image(dtype="float16")],
    "lora": [
        image(lora=lora)
        for lora in (
            None,
            {"name": "a", "revision": "1"},
            {"name": "a", "revision": "2"},
            {"name": "b", "revision": "1"},
        )
    ],
    "options": [image(), image(options={"min_pixels": 3136}), image(options={"min_pixels": 3136, "max_pixels": 1})],
    "pruning": [
        image(pruning=p) for p in (None, {"rate": 0.5, "seed": 0}, {"rate": 0.5, "seed": 1}, {"rate": 0.7, "seed": 0})
    ],
    "joint mode": [image(joint_mode=mode) for mode in (None, "speech", "vision_speech")],
    "uuids": [image(uuid=uuid) for uuid in (None, "", "a", "b")],
    "one uuid, two contents": [image(uuid="a"), image(uuid="a", payload=b"other bytes")],
    # No address is an ingredient: what is fetched from it is.
    "contents of /A.jpg and /a.jpg": [image(payload=b"of A"), image(payload=b"of a")],
    "content at one address changed": [image(payload=b"before"), image(payload=b"after")],
    "text that moves between fields": [image(model="ab", dtype="c"), image(model="a", dtype="bc")],
    "content and uuid": [image(payload=b"x", uuid="y"), image(payload=b"xy", uuid="")],
    "concatenations": [value_digest(v) for v in (["ab", "c"], ["a", "bc"], ["abc"], "abc", [b"ab", b"c"])],
    "nesting": [
        value_digest(v) for v in ([[1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5]], [1, 2, 3, 4, 5], [[1, 2, 3, 4, 5]])
    ],
    "types": [
        value_digest(v)
        for v in (
            None,
            False,
            0,
            0.0,
            "",
            b"",
            [],
            {},
            "None",
            "0",
            [None],
            [[]],
            {"": None},
            np.zeros(0),
            torch.zeros(0),
        )
    ],
    "numbers": [value_digest(v) for v in (1, -1, 127, 128, 255, 256, -128, -129, 2**64, 1.0, True, "1")],
    "mappings": [value_digest(v) for v in ({"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": 1}, ["a", 1, "b", 2], [["a", 1]])],
    "purposes": [
        value_digest(["11" * 32, None]),
        content_salt(["11" * 32], None).removeprefix("epd-content-"),
    ],
    "salts": [
        content_salt(digests, salt)
        for digests in (["1" * 64, "2" * 64], ["2" * 64, "1" * 64], ["1" * 64])
        for salt in (None, "", "x")
    ],
    "patterns": [
        bind_interleaving(bytes(32), rank, pattern).hex()
        for rank in (0, 1)
        for pattern in ([[(0, 1), (2, 1)], [(1, 1)]], [[(0, 1), (3, 1)], [(1, 2)]])
    ],
    "prompts": [prompt_digest(ids) for ids in ([], [1], [1, 2], [2, 1], [1, 2, 0])],
}


@pytest.mark.parametrize("name", APART)
def test_apart(name: str) -> None:
    digests = APART[name]
    assert len(set(digests)) == len(digests) > 1


def test_everything_is_apart_from_everything_else() -> None:
    assert len(set(itertools.chain.from_iterable(APART.values()))) > 100


SAME: dict[str, list[str]] = {
    "defaults given or not": [
        item_digest(modality="image", payload=b"x", model="m"),
        item_digest(modality="image", payload=b"x", model="m", options={}, positions={}, uuid=None, pruning=None),
    ],
    "order of options": [
        image(options={"max_pixels": 1003520, "min_pixels": 3136}),
        image(options=OrderedDict(min_pixels=3136, max_pixels=1003520)),
        image(options=MappingProxyType({"min_pixels": np.int64(3136), "max_pixels": 1003520})),
        image(),
    ],
    "tuples and lists": [image(positions={"grid_thw": (1, 34, 46)}), image()],
    "kinds of bytes": [image(payload=bytearray(b"some bytes")), image(payload=memoryview(b"some bytes")), image()],
    "array layouts": [
        decoded(FRAMES),
        decoded(np.asfortranarray(FRAMES)),
        decoded(np.repeat(FRAMES, 2, axis=1)[:, ::2]),
    ],
    "tensor layouts": [embedding(BF16), embedding(BF16.T.contiguous().T), embedding(torch.nn.Parameter(BF16.clone()))],
    "float8 layouts": [
        embedding(BF16.to(torch.float8_e4m3fn)),
        embedding(BF16.T.contiguous().to(torch.float8_e4m3fn).T),
    ],
    "conjugate views": [
        value_digest(torch.tensor([1 + 2j]).conj()),
        value_digest(torch.tensor([1 - 2j])),
    ],
    "palettes opened from a file": [
        decoded(palette_image((255, 0, 0))),
        decoded(Image.open(io.BytesIO(png(palette_image((255, 0, 0)))))),
    ],
    "not a number": [value_digest(float("nan")), value_digest(-float("nan")), value_digest(np.float32("nan"))],
}


@pytest.mark.parametrize("name", SAME)
def test_same(name: str) -> None:
    assert len(set(SAME[name])) == 1
    assert len(SAME[name]) > 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_same_on_another_device() -> None:
    assert embedding(BF16.cuda()) == embedding(BF16)


FIXED: list[tuple[str, str]] = [
    ("7424d877200cb5c57714a2a657d4241770b458d1b74625ed69a0e1b4c9d4bb8a", image()),
    (
        "2181dfa006c713a471a0f6a87607a1447bbdcb70e6fac3ea5b9aad8881fe0564",
        image(uuid="a", use_audio_in_video=True, joint_mode="speech", pruning={"rate": 0.5, "seed": 0}),
    ),
    (
        "f10978c8f278b63f8c62fc7a73219185e897c668651a4ff0d4f07cf7643f9c15",
        image(options={"größe": [1, 2.5, True, None, -3, 2**70], "nested": {"b": b"\x00", "a": ""}}),
    ),
    ("e2fb2e057746be489a19d4509c0af8bda589c2c2710d6f69271e7331cca49562", decoded(GRAY)),
    ("f23be7056f7a25bd1a5edca2624428ebd591f10b9d6d828a287d81fe8d9303c7", decoded(palette_image((255, 0, 0)))),
    ("af0cdf02c9f6ad3633bb909a899ada5fad92967228a06dcd3a28728d45f09609", decoded(FRAMES)),
    ("8e86a17149645570e8f9e035e307cdd8fad24e9e4ef8d787a781b085f21523f7", decoded(np.arange(4, dtype=">u2"))),
    ("6a2de4fa91ece0adcfb3543dccc885496b75632db5372b7d25f6d7107a02d6bd", embedding(BF16)),
    ("472cc13210cb6819bdc5abf987dd8b6c5dd31bc97afff7cb4563ba79527da84b", embedding(BF16.to(torch.float8_e4m3fn))),
    (
        "e7f62895b54fd4cc0d6acce8316bdec2582101139cc704149d3b59c065d394f6",
        embedding({"mm_embeddings": BF16, "grid": torch.tensor([1, 2, 2])}),
    ),
    ("5f263d73dfd1e93423d8db44b7d3a6f9bb853bc0f7330afa7608df5f818a3593", value_digest(None)),
    ("7dd8f60843ef03f3c31e6ae62fdc9b955ac4dcc6e66a0aabff40c92b019e3198", value_digest([float("inf"), -0.0, 1e-300])),
    ("e9951efecca3e9913248f9fce5e7acdf82bfb9b4353db94c8bd27c9182de4666", prompt_digest([1, 2, 3])),
    (
        "epd-content-dc56f124ba46bc375e4b2fa0b4951f9f146a5390c986277be5d86f31903e43bb",
        content_salt(["11" * 32], "tenant"),
    ),
    (
        "765dfcefb02905d159718742191811e9dd38c96301bbcdd45336154c05882abd",
        bind_interleaving(bytes(32), 1, [[(0, 1), (2, 1)], [(1, 1)]]).hex(),
    ),
]


@pytest.mark.parametrize("index", range(len(FIXED)))
def test_values_that_every_machine_must_give(index: int) -> None:
    expected, found = FIXED[index]
    assert found == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "a value of type object has no canonical form"),
        ({1, 2}, "a value of type set"),
        (np.array([object()]), "an array of dtype object"),
        (np.zeros(2, "i4,f4"), "an array of dtype"),
        (torch.zeros(2).to_sparse(), "a torch.sparse_coo tensor"),
        (torch.zeros(2, device="meta"), "tensor on meta"),
        ({"a": [object()]}, "a value of type object"),
    ],
)
def test_values_without_a_canonical_form(value: object, message: str) -> None:
    with pytest.raises(InvalidMetadata, match=message):
        value_digest(value)


def test_deep_nesting_is_refused() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(InvalidMetadata, match="nested deeper than 64 levels"):
        value_digest(value)


@pytest.mark.parametrize(("payload", "kind"), [(b"x", "decoded"), (b"x", "embedding"), (FRAMES, "source")])
def test_bytes_are_the_source_and_nothing_else_is(payload: object, kind: Any) -> None:
    with pytest.raises(InvalidMetadata, match="cannot be of kind"):
        image(payload=payload, payload_kind=kind)


def test_equal_in_every_process() -> None:
    script = (
        "from dynamo_epd.contract.digest import item_digest; "
        "print(item_digest(modality='image', payload=b'x', model='m', options={'b': 1, 'a': {'z': None, 'y': 2.5}}))"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    seen = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "4242")
    }
    options = {"a": {"y": 2.5, "z": None}, "b": 1}
    assert seen == {item_digest(modality="image", payload=b"x", model="m", options=options)}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=2), children, max_size=3),
    max_leaves=6,
)


def exact(value: Any) -> Any:
    """``value`` in a form whose equality is equality of type and bits."""
    if isinstance(value, list):
        return ("list", *map(exact, value))
    if isinstance(value, dict):
        return ("dict", *sorted((k, exact(v)) for k, v in value.items()))
    if isinstance(value, float):
        return ("float", "nan" if value != value else value.hex())
    return (type(value).__name__, value)


@given(VALUES, VALUES)
def test_digests_are_equal_exactly_when_values_are(a: Any, b: Any) -> None:
    assert (value_digest(a) == value_digest(b)) == (exact(a) == exact(b))


def test_the_scheme_has_a_version() -> None:
    assert SCHEME == "dynamo-epd/content/1"


@pytest.mark.slow
def test_a_million_distinct_items_have_a_million_digests() -> None:
    rng = np.random.default_rng(7)
    seen = set()
    for i in range(1_000_000):
        payload = rng.bytes(int(rng.integers(1, 9))) + i.to_bytes(3, "little")
        seen.add(item_digest(modality="image", payload=payload, model="m", positions={"grid_thw": [1, i % 7, i % 5]}))
    assert len(seen) == 1_000_000
