# SPDX-License-Identifier: Apache-2.0
"""The offering machine, with messages and a clock put in by hand."""

from __future__ import annotations

import pytest

from dynamo_epd.transfer.arena import Arena, Hold
from dynamo_epd.transfer.config import GRANULE
from dynamo_epd.transfer.offers import Offers, OfferState, slot_index
from dynamo_epd.transfer.protocol import PAYLOAD_BYTES, Cancel, Check, Checked, Done, Ended, Pull, Reading

from .fakes import FakePeer, Memory, OfferRecord

TTL, TIMEOUT = 30.0, 10.0


class Offering:
    def __init__(self, granules: int = 8):
        self.arena = Arena(Memory(granules), first_generation=500)
        self.record = OfferRecord()
        self.offers = Offers(self.record, TTL, TIMEOUT)  # type: ignore[arg-type]

    def slot(self, nbytes: int = GRANULE) -> Hold:
        slots = self.arena.take([nbytes])
        assert slots is not None
        return slots[0]

    def offer(self, now: float = 0.0, nbytes: int = GRANULE) -> tuple[int, int]:
        """Number and generation of an offer that alone holds its slot."""
        slot = self.slot(nbytes)
        number = self.offers.number(slot)
        self.offers.add(number, slot, nbytes, now)
        slot.release()
        return number, slot.allocation.generation

    def states(self) -> tuple[int, int]:
        return self.offers.count(OfferState.OPEN), self.offers.count(OfferState.SERVING)


def pull(
    offer: tuple[int, int],
    request: int = 1,
    skip: int = 0,
    nbytes: int = GRANULE,
    target: int | None = 0,
    last: bool = False,
) -> Pull:
    return Pull(request, *offer, skip, nbytes, target, last)


def test_the_number_tells_the_slot() -> None:
    side = Offering()
    side.slot()
    number, _ = side.offer()
    assert slot_index(number) == 1


def test_an_offer_that_nobody_takes_ends_after_its_time_to_live() -> None:
    side = Offering()
    side.offer(now=0.0)
    side.offer(now=5.0)
    side.offers.poll(29.9)
    assert side.states() == (2, 0)
    side.offers.poll(30.0)
    assert side.states() == (1, 0) and side.arena.used_bytes == GRANULE
    side.offers.poll(35.0)
    assert side.arena.used_bytes == 0 and not side.offers.busy and side.offers.expired == 2


def test_a_pull_is_written_and_answered_once() -> None:
    side, peer = Offering(), FakePeer()
    offer = side.offer()
    side.offers.pull(peer, pull(offer, 1, skip=16, nbytes=100, target=2 * GRANULE), 0.0)
    (write,) = side.record.writes
    assert (write.skip, write.nbytes, write.target) == (16, 100, 2 * GRANULE)
    assert side.states() == (0, 1)
    side.offers.written(write, "")
    assert not peer.link.take()  # the data plane told the receiver
    side.offers.done(peer, Done(*offer))
    assert side.states() == (0, 0) and side.arena.used_bytes == 0


def test_a_write_outlives_its_offer_and_keeps_the_memory() -> None:
    side, peer = Offering(), FakePeer()
    side.offers.pull(peer, pull(side.offer()), 0.0)
    side.offers.poll(TIMEOUT)
    assert side.states() == (0, 0) and side.offers.writing == 1
    assert side.arena.used_bytes == GRANULE
    side.offers.written(side.record.writes[0], "transfer failed")
    assert side.arena.used_bytes == 0
    assert peer.link.take() == [Ended(1, "failed", "transfer failed")]


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"offer": 1}, "expired"),
        ({"generation": 1}, "generation"),
        ({"nbytes": GRANULE + 1}, "protocol"),
        ({"skip": 1}, "protocol"),
        ({"target": 64 * GRANULE}, "protocol"),
        ({"target": 1}, "protocol"),
        ({"target": 1 << 63}, "protocol"),
        ({"skip": 1 << 63}, "protocol"),
    ],
)
def test_a_pull_that_does_not_fit_is_refused(change: dict[str, int], outcome: str) -> None:
    side, peer = Offering(), FakePeer()
    number, generation = side.offer()
    fields = {"request": 1, "offer": number, "generation": generation, "skip": 0, "nbytes": GRANULE, "target": 0}
    side.offers.pull(peer, Pull(**{**fields, **change}), 0.0)
    (answer,) = peer.link.take()
    assert isinstance(answer, Ended) and answer.outcome == outcome
    assert not side.record.writes and side.states() == (1, 0)


