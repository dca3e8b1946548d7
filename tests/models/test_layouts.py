# SPDX-License-Identifier: Apache-2.0
"""Every prompt of ``layouts.json``: ids, runs, framing and rows bit for bit."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from dynamo_epd.contract.layout import expand
from dynamo_epd.models.nemotron import keep_rows

from .tiny import case_id, case_request, cases, prepare_all


@pytest.mark.parametrize("case", cases(), ids=case_id)
def test_expanded_prompt_equals_the_processors_own(case, family):
    media, kwargs = case_request(case)
    layout, items = prepare_all(family(case["family"]), case["unexpanded_ids"], media, kwargs)
    assert layout.token_ids.tolist() == case["expanded_ids"]
    expected = defaultdict(list)
    for item in case["items"]:
        expected[item["modality"]].append(item)
    for i, item in enumerate(items):
        want = expected[item.modality].pop(0)
        assert [list(run) for run in layout.runs(i)] == want["runs"]
        assert layout.special_offsets(i).tolist() == want["special_offsets"]
        assert item.rows == layout.rows[i] == want["embedding_rows"]
    assert not any(expected.values())


@pytest.mark.parametrize("case", [c for c in cases() if not c["case"].startswith("x_")], ids=case_id)
def test_placeholders_are_where_the_template_put_them(case, family):
    counts = defaultdict(int)
    for item in case["items"]:
        counts[item["modality"]] += 1
    places = family(case["family"]).placeholders(case["unexpanded_ids"], counts)
    assert [(start, length) for start, length, _ in places] == [
        (item["placeholder_index"], item["placeholder_len"]) for item in case["items"]
    ]


@pytest.mark.parametrize("case", [c for c in cases() if "expanded_ids_after_evs" in c], ids=case_id)
def test_pruned_prompt_equals_transformers_after_pruning(case, family):
    f = family(case["family"])
    media, kwargs = case_request(case)
    places = f.placeholders(case["unexpanded_ids"], {"video": len(media)})
    items = []
    for item, want in zip([f.prepare(m, kwargs) for m in media], case["items"], strict=True):
        items.append(keep_rows(item, np.isin(np.arange(item.rows), want["retained"])))
    edits = f.replacements(case["unexpanded_ids"], places, [item.expansion for item in items])
    layout = expand(case["unexpanded_ids"], edits, len(items))
    assert layout.token_ids.tolist() == case["expanded_ids_after_evs"]
    assert layout.rows.tolist() == [want["embedding_rows_kept"] for want in case["items"]]


def test_handoff_of_an_expansion_is_a_few_hundred_bytes(family):
    import msgspec

    for case in cases():
        if case["case"] == "one_image":
            f = family(case["family"])
            media, kwargs = case_request(case)
            places = f.placeholders(case["unexpanded_ids"], {"image": 1})
            edits = f.replacements(case["unexpanded_ids"], places, [f.prepare(media[0], kwargs).expansion])
            assert len(msgspec.json.encode(edits)) < 300, case["family"]
