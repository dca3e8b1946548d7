# SPDX-License-Identifier: Apache-2.0
"""The futures of those who wait for slots, and what a reference must be for anybody to wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

from ..contract.errors import TransferError
from ..contract.handoff import TensorRef
from .arena import Content, Hold

Slots = TypeVar("Slots", Hold, list[Hold])


def resolver(future: asyncio.Future[Slots]) -> Callable[[Slots | TransferError], None]:
    """What fills ``future``; slots that come when nobody waits any more are given back."""

    def done(result: Slots | TransferError) -> None:
        if isinstance(result, TransferError):
            if not future.done():
                future.set_exception(result)
        elif future.done():
            release([result] if isinstance(result, Hold) else result)
        else:
            future.set_result(result)

    return done


def abandon(future: asyncio.Future[Slots]) -> None:
    """Wait for ``future`` no more, and give back what it holds."""
    if not future.cancel() and not future.cancelled() and future.exception() is None:
        result = future.result()
        release([result] if isinstance(result, Hold) else result)


def release(slots: Iterable[Hold]) -> None:
    """Give all of them back."""
    for slot in slots:
        slot.release()


def require_rows(ref: TensorRef, first: int) -> None:
    """Raises ``TransferError``: there is no row ``first``, or the numbers are none that an offer can have."""
    if not 0 <= first < ref.shape[0] or max(ref.offer, ref.generation) >> 63:
        raise TransferError("protocol", f"row {first} of {ref} cannot be fetched")


def require_same(ref: TensorRef, content: Content | None, nbytes: int) -> None:
    """Raises ``TransferError``: what is known under the digest of ``ref`` is another tensor.

    Args:
        content, nbytes: of what is known; None where only its size is.
    """
    same = (content.shape, content.dtype) == (ref.shape, ref.dtype) if content else nbytes == ref.nbytes
    if not same:
        known = f"{content.dtype} {content.shape}" if content else f"{nbytes} bytes"
        raise TransferError(
            "protocol", f"digest {ref.digest} is known here as {known}, and offered as {ref.dtype} {ref.shape}"
        )
