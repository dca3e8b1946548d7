# SPDX-License-Identifier: Apache-2.0
"""The fetching machine, with messages and a clock put in by hand."""

from __future__ import annotations

import pytest

from dynamo_epd.contract.errors import TransferError
from dynamo_epd.transfer.arena import Hold
from dynamo_epd.transfer.config import GRANULE
from dynamo_epd.transfer.fetch import FetchState
from dynamo_epd.transfer.protocol import Cancel, Check, Done, Ended, Pull, Reading

from .fakes import FakePeer, Receiving


def test_write_from_the_grant_to_the_end() -> None:
    side, peer = Receiving(), FakePeer()
    ref = side.ref()
    (fetch,) = side.start(ref)
    assert fetch.state is FetchState.PEER and side.record.connecting == [fetch]
    side.fetches.connected(fetch, peer)
    assert fetch.slot is not None
    target = fetch.slot.allocation.index * GRANULE
    assert peer.link.take() == [Pull(1, ref.offer, 77, 0, GRANULE, target)]
    assert side.record.expected == 1
    side.fetches.written("peer", 1)
    assert peer.link.take() == [Done(ref.offer, 77)]
    (slot,) = side.results
    assert isinstance(slot, Hold) and slot.allocation.content is not None
    assert (slot.allocation.content.shape, slot.allocation.content.dtype) == ((4, 256), "float32")
    assert side.reasons() == ["ok"] and side.at_rest() and side.record.ended == [None]


@pytest.mark.parametrize("way", ["map", "read"])
def test_read_from_the_start_to_the_end(way: str) -> None:
    side, peer = Receiving(), FakePeer(way=way)
    ref = side.ref()
    fetch = side.begin(peer, ref)
    assert side.record.moving == [fetch]
    assert peer.link.take() == ([Reading(1, ref.offer, 77)] if way == "read" else [])
    side.fetches.moved(fetch, None)
    assert peer.link.take() == [Done(ref.offer, 77)]
    assert side.reasons() == ["ok"] and side.at_rest()


def test_some_of_the_rows() -> None:
    side, peer = Receiving(), FakePeer()
    ref = side.ref(granules=2)
    (fetch,) = side.start(ref, skip=3 * 1024)
    side.fetches.connected(fetch, peer)
    (message,) = peer.link.take()
    assert isinstance(message, Pull) and (message.skip, message.nbytes) == (3 * 1024, 5 * 1024)
    side.fetches.written("peer", 1)
    (slot,) = side.results
    assert isinstance(slot, Hold) and slot.allocation.content is not None
    assert slot.allocation.content.shape == (5, 256)


def test_a_write_that_is_late_finds_its_slot_in_quarantine() -> None:
    side, peer = Receiving(), FakePeer()
    fetch = side.begin(peer)
    side.pass_time(9.9)
    assert not side.results
    side.pass_time(0.1)
    assert side.reasons() == ["timeout"]
    assert peer.link.take()[1:] == [Cancel(1), Done(fetch.ref.offer, 77)]
    assert side.arena.quarantined_bytes == GRANULE and side.record.expected == 1
    # For as long as it takes: no time that passes proves anything.
    side.pass_time(1e6)
    assert side.arena.quarantined_bytes == GRANULE
    side.fetches.written("peer", 1)
    assert not side.results and side.at_rest()


def test_an_arena_full_of_quarantined_slots_gives_none_of_them_out() -> None:
    side, peer = Receiving(granules=2), FakePeer()
    side.begin(peer)
    side.begin(peer)
    side.pass_time(10.0)
    assert side.reasons() == ["timeout", "timeout"]
    side.start(side.ref(), timeout=5.0)
    side.pass_time(5.0)
    (error,) = side.results
    assert isinstance(error, TransferError) and error.reason == "arena_full" and "8192 in quarantine" in str(error)
    side.results.clear()
    side.fetches.ended(peer, Ended(2, "cancelled"), side.now)
    side.start(side.ref())
    assert len(side.record.connecting) == 3


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        ("cancelled", "cancelled"),
        ("expired", "expired"),
        ("generation", "generation"),
        ("protocol", "protocol"),
    ],
)
def test_the_peer_refuses(outcome: str, reason: str) -> None:
    side, peer = Receiving(), FakePeer()
    side.begin(peer)
    side.fetches.ended(peer, Ended(1, outcome, "because"), side.now)  # type: ignore[arg-type]
    (error,) = side.results
    assert isinstance(error, TransferError) and (error.reason, str(error)) == (reason, "because")
    side.results.clear()
    assert side.at_rest()