@pytest.mark.parametrize("last", [True, False])
def test_an_offer_that_is_sent_over_the_link_ends_with_its_bytes_where_they_are_the_last_word(last: bool) -> None:
    side, peer = Offering(), FakePeer(granules=0)  # where the bytes go is the receiver's own affair
    offer = side.offer()
    side.offers.pull(peer, pull(offer, 1, skip=16, nbytes=100, target=None, last=last), 0.0)
    (write,) = side.record.writes
    assert (write.skip, write.nbytes, write.target) == (16, 100, None)
    assert side.offers.writing == 1 and not side.offers.writes_to(peer)
    side.offers.written(write, "")
    assert side.states() == (0, 0 if last else 1)
    side.offers.done(peer, Done(*offer))
    assert side.states() == (0, 0) and side.arena.used_bytes == 0 and not side.offers.busy
    assert not peer.link.take()


def test_bytes_that_were_not_sent_leave_the_offer_to_its_receiver() -> None:
    side, peer = Offering(), FakePeer()
    offer = side.offer()
    side.offers.pull(peer, pull(offer, target=None, last=True), 0.0)
    side.offers.written(side.record.writes[0], "cancelled")
    assert side.states() == (0, 1) and peer.link.take() == [Ended(1, "cancelled", "cancelled")]
    side.offers.done(peer, Done(*offer))
    assert side.arena.used_bytes == 0


def test_more_than_a_link_carries_is_not_sent_over_it() -> None:
    granules = PAYLOAD_BYTES // GRANULE + 1
    side, peer = Offering(granules), FakePeer(granules=granules)
    offer = side.offer(nbytes=granules * GRANULE)
    side.offers.pull(peer, pull(offer, 1, nbytes=PAYLOAD_BYTES + 1, target=None), 0.0)
    (answer,) = peer.link.take()
    assert isinstance(answer, Ended) and answer.outcome == "protocol" and not side.record.writes
    side.offers.pull(peer, pull(offer, 2, nbytes=PAYLOAD_BYTES, target=None), 0.0)
    assert len(side.record.writes) == 1 and side.offers.writing == 1


def test_a_link_that_does_not_take_its_bytes_is_closed_in_the_end() -> None:
    """What waits for others has as long as a transfer may take, and what has begun as long again."""
    side, peer, other = Offering(), FakePeer(), FakePeer("other")
    side.offers.pull(peer, pull(side.offer(), 1, target=None), 0.0)
    side.offers.pull(other, pull(side.offer(), 1, target=None), 1.0)
    side.offers.pull(peer, pull(side.offer(), 2, target=0), 1.0)  # the fabric's: its end is not ours to say
    begun, waiting, written = side.record.writes
    side.offers.poll(TIMEOUT)
    assert side.record.aborted == [begun]
    side.offers.poll(TIMEOUT + 1.0)
    assert side.record.aborted == [begun, waiting] and not side.record.stopped
    side.offers.written(waiting, "cancelled")
    assert other.link.take() == [Ended(1, "expired", "cancelled")]  # its receiver has cancelled nothing
    side.offers.poll(2 * TIMEOUT - 0.1)
    assert not side.record.stopped and side.offers.busy
    side.offers.poll(2 * TIMEOUT)
    side.offers.poll(9 * TIMEOUT)
    assert side.record.stopped == [peer] and side.offers.writes_to(peer)
    side.offers.written(begun, "the connection to the peer ended")
    side.offers.written(written, "")
    assert side.arena.used_bytes == 0 and not side.offers.busy


def test_a_duplicate_pull_is_not_written_twice() -> None:
    side, peer = Offering(), FakePeer()
    offer = side.offer()
    side.offers.pull(peer, pull(offer, 3), 0.0)
    side.offers.pull(peer, pull(offer, 3), 0.0)
    side.offers.written(side.record.writes[0], "")
    side.offers.pull(peer, pull(offer, 3), 0.0)
    assert len(side.record.writes) == 1 and not peer.link.take()


def test_a_cancel_that_overtakes_its_pull_stops_it() -> None:
    side, peer = Offering(), FakePeer()
    offer = side.offer()
    side.offers.cancel(peer, Cancel(7))
    assert peer.link.take() == [Ended(7, "cancelled")]
    side.offers.pull(peer, pull(offer, 7), 0.0)
    # The receiver was promised that nothing will be written for 7.
    assert not side.record.writes and not peer.link.take()


