# SPDX-License-Identifier: Apache-2.0
"""Block keys against the values that TensorRT-LLM's own algorithms gave for 37 prompts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_epd.contract import block_keys_v1
from dynamo_epd.contract.block_keys import (
    AugmentedTokens,
    augmented_tokens,
    block_keys,
    extend_key,
    root_key,
    salt_id,
)
from dynamo_epd.contract.errors import InvalidMetadata
from dynamo_epd.contract.multimodal_input import MultimodalInput, digest_to_words, words_to_digest

DATA = Path(__file__).parent.parent / "data" / "block_keys.json.gz"
CASES: list[dict[str, Any]] = json.loads(gzip.decompress(DATA.read_bytes()))


def mm_of(case: dict[str, Any]) -> MultimodalInput | None:
    return MultimodalInput.from_builtins(case["multimodal_input"]) if case["multimodal_input"] else None


def as_json(tokens: list[int | bytes]) -> list[int | str]:
    return [token.hex() if isinstance(token, bytes) else token for token in tokens]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_upstream_values(case: dict[str, Any]) -> None:
    ids, size, expected = case["prompt_token_ids"], case["tokens_per_block"], case["expected"]
    scope = {"lora_id": case["lora_id"], "cache_salt": case["cache_salt"]}
    mm = mm_of(case)
    tokens = augmented_tokens(ids, mm, case["vocab_size"])
    root = root_key(**scope)
    assert salt_id(case["cache_salt"]) == case["cache_salt_id"]
    assert as_json(tokens.tolist()) == expected["v2_augmented_token_ids"]
    assert [key.hex() for key in [root, *block_keys(tokens, size, root)]] == expected["v2_block_keys"]
    extra = block_keys_v1.extra_keys(mm, len(ids), size)
    assert [[[digest.hex(), offset] for digest, offset in block] for block in extra] == expected["v1_extra_keys"]
    assert block_keys_v1.block_hashes(ids, mm, size, **scope) == expected["v1_block_hashes"]
    for part in expected["slices"]:
        assert as_json(tokens[part["start"] : part["end"]].tolist()) == part["v2_augmented_token_ids"]
    if mm is not None:
        assert mm.to_builtins() == case["multimodal_input"]


def test_there_are_37_cases() -> None:
    assert len(CASES) == 37


@pytest.mark.parametrize("name", ["two_images", "interleaved_items", "single_token_blocks"])
def test_block_by_block_equals_all_at_once(name: str) -> None:
    case = next(case for case in CASES if case["name"] == name)
    size, root = case["tokens_per_block"], root_key()
    tokens = augmented_tokens(case["prompt_token_ids"], mm_of(case), case["vocab_size"])
    keys = block_keys(tokens, size, root)
    for i, key in enumerate(keys):
        block = tokens[i * size : (i + 1) * size]
        parent = keys[i - 1] if i else root
        assert extend_key(parent, block) == extend_key(parent, block.tolist()) == key
    half = len(keys) // 2
    assert block_keys(tokens[half * size :], size, keys[half - 1]) == keys[half:]


def test_generated_tokens_extend_the_prompt() -> None:
    case = next(case for case in CASES if case["name"] == "repeated_hash")
    tokens = augmented_tokens(case["prompt_token_ids"], mm_of(case), case["vocab_size"])
    longer = tokens.append([5, 6]).append(np.array([7]))
    assert longer.tolist() == [*tokens.tolist(), 5, 6, 7]
    assert longer.common_prefix(tokens) == len(tokens)
    keys = block_keys(longer, 4, root_key())
    assert keys[:3] == block_keys(tokens, 4, root_key())
    assert keys[3] == extend_key(keys[2], [5, 6, 7])


def test_scopes_differ() -> None:
    scopes = [(None, None), (0, None), (1, None), (None, ""), (None, "a"), (None, "b"), (0, "a"), (1, "a")]
    assert len({root_key(*scope) for scope in scopes}) == len(scopes)
    with pytest.raises(InvalidMetadata, match="lora_id: is -1"):
        root_key(-1, None)


TOKENS = st.lists(st.one_of(st.integers(0, 3), st.sampled_from([b"\0" * 32, b"\1" * 32])), max_size=12)


def from_tokens(tokens: list[int | bytes]) -> AugmentedTokens:
    ids = np.array([-1 if isinstance(t, bytes) else t for t in tokens], dtype=np.int64)
    return AugmentedTokens(ids, tuple(t for t in tokens if isinstance(t, bytes)))


@given(TOKENS, TOKENS, st.integers(0, 12), st.integers(0, 12))
def test_equality_and_prefix_are_those_of_the_tokens(a: list[Any], b: list[Any], start: int, stop: int) -> None:
    x, y = from_tokens(a), from_tokens(b)
    assert x.tolist() == a
    assert (x == y) == (a == b)
    assert x[start:stop] == from_tokens(a[start:stop])
    prefix = next((i for i, (s, t) in enumerate(zip(a, b, strict=False)) if s != t), min(len(a), len(b)))
    assert x.common_prefix(y) == y.common_prefix(x) == prefix
    assert x.key_bytes() == b"".join(t if isinstance(t, bytes) else t.to_bytes(4, "little") for t in a)


def one_item(start: int, length: int, digest: bytes = b"\7" * 32) -> MultimodalInput:
    return MultimodalInput((digest_to_words(digest),), (start,), (length,), None, (0, 1), (start,), (length,))


@pytest.mark.parametrize(
    ("ids", "mm", "vocab", "message"),
    [
        ([1, 2, 3], one_item(1, 3), 100, "ends beyond the prompt of 3 tokens"),
        ([1, 2, 100], one_item(0, 2), 100, r"prompt_token_ids\[2\]: is 100, a text token at or above vocab_size"),
        ([1, -2, 3], None, 100, r"prompt_token_ids\[1\]: is -2"),
        ([1, 2**31], None, 100, r"prompt_token_ids\[1\]: is 2147483648"),
        ([[1, 2]], None, 100, "has 2 dimensions"),
        ([1, 2], one_item(0, 2), 2**31 - 2, "vocab_size: is 2147483646"),
        ([1, 2], one_item(0, 2), 0, "vocab_size: is 0"),
    ],
)
def test_refused(ids: list[int], mm: MultimodalInput | None, vocab: int, message: str) -> None:
    with pytest.raises(InvalidMetadata, match=message):
        augmented_tokens(ids, mm, vocab)


def test_ids_above_the_vocabulary_inside_an_item_are_replaced() -> None:
    assert augmented_tokens([1, 100, 100], one_item(1, 2), 100).tolist() == [1, b"\7" * 32, 101]


def test_digest_words_are_signed_and_big_endian() -> None:
    digest = bytes(range(0xF0, 0x100)) + bytes(range(16))
    words = digest_to_words(digest)
    assert words[0] == 0xF0F1F2F3 - 2**32
    assert words[4] == 0x00010203
    assert words_to_digest(words) == digest
    with pytest.raises(InvalidMetadata, match="has 31 bytes"):
        digest_to_words(digest[:31])


def test_event_hashes_are_63_bit() -> None:
    assert block_keys_v1.events_hash(b"\xff" * 32) == 2**63 - 1
    assert block_keys_v1.events_hash(b"\x02" + bytes(31)) == 1