def test_after_a_failed_write_what_is_still_in_the_sockets_finds_the_slot_unused() -> None:
    side, peer = Receiving(settle=3.0), FakePeer()
    side.begin(peer)
    side.fetches.ended(peer, Ended(1, "failed", "broken"), side.now)
    assert side.reasons() == ["peer_lost"]
    side.pass_time(2.9)
    assert side.arena.quarantined_bytes == GRANULE and side.record.expected == 1
    side.pass_time(0.1)
    assert side.at_rest()


def test_a_peer_that_died_during_a_write() -> None:
    side, peer = Receiving(settle=3.0), FakePeer()
    side.begin(peer)
    side.fetches.lost(peer, TransferError("peer_lost", "reset"), True, side.now)
    assert side.reasons() == ["peer_lost"]
    assert side.arena.quarantined_bytes == GRANULE
    side.pass_time(3.0)
    assert side.at_rest()


def test_a_peer_that_cannot_be_reached_is_not_known_to_be_dead() -> None:
    side, peer, again = Receiving(), FakePeer(), FakePeer()
    side.begin(peer)
    side.fetches.lost(peer, TransferError("peer_lost", "timed out"), False, side.now)
    assert side.reasons() == ["peer_lost"]
    side.pass_time(1e6)
    assert side.arena.quarantined_bytes == GRANULE
    # It was alive all the time: it is asked for its last word over the new link.
    side.fetches.met(again, side.now)
    assert again.link.take() == [Cancel(1)]
    side.fetches.ended(again, Ended(1, "cancelled"), side.now)
    assert side.at_rest()


def test_another_process_at_the_same_address_proves_the_first_one_dead() -> None:
    side, peer = Receiving(settle=3.0), FakePeer("old")
    side.begin(peer, side.ref(agent="old"))
    side.fetches.lost(peer, TransferError("peer_lost", "timed out"), False, side.now)
    side.reasons()
    elsewhere = FakePeer("third", address="host:2")
    side.fetches.met(elsewhere, side.now)
    side.pass_time(3.0)
    assert side.arena.quarantined_bytes == GRANULE and not elsewhere.link.sent
    side.fetches.met(FakePeer("new"), side.now)
    side.pass_time(3.0)
    assert side.at_rest()


def test_a_restarted_peer_is_not_taken_for_the_one_that_offered() -> None:
    side = Receiving()
    (fetch,) = side.start(side.ref(agent="old"))
    side.fetches.connected(fetch, FakePeer("new"))
    (error,) = side.results
    assert isinstance(error, TransferError) and error.reason == "peer_lost" and "new answers at host:1" in str(error)
    side.results.clear()
    assert side.at_rest()


def test_a_read_that_hangs_keeps_its_slot_until_the_data_plane_lets_go() -> None:
    side, peer = Receiving(), FakePeer(way="read")
    fetch = side.begin(peer)
    side.pass_time(10.0)
    assert side.reasons() == ["timeout"] and side.arena.quarantined_bytes == GRANULE
    # The peer helps until the read is over.
    assert peer.link.take() == [Reading(1, fetch.ref.offer, 77)]
    side.fetches.moved(fetch, None)
    assert peer.link.take() == [Done(fetch.ref.offer, 77)]
    assert side.at_rest() and not side.results


def test_a_read_of_what_cannot_be_read_fails_at_once() -> None:
    side, peer = Receiving(), FakePeer(way="read")
    fetch = side.begin(peer)
    assert side.fetches.ended(peer, Ended(1, "expired", "offer 7 has ended"), side.now)
    assert side.reasons() == ["expired"] and side.arena.quarantined_bytes == GRANULE
    side.fetches.moved(fetch, TransferError("generation", "no"))
    assert side.at_rest() and not side.results


def test_a_read_that_is_never_helped_ends_with_the_link() -> None:
    side, peer = Receiving(settle=3.0), FakePeer(way="read")
    fetch = side.begin(peer)
    side.pass_time(10.0)
    side.pass_time(2.9)
    assert not peer.link.closed and side.fetches.busy
    side.pass_time(0.2)
    assert peer.link.closed
    side.fetches.lost(peer, TransferError("peer_lost", "closed"), False, side.now)
    assert side.arena.quarantined_bytes == GRANULE  # the data plane is not done with it yet
    side.fetches.moved(fetch, TransferError("peer_lost", "the peer is gone"))
    assert side.reasons() == ["timeout"] and side.at_rest()