def test_a_cancel_during_the_write_is_answered_when_the_memory_is_free() -> None:
    side, peer = Offering(), FakePeer()
    side.offers.pull(peer, pull(side.offer(), 1), 0.0)
    side.offers.cancel(peer, Cancel(1))
    assert side.record.aborted == side.record.writes and not peer.link.take()
    side.offers.written(side.record.writes[0], "")
    side.offers.cancel(peer, Cancel(1))
    # The note with the bytes was the last word; a second one does no harm.
    assert peer.link.take() == [Ended(1, "cancelled")]


def test_a_cancel_over_a_new_link_of_the_same_agent_gets_the_last_word() -> None:
    side, peer, again = Offering(), FakePeer(), FakePeer()
    side.offers.pull(peer, pull(side.offer(), 1), 0.0)
    side.offers.lost(peer)
    side.offers.cancel(again, Cancel(1))
    side.offers.written(side.record.writes[0], "the peer is gone")
    assert again.link.take() == [Ended(1, "failed", "the peer is gone")] and not peer.link.take()


def test_an_offer_is_for_one_receiver() -> None:
    side, peer, other = Offering(), FakePeer("one"), FakePeer("two")
    offer = side.offer()
    side.offers.pull(peer, pull(offer, 1), 0.0)
    side.offers.pull(other, pull(offer, 1), 0.0)
    (answer,) = other.link.take()
    assert isinstance(answer, Ended) and answer.outcome == "protocol"
    side.offers.done(other, Done(*offer))
    assert side.states() == (0, 1)
    assert len(side.record.writes) == 1


def test_an_offer_is_written_once_at_a_time() -> None:
    side, peer = Offering(), FakePeer()
    offer = side.offer()
    side.offers.pull(peer, pull(offer, 1), 0.0)
    side.offers.pull(peer, pull(offer, 2), 0.0)
    (answer,) = peer.link.take()
    assert isinstance(answer, Ended) and (answer.request, answer.outcome) == (2, "protocol")
    side.offers.written(side.record.writes[0], "")
    side.offers.pull(peer, pull(offer, 3), 0.0)
    assert len(side.record.writes) == 2


def test_a_lost_receiver_ends_what_it_was_taking_and_nothing_else() -> None:
    side, peer, other = Offering(), FakePeer("one"), FakePeer("two")
    taken, kept, open_ = side.offer(), side.offer(), side.offer()
    side.offers.pull(peer, pull(taken, 1), 0.0)
    side.offers.pull(other, pull(kept, 1), 0.0)
    side.offers.lost(peer)
    assert side.states() == (1, 1)
    assert side.record.aborted == [side.record.writes[0]]
    side.offers.withdraw(open_[0])
    side.offers.withdraw(open_[0])
    assert side.states() == (0, 1)


def test_reading_extends_an_offer_and_drives_the_data_plane_until_done() -> None:
    side, peer = Offering(), FakePeer()
    offer = side.offer(now=0.0)
    side.offers.reading(peer, Reading(1, *offer), 29.0)
    side.offers.reading(peer, Reading(1, *offer), 29.5)
    assert side.record.expected == 1
    side.offers.poll(38.9)
    assert side.states() == (0, 1)
    side.offers.done(peer, Done(*offer))
    side.offers.done(peer, Done(*offer))
    assert side.record.expected == 0 and side.arena.used_bytes == 0


def test_a_receiver_that_stopped_while_reading_is_given_up_at_the_deadline() -> None:
    side, peer = Offering(), FakePeer()
    offer = side.offer()
    side.offers.reading(peer, Reading(1, *offer), 1.0)
    side.offers.poll(11.0)
    assert side.arena.used_bytes == 0 and side.record.expected == 0
    side.offers.lost(peer)
    side.offers.done(peer, Done(*offer))
    assert side.record.expected == 0
    # What the reader finds when it goes on: another generation.
    assert int(side.arena.memory.table[slot_index(offer[0])]) != offer[1]


def test_stale_done_does_not_end_another_offer_of_the_same_slot() -> None:
    side, peer = Offering(), FakePeer()
    old = side.offer()
    side.offers.withdraw(old[0])
    new = side.offer()
    assert slot_index(old[0]) == slot_index(new[0]) and old != new
    side.offers.done(peer, Done(*old))
    side.offers.done(peer, Done(new[0], old[1]))
    assert side.states() == (1, 0)


