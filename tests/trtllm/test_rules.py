# SPDX-License-Identifier: Apache-2.0
"""The stand-in refuses what TensorRT-LLM refuses; its ``_rules.py`` says where each rule comes from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from .conftest import STANDIN, installed

H = [[1, 2, 3, 4, 5, 6, 7, 8]]
HH = H * 2

SPANS = [
    ({"multimodal_hashes": H, "multimodal_positions": (0,), "multimodal_lengths": [2]}, "plain-lists"),
    ({"multimodal_hashes": H, "multimodal_positions": torch.tensor([0]), "multimodal_lengths": [2]}, "plain-lists"),
    ({"multimodal_hashes": H, "multimodal_positions": [0.0], "multimodal_lengths": [2]}, "plain-lists"),
    ({"multimodal_hashes": [], "multimodal_positions": [], "multimodal_lengths": []}, "hashes-empty"),
    ({"multimodal_hashes": (H[0],), "multimodal_positions": [0], "multimodal_lengths": [2]}, "hashes-lists"),
    ({"multimodal_hashes": [tuple(H[0])], "multimodal_positions": [0], "multimodal_lengths": [2]}, "hashes-lists"),
    ({"multimodal_hashes": HH, "multimodal_positions": [0], "multimodal_lengths": [2]}, "counts"),
    ({"multimodal_hashes": H, "multimodal_positions": [-1], "multimodal_lengths": [2]}, "counts"),
    ({"multimodal_hashes": H, "multimodal_positions": [0], "multimodal_lengths": [0]}, "counts"),
    (
        {"multimodal_hashes": H, "multimodal_positions": [0], "multimodal_lengths": [2], "multimodal_uuids": [3]},
        "uuids",
    ),
    (
        {"multimodal_hashes": H, "multimodal_positions": [0], "multimodal_lengths": [2], "multimodal_uuids": []},
        "uuids",
    ),
]


def seven(offsets, starts, lengths, total=4):
    return {
        "multimodal_hashes": H,
        "multimodal_positions": [1],
        "multimodal_lengths": [total],
        "multimodal_item_run_cu_offsets": offsets,
        "multimodal_run_positions": starts,
        "multimodal_run_lengths": lengths,
    }


RUNS = [
    (seven([0, 2], [1, 5], None), "runs-together"),
    (seven([0, 2], (1, 5), [2, 2]), "plain-lists"),
    (seven([1, 2], [1, 5], [2, 2]), "runs"),
    (seven([0, 3], [1, 5], [2, 2]), "runs"),
    (seven([0, 2], [1, 5], [2, 3]), "runs"),
    (seven([0, 2], [5, 1], [2, 2]), "runs"),
    (seven([0, 2], [1, 2], [2, 2]), "runs"),
    (seven([0, 2], [1, 2**31 - 2], [2, 2]), "runs"),
    (seven([0, 2], [1, 5], [4, 0]), "runs"),
]

ITEM_RUNS = [
    ({"multimodal_hashes": H, "multimodal_item_runs": []}, "item-runs"),
    ({"multimodal_hashes": H, "multimodal_item_runs": [[]]}, "item-runs"),
    ({"multimodal_hashes": H, "multimodal_item_runs": [[(1, 2)]]}, "item-runs"),
    ({"multimodal_hashes": H, "multimodal_item_runs": [[(1, 2, [2])]]}, "item-runs"),
    ({"multimodal_hashes": H, "multimodal_item_runs": [[(5, 2, []), (1, 2, [])]]}, "item-runs"),
    ({"multimodal_hashes": HH, "multimodal_item_runs": [[(1, 4, [])], [(3, 2, [])]]}, "item-runs"),
    ({"multimodal_hashes": [[1, 2]], "multimodal_item_runs": [[(1, 4, [])]]}, "hashes-lists"),
]


def _refused(variant, kwargs, rule):
    with installed(variant):
        from tensorrt_llm.inputs.multimodal import MultimodalInput

        with pytest.raises((TypeError, ValueError), match=re.escape(f"[{rule}]")):
            MultimodalInput(**kwargs)


@pytest.mark.parametrize(("kwargs", "rule"), SPANS)
@pytest.mark.parametrize("variant", ["four", "seven"])
def test_spans(variant, kwargs, rule):
    _refused(variant, kwargs, rule)


@pytest.mark.parametrize(("kwargs", "rule"), RUNS)
def test_runs(kwargs, rule):
    _refused("seven", kwargs, rule)


@pytest.mark.parametrize(("kwargs", "rule"), ITEM_RUNS)
def test_item_runs(kwargs, rule):
    _refused("item_runs", kwargs, rule)


def test_fields_that_a_version_does_not_have():
    with installed("four"):
        from tensorrt_llm.inputs.multimodal import MultimodalInput

        with pytest.raises(TypeError):
            MultimodalInput(**seven([0, 1], [1], [4]))
    with installed("item_runs"):
        from tensorrt_llm.inputs.multimodal import MultimodalInput

        with pytest.raises(TypeError):
            MultimodalInput(**SPANS[0][0])


def test_handles_without_hashes_get_one_random_hash_for_all_items(variant):
    from tensorrt_llm.llmapi import DisaggregatedParams

    a, b = (DisaggregatedParams(multimodal_embedding_handles=[{}, {}]) for _ in range(2))
    assert a.multimodal_hashes[0] == a.multimodal_hashes[1] != b.multimodal_hashes[0]
    with pytest.raises(ValueError, match="request-type"):
        DisaggregatedParams(request_type="context")


def test_a_view_of_larger_memory_cannot_become_a_handle(variant):
    from tensorrt_llm.inputs.multimodal import MultimodalParams

    arena = torch.zeros(100, 4)
    params = MultimodalParams(multimodal_data={"multimodal_embedding": [arena[3:5]]})
    with pytest.raises(RuntimeError, match="larger memory"):
        params.to_handle("multimodal_data")
    params = MultimodalParams(multimodal_data={"multimodal_embedding": [arena[3:5].clone()]})
    params.to_handle("multimodal_data")
    assert set(params.multimodal_data["multimodal_embedding"][0]) == {"method_key", "storage_handle", "tensor_size"}
    params.to_tensor("multimodal_data")
    assert params.multimodal_data["multimodal_embedding"][0].shape == (2, 4)
    with pytest.raises(ValueError, match="to-handle"):
        params.to_handle("multimodal_input")


def test_every_rule_has_a_source_and_is_used():
    with installed("seven"):
        from tensorrt_llm._rules import RULES

        rules = dict(RULES)
    code = "\n".join(p.read_text() for p in Path(STANDIN).rglob("*.py") if p.name != "_rules.py")
    told = {"max-tokens", "one-random-hash", "media-ids", "placeholder-keys"}  # behaviour, not a refusal
    assert {rule for rule in rules if f'"{rule}"' not in code} == told
    assert all(len(source) > 20 for source in rules.values())
