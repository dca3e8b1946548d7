# SPDX-License-Identifier: Apache-2.0
"""The fetching machine where the bytes come over the link."""

from __future__ import annotations

import pytest

from dynamo_epd.contract.errors import TransferError
from dynamo_epd.transfer.config import GRANULE
from dynamo_epd.transfer.fetch import FetchState
from dynamo_epd.transfer.protocol import PAYLOAD_BYTES, Cancel, Check, Done, Ended, Payload, Pull

from .fakes import FakePeer, Receiving


@pytest.mark.parametrize("verify", [False, True])
def test_small_tensors_come_over_the_link(verify: bool) -> None:
    side, peer = Receiving(verify=verify), FakePeer(way="stream")
    ref = side.ref()
    fetch = side.begin(peer, ref)
    assert peer.link.take() == [Pull(1, ref.offer, 77, 0, GRANULE, None, not verify)]
    assert side.record.expected == 0  # there is nothing to drive
    side.fetches.payload(peer, Payload(1, GRANULE))
    assert fetch.incoming is not None and fetch.state is FetchState.MOVING
    side.fetches.received(fetch)
    if verify:
        assert peer.link.take() == [Check(1, ref.offer, 77, 0, GRANULE)]
        side.fetches.summed(fetch, b"sum")
        side.fetches.checked(peer, b"sum", 1)
    # Where they are the last word, the peer knows that its offer is over.
    assert peer.link.take() == ([Done(ref.offer, 77)] if verify else [])
    assert side.reasons() == ["ok"] and side.at_rest()


def test_what_is_too_large_for_the_link_is_written() -> None:
    granules = PAYLOAD_BYTES // GRANULE
    side, peer = Receiving(2 * granules + 1), FakePeer(way="stream", granules=2 * granules + 1)
    small = side.begin(peer, side.ref(granules))
    large = side.begin(peer, side.ref(granules + 1, index=granules))
    assert [message.target for message in peer.link.take()] == [None, granules * GRANULE]
    assert (small.granted, large.granted, side.record.expected) == (False, True, 1)


@pytest.mark.parametrize("begun", [False, True])
def test_a_fetch_over_the_link_that_is_given_up_frees_its_memory_at_once(begun: bool) -> None:
    side, peer = Receiving(), FakePeer(way="stream")
    ref = side.ref()
    fetch = side.begin(peer, ref)
    peer.link.take()
    if begun:
        side.fetches.payload(peer, Payload(1, GRANULE))
    incoming = fetch.incoming
    side.pass_time(10.0)
    assert side.reasons() == ["timeout"] and side.at_rest()
    assert peer.link.take() == [Cancel(1), Done(ref.offer, 77)]
    if incoming is not None:
        assert incoming.into is None  # what still comes goes nowhere
    else:
        side.fetches.payload(peer, Payload(1, GRANULE))
        assert side.record.discarded == [GRANULE]
    side.fetches.ended(peer, Ended(1, "cancelled"), side.now)
    assert side.at_rest()


def test_bytes_that_nobody_asked_for_are_thrown_away() -> None:
    side, peer, other = Receiving(), FakePeer(way="stream"), FakePeer("other", way="stream")
    fetch = side.begin(peer)
    side.fetches.payload(other, Payload(1, GRANULE))
    side.fetches.payload(peer, Payload(2, GRANULE))
    assert side.record.discarded == [GRANULE, GRANULE] and fetch.incoming is None
    side.fetches.payload(peer, Payload(1, GRANULE))
    side.fetches.payload(peer, Payload(1, GRANULE))  # the same again, before the first are there
    assert side.record.discarded == 3 * [GRANULE]
    side.fetches.received(fetch)
    side.fetches.payload(peer, Payload(1, GRANULE))
    assert side.record.discarded == 4 * [GRANULE] and side.reasons() == ["ok"] and side.at_rest()


@pytest.mark.parametrize("nbytes", [GRANULE - 1, GRANULE + 1])
def test_another_number_of_bytes_than_was_asked_for_is_refused(nbytes: int) -> None:
    side, peer = Receiving(), FakePeer(way="stream")
    fetch = side.begin(peer)
    with pytest.raises(TransferError, match=f"{nbytes} bytes came where {GRANULE} were asked for") as caught:
        side.fetches.payload(peer, Payload(1, nbytes))
    side.fetches.lost(peer, caught.value, False, side.now)
    assert side.reasons() == ["protocol"] and side.at_rest() and fetch.incoming is None


@pytest.mark.parametrize(("outcome", "reason"), [("expired", "expired"), ("failed", "peer_lost")])
def test_a_pull_over_the_link_is_refused(outcome: str, reason: str) -> None:
    side, peer = Receiving(), FakePeer(way="stream")
    ref = side.ref()
    side.begin(peer, ref)
    peer.link.take()
    assert side.fetches.ended(peer, Ended(1, outcome, "why"), side.now)  # type: ignore[arg-type]
    assert side.reasons() == [reason] and side.at_rest()
    assert peer.link.take() == [Done(ref.offer, 77)]  # there is nothing left to cancel


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("dead", [False, True])
def test_a_peer_that_is_lost_while_its_bytes_come_over_the_link(begun: bool, dead: bool) -> None:
    side, peer = Receiving(), FakePeer(way="stream")
    fetch = side.begin(peer)
    if begun:
        side.fetches.payload(peer, Payload(1, GRANULE))
    side.fetches.lost(peer, TransferError("peer_lost", "gone"), dead, side.now)
    assert side.reasons() == ["peer_lost"] and side.at_rest() and fetch.incoming is None
