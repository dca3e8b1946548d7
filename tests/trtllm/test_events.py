# SPDX-License-Identifier: Apache-2.0
"""Block events of both cache managers, with ids as the router knows them; nothing malformed ends the stream."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dynamo_epd.contract import block_keys_v1
from dynamo_epd.contract.block_keys import augmented_tokens, block_keys, root_key
from dynamo_epd.contract.layout import PromptLayout
from dynamo_epd.engine.base import BlocksRemoved, BlocksStored
from dynamo_epd.engine.trtllm.events import UNKNOWN, EventTranslator, KnownPrompt, router_hash

SIZE, VOCAB, IMAGE = 4, 1000, 500
ROUTE_A, ROUTE_B = 1_000_111, 1_000_222
DIGESTS = {ROUTE_A: "aa" * 32, ROUTE_B: "bb" * 32}


class Prompt:
    """A prompt with one image, as sent, and its blocks as either manager names and shows them."""

    def __init__(self, route=ROUTE_A, before=3, rows=7, after=4, *, salt=None, engine_salt=None, exact=True, tail=()):
        item = np.array([-1] * before + [0] * rows + [-1] * after)
        ids = np.where(item < 0, np.arange(len(item)) + 10, IMAGE)
        self.layout = PromptLayout.from_flat(ids, item, np.zeros(len(item), bool), 1)
        self.mm = self.layout.multimodal_input([DIGESTS[route]], ["my-uuid"]) if exact else None
        self.routing = np.where(item < 0, ids, route).astype(np.int64)
        self.salt = engine_salt if engine_salt is not None else salt
        self.known = KnownPrompt(ids.astype(np.int64), self.routing, self.mm, self.salt, salt)
        self.tail = list(tail)
        self.sent = [*ids.tolist(), *self.tail]
        self.router = [*self.routing.tolist(), *self.tail]

    def blocks(self, manager, name="my-uuid"):
        tokens = augmented_tokens(self.layout.token_ids, self.mm, VOCAB).append(self.tail)
        keys = block_keys(tokens, SIZE, root_key(None, self.salt))
        v1 = block_keys_v1.block_hashes(self.sent, self.mm, SIZE, cache_salt=self.salt)
        extra = block_keys_v1.extra_keys(self.mm, len(self.sent), SIZE)
        for i in range(len(self.sent) // SIZE):
            cut = slice(i * SIZE, (i + 1) * SIZE)
            if manager == "v1":
                # The caller's uuid stands where the digest would.
                keys_shown = [{"type": "mm_key", "hash": name or d.hex(), "start_offset": o} for d, o in extra[i]]
                yield block(v1[i], self.sent[cut], mm_keys=keys_shown)
            else:
                shown = [t.hex() if isinstance(t, bytes) else t for t in tokens.tolist()[cut]]
                yield block(keys[i].hex() if manager == "v2" else int.from_bytes(keys[i][:8], "big"), shown)


def block(name, tokens, mm_keys=(), **more):
    return {"block_hash": name, "tokens": [{"token_id": t} for t in tokens], "mm_keys": list(mm_keys), **more}


def stored(blocks, parent=None, **more):
    return {"event_id": 1, "data": {"type": "stored", "parent_hash": parent, "blocks": list(blocks), **more}}


def removed(*names):
    return {"event_id": 1, "data": {"type": "removed", "block_hashes": list(names)}}


def translator(*prompts) -> EventTranslator:
    made = EventTranslator(SIZE, VOCAB)
    for prompt in prompts:
        made.remember(prompt.known, prompt.layout.slot_item >= 0)
    return made


MANAGERS = pytest.mark.parametrize("manager", ["v1", "v2", "v2-64"])


@MANAGERS
def test_an_image_has_the_routers_ids_whatever_the_manager_shows(manager):
    a, b = Prompt(ROUTE_A), Prompt(ROUTE_B)
    t = translator(a, b)
    for prompt in (a, b):
        [event] = t.translate(stored(prompt.blocks(manager)))
        assert list(event.token_ids) == prompt.router[:12] and len(event.block_hashes) == 3
        assert event.parent_hash is None and all(0 <= h < 2**63 for h in event.block_hashes)
    assert t.unknown == 0 and t.malformed == 0


@MANAGERS
def test_a_chain_in_several_events_and_the_generated_end(manager):
    prompt = Prompt(after=0, before=5, tail=[77, 78, 79, 80])  # the image ends inside the third block of four
    t = translator(prompt)
    blocks = list(prompt.blocks(manager))
    parent, got, last = None, [], None
    for one in blocks:
        [event] = t.translate(stored([one], parent))
        assert event.parent_hash == last
        got += event.token_ids
        parent, [last] = one["block_hash"], event.block_hashes
    assert got == prompt.router[: len(blocks) * SIZE]


@MANAGERS
def test_an_image_at_the_very_end_with_generated_text_in_its_block(manager):
    prompt = Prompt(before=3, rows=6, after=0, tail=[77, 78, 79])
    t = translator(prompt)
    [event] = t.translate(stored(prompt.blocks(manager)))
    assert list(event.token_ids) == prompt.router[:12]


@MANAGERS
def test_media_that_was_never_sent_is_not_published_nor_what_is_behind_it(manager):
    known, stranger = Prompt(ROUTE_A), Prompt(ROUTE_B, before=5)
    t = translator(known)
    blocks = list(stranger.blocks(manager))
    [event] = t.translate(stored(blocks))
    assert list(event.token_ids) == stranger.router[:4]  # the text in front of it
    assert t.unknown == 1
    assert t.translate(stored([block("ee" * 32, [1, 2, 3, 4])], blocks[1]["block_hash"])) == []
    assert t.translate(removed(*(b["block_hash"] for b in blocks))) == [BlocksRemoved(event.block_hashes)]


@MANAGERS
def test_of_items_that_the_router_does_not_know_only_the_text_before_is_published(manager):
    prompt = Prompt(before=4)
    slots = prompt.layout.slot_item >= 0
    t = EventTranslator(SIZE, VOCAB)
    t.remember(replace(prompt.known, routing_ids=np.where(slots, UNKNOWN, prompt.routing)), slots)
    [event] = t.translate(stored(prompt.blocks(manager)))
    assert list(event.token_ids) == prompt.router[:4]


@MANAGERS
def test_of_a_prompt_that_shares_nothing_nothing_is_published(manager):
    prompt = Prompt(before=4, engine_salt="epd-once-1")
    t = EventTranslator(SIZE, VOCAB)
    t.remember(replace(prompt.known, routing_ids=np.full(15, UNKNOWN)), prompt.layout.slot_item >= 0)
    assert t.translate(stored(prompt.blocks(manager))) == []


def test_a_prompt_keyed_by_a_salt_of_its_content_is_published_under_the_callers_own():
    prompt = Prompt(salt="caller", engine_salt="epd-content-1", exact=False)
    for manager in ("v1", "v2"):
        t = translator(prompt)
        blocks = [{**b, "cache_salt": "epd-content-1"} for b in prompt.blocks(manager)]
        [event] = t.translate(stored(blocks))
        assert list(event.token_ids) == prompt.router[:12] and event.cache_salt == "caller"


def renamed(blocks, salt=None):
    """The blocks under names that nothing here can compute: another release, another way to make a name."""
    return [{**one, "block_hash": f"{i:02x}" * 32, "cache_salt": salt} for i, one in enumerate(blocks, start=1)]


@pytest.mark.parametrize("manager", ["v1", "v2"])
@pytest.mark.parametrize("salt", [None, "caller"])
def test_a_block_whose_name_nobody_knows_is_found_by_what_it_holds(salt, manager):
    a, b = Prompt(ROUTE_A, salt=salt), Prompt(ROUTE_B, salt=salt)
    t = translator(a, b)
    first, *rest = renamed(a.blocks(manager, name=None), salt)
    [event] = t.translate(stored([first]))
    [more] = t.translate(stored(rest, first["block_hash"]))
    assert [*event.token_ids, *more.token_ids] == a.router[:12]
    assert more.parent_hash == event.block_hashes[0] and more.cache_salt == salt
    assert t.unknown == 0 and t.published_blocks == len(t._keys) == 3
    t.translate(removed(*(one["block_hash"] for one in [first, *rest])))
    assert t.published_blocks == len(t._keys) == 0


@pytest.mark.parametrize("change", [{"start_offset": 5}, {"hash": "bb" * 32}, {"hash": "my-uuid"}, {"hash": "zz" * 32}])
def test_a_v1_block_whose_keys_say_something_else_is_not_found_by_what_it_holds(change):
    prompt = Prompt()
    t = translator(prompt)
    blocks = renamed(prompt.blocks("v1", name=None))
    blocks[0]["mm_keys"] = [{**blocks[0]["mm_keys"][0], **change}]
    assert t.translate(stored(blocks)) == [] and (t.unknown, t.malformed) == (1, 0)
    blocks[0]["mm_keys"] *= 2
    assert t.translate(stored(blocks)) == [] and (t.unknown, t.malformed) == (2, 0)


def test_what_a_block_holds_is_not_enough_under_another_salt_or_behind_another_parent():
    prompt, other = Prompt(salt="caller"), Prompt(before=7, salt="caller")
    t = translator(prompt)
    blocks = renamed(prompt.blocks("v2"), "somebody")
    assert t.translate(stored(blocks)) == [] and t.unknown == 1
    first = renamed(other.blocks("v2"), "caller")[0]
    assert len(t.translate(stored([first]))) == 1
    theirs = {**renamed(prompt.blocks("v2"), "caller")[1], "block_hash": "dd" * 32}
    assert t.translate(stored([theirs], first["block_hash"])) == [] and t.unknown == 2


def test_v1_names_under_the_v2_manager():
    # Text has V1's name, and everything from the first digest on the beginning of V2's.
    prompt = Prompt(before=6)
    t = translator(prompt)
    v1, v2 = list(prompt.blocks("v1")), list(prompt.blocks("v2-64"))
    blocks = [{**v2[0], "block_hash": v1[0]["block_hash"]}, *v2[1:]]
    [event] = t.translate(stored(blocks))
    assert list(event.token_ids) == prompt.router[:16] and t.unknown == 0


def test_text_needs_no_remembering_and_carries_salt_and_adapter():
    t = translator()
    one = stored([block(5, [1, 2, 3, 4], cache_salt="s")], 0, lora_name="adapter")
    assert t.translate(one) == [BlocksStored((2,), None, (1, 2, 3, 4), "s", "adapter")]
    two = stored([block(6, [1, 2, 3, 4], cache_salt="s"), block(7, [5, 6, 7, 8], cache_salt="t")])
    assert t.translate(two) == [] and t.malformed == 1


def test_text_behind_a_known_prompts_text_is_its_own_and_not_that_prompts():
    prompt = Prompt(before=9)
    t = translator(prompt)
    first = next(prompt.blocks("v2"))
    t.translate(stored([first]))
    [event] = t.translate(stored([block("cc" * 32, [61, 62, 63, 64])], first["block_hash"]))
    assert event.token_ids == (61, 62, 63, 64)


@MANAGERS
def test_the_end_of_another_prompt_with_the_same_beginning_is_not_taken_for_this_one(manager):
    known = Prompt(ROUTE_A, before=5, rows=5, after=0, tail=[71, 72])
    stranger = Prompt(ROUTE_B, before=5, rows=5, after=0, tail=[71, 72])
    for prompt, uuid in ((known, "one"), (stranger, "other")):
        prompt.mm = replace(prompt.mm, multimodal_uuids=(uuid,))
        prompt.known = replace(prompt.known, multimodal_input=prompt.mm)
    t = translator(known)
    *_, last = known.blocks(manager)
    t.translate(stored(list(known.blocks(manager))[:2]))
    parent = list(known.blocks(manager))[1]["block_hash"]
    theirs = list(stranger.blocks(manager))[2]
    theirs["mm_keys"] = [{**key, "hash": "other"} for key in theirs["mm_keys"]]
    if manager != "v1":
        theirs["tokens"][0]["token_id"] = "bb" * 32
    assert t.translate(stored([theirs], parent)) == [] and t.unknown == 1
    last["mm_keys"] = [{**key, "hash": DIGESTS[ROUTE_A]} for key in last["mm_keys"]]
    [event] = t.translate(stored([last], parent))
    assert list(event.token_ids) == known.router[8:12]


def test_removed_events_name_only_what_was_published():
    t = translator()
    t.translate(stored([block(10, [1, 2, 3, 4]), block(12, [5, 6])]))
    assert t.translate(removed(12, 99, 10)) == [BlocksRemoved((5,))]
    assert t.translate(removed(10)) == [] and t.published_blocks == 0


def test_a_block_that_several_layer_groups_or_ranks_store_is_told_once_and_removed_with_the_last():
    t = translator()
    assert len(t.translate(stored([block(10, [1, 2, 3, 4])]))) == 1
    assert t.translate(stored([block(10, [1, 2, 3, 4])])) == []
    assert t.translate(removed(10)) == []
    assert t.translate(removed(10)) == [BlocksRemoved((5,))]


def test_only_the_widest_attention_window_counts():
    t = translator()
    for window in (128, 4096):
        t.translate({"data": {"type": "created"}, "window_size": window})
    narrow, wide = stored([block(10, [1, 2, 3, 4])]), stored([block(12, [1, 2, 3, 4])])
    assert t.translate({**narrow, "window_size": 128}) == []
    assert len(t.translate({**wide, "window_size": 4096})) == 1
    assert t.translate({"data": {"type": "updated", "block_hash": 12}, "window_size": 4096}) == []


@pytest.mark.parametrize(
    "event",
    [
        None,
        "text",
        {},
        {"data": None},
        {"data": {"type": "stored"}},
        {"data": {"type": "removed"}},
        {"data": {"type": "removed", "block_hashes": [None]}},
        stored([block(None, [1, 2, 3, 4])]),
        stored([block("zz", [1, 2, 3, 4])]),
        stored([{"block_hash": 3, "tokens": [1, 2, 3, 4]}]),
        stored([block(3, [None] * 4)]),
        stored([block(3, [1, 2, 3, 4])], parent="not hex"),
    ],
)
def test_a_malformed_event_is_counted_and_the_next_is_read(event):
    t = translator()
    assert t.translate(event) == [] and t.malformed == 1
    assert len(t.translate(stored([block(10, [1, 2, 3, 4])]))) == 1


def test_what_is_remembered_is_bounded():
    t = EventTranslator(SIZE, VOCAB, max_blocks=10)
    prompts = [Prompt(ROUTE_A, before=n) for n in range(1, 20)]
    for prompt in prompts:
        t.remember(prompt.known, prompt.layout.slot_item >= 0)
        t.translate(stored(prompt.blocks("v2")))
    assert len(t._places) == 10
    assert t.unknown == 0
    assert t.translate(stored(prompts[0].blocks("v2-64"))) == []  # told before, under its other name


def test_names_of_blocks_as_63_bit_numbers():
    assert router_hash("ff" * 32) == 2**63 - 1 and router_hash(-1) == 2**63 - 1 and router_hash(2) == 1
