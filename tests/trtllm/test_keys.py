# SPDX-License-Identifier: Apache-2.0
"""One request with media is keyed exactly, by its content, or not at all; never by its placeholders."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dynamo_epd.contract.errors import InvalidMetadata, InvalidRequest
from dynamo_epd.contract.layout import PromptLayout
from dynamo_epd.engine.base import EngineRequest, SamplingParams
from dynamo_epd.engine.trtllm.capabilities import Capabilities
from dynamo_epd.engine.trtllm.inputs import MediaTokens, preprocessed_inputs
from dynamo_epd.engine.trtllm.keys import KeyPolicy, decide, metadata
from dynamo_epd.engine.trtllm.names import load_names

CAPS = Capabilities(
    version="1.3",
    form="seven",
    preprocessed_inputs=True,
    prefix_sum=True,
    cache_salt=True,
    to_handle=True,
    disagg_fields=frozenset({"disagg_request_id"}),
    id_helper="machine",
    kv_events=True,
    capacity=True,
    encoder=True,
)
IMAGE, START, TEXT = 500, 501, 7
ONE_RUN = [-1, 0, 0, 0, -1, -1]
SPLIT = [-1, 0, 0, -1, 0, -1]
WOVEN = [0, 1, 0, 1, -1, -1]
A, B = "aa" * 32, "bb" * 32


def made(item, digests=(A,), framing=(), **changes) -> EngineRequest:
    item = np.array(item)
    flags = np.isin(np.arange(len(item)), framing)
    ids = np.where(item < 0, TEXT, np.where(flags, START, IMAGE))
    layout = PromptLayout.from_flat(ids, item, flags, int(item.max()) + 1)
    request = EngineRequest(
        request_id="r",
        layout=layout,
        sampling=SamplingParams(),
        multimodal_input=layout.multimodal_input(list(digests)) if layout.num_items else None,
        embeddings=[i + torch.arange(int(n))[:, None].expand(-1, 2) / 10 for i, n in enumerate(layout.rows)],
        modalities=("image",) * layout.num_items,
    )
    return replace(request, **changes)


def policy(reuse=True, chunked=True, **caps) -> KeyPolicy:
    return KeyPolicy(replace(CAPS, **caps), reuse, chunked)


@pytest.mark.parametrize("form", ["seven", "item_runs"])
@pytest.mark.parametrize("item", [ONE_RUN, SPLIT])
def test_forms_with_runs_are_exact(form, item):
    decision = decide(made(item, cache_salt="caller"), policy(form=form))
    assert decision.kind == "exact" and decision.cache_salt == "caller" and decision.reason == ""


def test_four_fields_are_exact_for_one_run_and_by_content_for_more():
    assert decide(made(ONE_RUN), policy(form="four")).kind == "exact"
    split = decide(made(SPLIT), policy(form="four"))
    assert split.kind == "content" and split.engine_fields is None and split.reuse
    assert decide(made(SPLIT), policy(form="four")).cache_salt == split.cache_salt
    others = [
        decide(made(SPLIT, [B]), policy(form="four")),
        decide(made(SPLIT, cache_salt="caller"), policy(form="four")),
    ]
    assert len({split.cache_salt, *(o.cache_salt for o in others)}) == 3


def test_without_any_metadata_class_everything_is_by_content():
    assert decide(made(ONE_RUN), policy(form="none")).kind == "content"
    assert decide(made([-1, -1]), policy(form="none")).kind == "text"


def test_without_the_prefix_sum_what_is_not_exact_shares_nothing():
    decisions = [decide(made(SPLIT), policy(form="four", prefix_sum=False, chunked=False)) for _ in range(2)]
    assert [d.kind for d in decisions] == ["uncacheable"] * 2 and not decisions[0].reuse
    assert decisions[0].cache_salt != decisions[1].cache_salt
    with pytest.raises(InvalidRequest, match="enable_chunked_prefill: false"):
        decide(made(SPLIT), policy(form="four", prefix_sum=False))
    assert decide(made(ONE_RUN), policy(form="four", prefix_sum=False)).kind == "exact"


def test_media_without_metadata_is_refused_or_shares_nothing():
    with pytest.raises(InvalidMetadata, match="missing for a prompt with 1 media items"):
        decide(made(ONE_RUN, multimodal_input=None), policy())
    alone = decide(made(ONE_RUN, multimodal_input=None, reuse=False), policy())
    assert alone.kind == "uncacheable" and alone.cache_salt.startswith("epd-once-")


def test_reuse_false_gets_a_salt_that_nobody_else_has():
    salts = {decide(made(item, reuse=False, cache_salt="c"), policy()).cache_salt for item in (ONE_RUN, ONE_RUN, [-1])}
    assert len(salts) == 3 and "c" not in salts


def test_metadata_of_another_prompt_is_refused():
    request = made(ONE_RUN)
    with pytest.raises(InvalidMetadata, match="not where the prompt has its items"):
        decide(replace(request, multimodal_input=made(SPLIT).multimodal_input), policy())
    with pytest.raises(InvalidMetadata, match="the prompt has none"):
        decide(replace(made([-1, -1]), multimodal_input=request.multimodal_input), policy())


@pytest.mark.parametrize(
    ("request_", "caps"),
    [
        (made(ONE_RUN, cache_salt="caller"), {"cache_salt": False}),
        (made([-1], cache_salt="caller"), {"cache_salt": False}),
        (made(SPLIT), {"cache_salt": False, "form": "four"}),
        (made(ONE_RUN, reuse=False), {"cache_salt": False}),
    ],
)
def test_a_salt_that_the_version_does_not_take_is_not_dropped(request_, caps):
    with pytest.raises(InvalidRequest, match="takes no cache_salt"):
        decide(request_, policy(**caps))
    assert decide(request_, policy(reuse=False, **caps)).cache_salt is not None


def test_what_the_engine_gets_is_what_its_class_takes(variant):
    names = load_names()
    items = [ONE_RUN] if variant == "four" else [ONE_RUN, SPLIT, [0, -1, 0, 1, 1, -1]]
    for item in items:
        request = made(item, [A, B][: max(item) + 1], framing=[1] if item is not items[-1] else ())
        mm = metadata(decide(request, policy(form=variant)), names.MultimodalInput)
        runs = [[(s, n) for s, n in request.layout.runs(i)] for i in range(request.layout.num_items)]
        assert [list(r) for r in mm.runs()] == runs
        assert all(type(word) is int for words in mm.multimodal_hashes for word in words)


def test_a_class_that_refuses_is_a_typed_error():
    class Stubborn:
        def __init__(self, **_):
            raise ValueError("no")

    with pytest.raises(InvalidMetadata, match="TensorRT-LLM refuses it: no"):
        metadata(decide(made(ONE_RUN), policy()), Stubborn)


IN_VOCABULARY = MediaTokens(frozenset({IMAGE}), None, 600)


def inputs(request, tokens=IN_VOCABULARY, caps=CAPS):
    return preprocessed_inputs(load_names(), caps, request, decide(request, KeyPolicy(caps, True, True)), tokens)


def test_the_prompt_as_it_is_handed_over(seven):
    request = made(
        [-1, 0, 0, 0, -1, 1, 1, -1], [A, B], framing=[1, 6], modalities=("image", "video"),
        position_ids=np.arange(24).reshape(3, 8), position_delta=-3,
    )  # fmt: skip
    got = inputs(request, caps=replace(CAPS, to_handle=False))
    data = got.multimodal_params.multimodal_data
    assert got.prompt_token_ids == [TEXT, START, IMAGE, IMAGE, TEXT, IMAGE, START, TEXT]
    assert all(type(t) is int for t in got.prompt_token_ids)
    assert [e.tolist() for e in data["multimodal_embedding"]] == [e.tolist() for e in request.embeddings]
    assert data["multimodal_embedding_lengths"] == [2, 1]
    assert data["multimodal_embed_mask_cumsum"].tolist() == [0, 0, 1, 2, 2, 3, 3, 3]
    assert data["multimodal_embed_mask_cumsum"].dtype == torch.int64
    assert data["special_token_offsets"] == [0, 4]
    assert data["layout_metadata"] == {"item_types": [0, 1]}
    mrope = data["mrope_config"]
    assert mrope["mrope_position_ids"].shape == (3, 1, 8) and mrope["mrope_position_deltas"].tolist() == [[-3]]
    assert all(type(n) is int for n in data["multimodal_embedding_lengths"] + data["special_token_offsets"])


def test_embeddings_are_copied_so_that_the_callers_memory_may_be_used_again(seven):
    arena = torch.arange(100.0).reshape(50, 2)
    got = inputs(made(ONE_RUN, embeddings=[arena[3:6]]), caps=replace(CAPS, to_handle=False))
    arena.zero_()
    [embedding] = got.multimodal_params.multimodal_data["multimodal_embedding"]
    assert embedding.tolist() == [[6, 7], [8, 9], [10, 11]] and embedding.untyped_storage().nbytes() == 24


def test_rows_of_woven_items_come_in_the_order_of_the_prompt(seven):
    request = made(WOVEN, [A, B])
    got = inputs(request, caps=replace(CAPS, to_handle=False))
    rows = torch.cat(got.multimodal_params.multimodal_data["multimodal_embedding"])
    a, b = request.embeddings
    assert torch.equal(rows, torch.stack([a[0], b[0], a[1], b[1]]))


@pytest.mark.parametrize("shapes", [[], [(2, 2)], [(3, 2), (3, 2)], [(3,)]])
def test_embeddings_that_are_not_those_of_the_prompt(seven, shapes):
    with pytest.raises(InvalidMetadata, match="slots for"):
        inputs(made(ONE_RUN, embeddings=[torch.zeros(s) for s in shapes]))


def test_text_without_positions_needs_no_parameters(seven):
    assert inputs(made([-1, -1])).multimodal_params is None
    with_positions = inputs(made([-1, -1], position_ids=np.zeros((3, 2), np.int64)))
    assert set(with_positions.multimodal_params.multimodal_data) == {"mrope_config"}
    assert with_positions.multimodal_params.multimodal_input is None


@pytest.mark.parametrize(
    ("tokens", "want"),
    [
        (IN_VOCABULARY, IMAGE),
        (MediaTokens(frozenset({601}), 601, 600), 601),
        (MediaTokens(None, 601, 600), 601),
        (MediaTokens(None, None, 600), 601),
    ],
)
def test_slots_get_the_ids_that_the_version_wants(tokens, want):
    assert tokens.apply(made(ONE_RUN, framing=[1]).layout).tolist() == [TEXT, START, want, want, TEXT, TEXT]


def test_a_placeholder_in_the_text_is_refused_before_it_breaks_a_batch():
    layout = PromptLayout.from_flat([TEXT, IMAGE, IMAGE], np.array([-1, 0, -1]), np.zeros(3, bool), 1)
    with pytest.raises(InvalidRequest, match="token 2 of the prompt is 500, a media placeholder outside"):
        IN_VOCABULARY.apply(layout)
    with pytest.raises(InvalidMetadata, match=r"prompt_token_ids\[1\]"):
        MediaTokens(frozenset({999}), None, 600).apply(made(ONE_RUN).layout)


def test_what_the_input_processor_says():
    class New:
        def get_vocab_size(self):
            return 600

        def get_mm_token_ids(self):
            return torch.tensor([500, 501])

        def get_mm_special_token_ids(self):
            return torch.tensor([501])

    class Old:
        tllm_multimodal_token_id = 601

        def get_vocab_size(self):
            return 600

    class Llm:
        def __init__(self, processor):
            self.input_processor = processor

    assert MediaTokens.of(Llm(New()), 1) == MediaTokens(frozenset({500}), None, 600)
    assert MediaTokens.of(Llm(Old()), 1) == MediaTokens(None, 601, 600)
    assert MediaTokens.of(object(), 77) == MediaTokens(None, None, 77)