def test_a_check_is_answered_once_per_offer_and_within_its_bytes() -> None:
    side, peer = Offering(), FakePeer()
    offer = side.offer(nbytes=100)
    side.offers.check(peer, Check(1, *offer, 0, 101))
    side.offers.check(peer, Check(2, offer[0], 1, 0, 100))
    assert peer.link.take() == [Checked(1, b""), Checked(2, b"")]
    side.offers.check(peer, Check(3, *offer, 10, 90))
    side.offers.check(peer, Check(4, *offer, 10, 90))
    ((request, slot, skip, nbytes),) = side.record.checks
    assert (request, skip, nbytes) == (3, 10, 90) and peer.link.take() == [Checked(4, b"")]
    side.offers.done(peer, Done(*offer))
    assert side.arena.used_bytes == GRANULE
    slot.release()
    assert side.arena.used_bytes == 0


def test_one_of_many_offers_that_is_never_read_blocks_none_of_the_others() -> None:
    side, peer = Offering(granules=200), FakePeer(granules=200)
    offers = [side.offer(now=0.0) for _ in range(200)]
    assert side.arena.free_bytes == 0
    for request, offer in enumerate(offers[1:]):
        side.offers.pull(peer, pull(offer, request), 1.0)
        side.offers.written(side.record.writes[-1], "")
        side.offers.done(peer, Done(*offer))
    assert side.arena.used_bytes == GRANULE
    side.offers.poll(30.0)
    assert side.arena.used_bytes == 0 and not side.offers.busy


def test_clock_jumps() -> None:
    side, peer = Offering(), FakePeer()
    offer = side.offer(now=100.0)
    side.offers.poll(-1e6)
    assert side.states() == (1, 0)
    side.offers.reading(peer, Reading(1, *offer), -1e6)
    side.offers.poll(-1e6 + TIMEOUT)
    side.offers.done(peer, Done(*offer))
    assert side.states() == (0, 0)
    side.offer(now=100.0)
    side.offers.poll(1e9)
    assert side.states() == (0, 0) and side.arena.used_bytes == 0


def test_close_ends_all_offers() -> None:
    side, peer = Offering(), FakePeer()
    side.offers.pull(peer, pull(side.offer(), 1), 0.0)
    side.offer()
    side.offers.close()
    assert side.states() == (0, 0) and side.arena.used_bytes == GRANULE
    side.offers.written(side.record.writes[0], "closed")
    assert side.arena.used_bytes == 0


def test_an_offer_cannot_be_held_beyond_its_time() -> None:
    side, peer = Offering(), FakePeer()
    offer = side.offer(now=0.0)
    for turn in range(9):
        side.offers.pull(peer, pull(offer, turn), float(turn))
        side.offers.written(side.record.writes[-1], "")
        side.offers.reading(peer, Reading(100 + turn, *offer), float(turn))
    assert side.record.expected == 1
    side.offers.poll(TIMEOUT)
    assert side.states() == (0, 0) and side.arena.used_bytes == 0 and side.record.expected == 0


@pytest.mark.parametrize("which", ["unknown", "ended", "another generation", "another peer's"])
def test_messages_about_what_a_peer_may_not_have_change_nothing(which: str) -> None:
    """However many there are: no state, memory or progress of the data plane is kept for any of them."""
    side, peer, owner = Offering(), FakePeer("one"), FakePeer("two")
    number, generation = side.offer()
    if which == "unknown":
        number += 1 << 30
    elif which == "ended":
        side.offers.done(peer, Done(number, generation))
    elif which == "another generation":
        generation += 1
    else:
        side.offers.reading(owner, Reading(1, number, generation), 0.0)
    before = side.states(), side.record.expected, side.arena.used_bytes
    for request in range(0, 50_000, 5):
        side.offers.reading(peer, Reading(request, number, generation), 1.0)
        side.offers.pull(peer, Pull(request + 1, number, generation, 0, 1, 0), 1.0)
        side.offers.check(peer, Check(request + 2, number, generation, 0, 1))
        side.offers.done(peer, Done(number, generation))
        side.offers.cancel(peer, Cancel(request + 3))
        answers = [type(m) for m in peer.link.take()]
        assert answers == [Ended, Ended, Checked, Ended]
    assert (side.states(), side.record.expected, side.arena.used_bytes) == before
    assert not side.record.writes and not side.record.checks and not side.record.aborted and not side.offers.writing
    kept = [held for held in vars(side.offers).values() if isinstance(held, dict) and held is not side.offers._offers]
    assert sum(map(len, kept)) == 1  # the highest request, until the link ends
    side.offers.lost(peer)
    assert not any(kept) and (side.states(), side.record.expected) == before[:2]