def test_last_words_about_nothing_change_nothing() -> None:
    """However many there are, and whoever sends them."""
    side, peer, other = Receiving(), FakePeer(), FakePeer("other")
    pulled, over = side.begin(peer), side.begin(peer)
    side.fetches.ended(peer, Ended(over.request, "expired"), side.now)
    assert side.reasons() == ["expired"]
    for _ in range(10_000):
        for source, request in ((peer, 1 << 40), (peer, over.request), (other, pulled.request)):
            assert not side.fetches.ended(source, Ended(request, "failed"), side.now)
            side.fetches.checked(source, bytes(32), request)
            side.fetches.written(source.agent, request)
    assert not side.results and pulled.state is FetchState.MOVING and not other.link.sent
    side.fetches.written("peer", pulled.request)
    assert side.reasons() == ["ok"] and side.at_rest()
    assert not any(held for held in vars(side.fetches).values() if isinstance(held, dict))


def test_a_mapped_copy_does_not_need_its_peer_alive() -> None:
    side, peer = Receiving(), FakePeer(way="map")
    fetch = side.begin(peer)
    side.fetches.lost(peer, TransferError("peer_lost", "reset"), True, side.now)
    assert not side.results
    side.fetches.moved(fetch, None)
    assert side.reasons() == ["ok"] and side.at_rest()


@pytest.mark.parametrize("reason", ["generation", "expired", "peer_lost"])
def test_a_read_that_fails(reason: str) -> None:
    side, peer = Receiving(), FakePeer(way="read")
    fetch = side.begin(peer)
    side.fetches.moved(fetch, TransferError(reason, "no"))
    assert side.reasons() == [reason] and side.at_rest()


def test_stale_and_duplicate_last_words_change_nothing() -> None:
    side, peer, other = Receiving(), FakePeer(), FakePeer("other")
    side.fetches.written("peer", 1)
    side.fetches.ended(peer, Ended(1, "failed"), side.now)
    fetch = side.begin(peer)
    side.fetches.written("other", 1)
    side.fetches.ended(other, Ended(1, "failed"), side.now)
    side.fetches.written("peer", 2)
    side.fetches.ended(peer, Ended(2, "failed"), side.now)
    assert not side.results and fetch.state is FetchState.MOVING
    side.fetches.written("peer", 1)
    side.fetches.written("peer", 1)
    side.fetches.ended(peer, Ended(1, "failed"), side.now)
    assert side.reasons() == ["ok"] and side.at_rest()


def test_an_offer_outside_the_peers_arena_is_refused() -> None:
    side, peer = Receiving(), FakePeer(granules=4, way="read")
    side.begin(peer, side.ref(index=4))
    side.begin(peer, side.ref(granules=2, index=3))
    assert side.reasons() == ["protocol", "protocol"] and not side.record.moving and side.at_rest()
    side.begin(peer, side.ref(granules=2, index=2))
    assert len(side.record.moving) == 1


def test_oversize_is_refused_at_once() -> None:
    side = Receiving(granules=2)
    with pytest.raises(TransferError) as caught:
        side.start(side.ref(granules=3))
    assert caught.value.reason == "too_large" and side.at_rest()


def test_requests_are_numbered_in_the_order_of_their_pulls() -> None:
    side, peer = Receiving(granules=2), FakePeer()
    (first,) = side.start(side.ref())
    (second,) = side.start(side.ref())
    side.fetches.connected(second, peer)
    side.fetches.connected(first, peer)
    assert [m.request for m in peer.link.take() if isinstance(m, Pull)] == [1, 2]
    side.fetches.written("peer", 1)
    assert second.state is FetchState.OVER and first.state is FetchState.MOVING


def test_callers_of_one_transfer_have_deadlines_of_their_own() -> None:
    side, peer = Receiving(), FakePeer()
    (fetch,) = side.start(side.ref(digest="d"), timeout=10.0)
    assert side.fetches.joinable("d") is fetch
    side.fetches.watch(fetch, side.watcher(2.0))
    leaving = side.watcher(20.0)
    side.fetches.watch(fetch, leaving)
    side.fetches.connected(fetch, peer)
    side.pass_time(2.0)
    assert side.reasons() == ["timeout"]
    side.fetches.unwatch(fetch, leaving)
    side.fetches.unwatch(fetch, leaving)
    assert fetch.state is FetchState.MOVING
    side.fetches.written("peer", 1)
    assert side.reasons() == ["ok"] and side.at_rest() and side.fetches.joinable("d") is None


def test_the_last_caller_to_leave_cancels() -> None:
    side, peer = Receiving(), FakePeer()
    fetch = side.begin(peer)
    (watcher,) = fetch.watchers
    side.fetches.unwatch(fetch, watcher)
    assert peer.link.take()[1:] == [Cancel(1), Done(fetch.ref.offer, 77)]
    assert side.arena.quarantined_bytes == GRANULE
    side.fetches.ended(peer, Ended(1, "cancelled"), side.now)
    assert side.at_rest() and not side.results


def test_callers_that_leave_while_waiting_for_memory() -> None:
    side = Receiving(granules=2)
    held = side.arena.take([2 * GRANULE])
    assert held is not None
    first, second = side.start(side.ref(), side.ref())
    side.fetches.unwatch(first, next(iter(first.watchers)))
    assert side.arena.waiting == 1
    held[0].release()
    # The memory came for both at once; what the first no longer needs is free again.
    assert second.state is FetchState.PEER and side.arena.used_bytes == GRANULE
    side.fetches.unwatch(second, next(iter(second.watchers)))
    assert side.at_rest()


def test_a_group_that_leaves_while_waiting_for_memory_waits_no_more() -> None:
    side = Receiving(granules=1)
    held = side.arena.take([1])
    assert held is not None
    (fetch,) = side.start(side.ref())
    side.fetches.unwatch(fetch, next(iter(fetch.watchers)))
    held[0].release()
    assert side.at_rest()


def test_checksums() -> None:
    side, peer = Receiving(verify=True), FakePeer(way="read")
    for theirs, expected in ((b"a" * 32, "ok"), (b"b" * 32, "checksum"), (b"", "expired")):
        for mine_first in (True, False):
            fetch = side.begin(peer)
            side.fetches.moved(fetch, None)
            assert fetch.state is FetchState.CHECKING and side.record.summing.pop() is fetch
            assert [m.request for m in peer.link.take() if isinstance(m, Check)] == [fetch.request]
            if mine_first:
                side.fetches.summed(fetch, b"a" * 32)
            side.fetches.checked(FakePeer("other"), b"a" * 32, fetch.request)
            side.fetches.checked(peer, theirs, fetch.request)
            if not mine_first:
                assert not side.results or expected == "expired"
                side.fetches.summed(fetch, b"a" * 32)
            assert side.reasons() == [expected] and side.at_rest()
            side.fetches.checked(peer, theirs, fetch.request)
            assert not side.results


def test_a_checksum_under_way_keeps_the_slot() -> None:
    side, peer = Receiving(verify=True), FakePeer(way="read")
    fetch = side.begin(peer)
    side.fetches.moved(fetch, None)
    side.pass_time(10.0)
    assert side.reasons() == ["timeout"] and side.arena.used_bytes == GRANULE
    side.fetches.summed(fetch, b"")
    assert side.at_rest()


def test_a_peer_that_does_not_read_what_it_is_sent() -> None:
    side, peer = Receiving(), FakePeer()
    peer.link.blocked = True
    side.begin(peer)
    assert side.reasons() == ["peer_lost"]
    # Whether the pull went out cannot be known any more.
    assert side.arena.quarantined_bytes == GRANULE
    side.fetches.lost(peer, TransferError("peer_lost", "reset"), True, side.now)
    side.pass_time(3.0)
    assert side.at_rest()


def test_peers_that_cannot_be_reached() -> None:
    side = Receiving()
    (fetch,) = side.start(side.ref())
    side.fetches.failed(fetch, TransferError("peer_lost", "nobody there"))
    side.fetches.connected(fetch, FakePeer())
    assert side.reasons() == ["peer_lost"] and side.at_rest()


def test_clock_jumps() -> None:
    side, peer = Receiving(), FakePeer()
    side.begin(peer)
    side.pass_time(-1e6)
    assert not side.results
    side.fetches.written("peer", 1)
    assert side.reasons() == ["ok"]
    side.begin(peer)
    side.pass_time(1e9)
    assert side.reasons() == ["timeout"] and side.arena.quarantined_bytes == GRANULE
    side.fetches.ended(peer, Ended(2, "cancelled"), side.now)
    assert side.at_rest()


def test_close_fails_what_is_in_flight() -> None:
    side, peer = Receiving(), FakePeer()
    side.begin(peer)
    side.start(side.ref())
    side.fetches.close()
    assert side.reasons() == ["cancelled", "cancelled"]
    side.fetches.ended(peer, Ended(1, "cancelled"), side.now)
    assert side.at_rest()
