# SPDX-License-Identifier: Apache-2.0
"""What the rest of the package may ask of the transfer layer. ``transfer.open_transfer`` gives one per process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from ..contract.handoff import TensorRef


class Slot(Protocol):
    """A counted hold on one allocation of the arena. The memory is reused when the last hold is released."""

    nbytes: int

    def tensor(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        """A view of the first bytes as a contiguous tensor; valid until ``release``. ``dtype`` as in ``TensorRef``."""
        ...

    def hold(self) -> Slot:
        """Another hold on the same allocation."""
        ...

    def release(self) -> None:
        """Give this hold back. Safe to call twice."""
        ...


class Transfer(Protocol):
    """One arena, one NIXL agent and one control endpoint. All methods are called on one event loop."""

    async def allocate(self, nbytes: int, *, timeout: float | None = None) -> Slot:
        """Memory of the arena, evicting what ``keep`` stored and nobody holds, least recently used first.

        Args:
            timeout: seconds to wait for memory to be freed; None for the configured default.

        Raises:
            TransferError: ``too_large`` at once when it can never fit; ``arena_full`` after ``timeout``.
        """
        ...

    def offer(self, slot: Slot, *, digest: str, shape: Sequence[int], dtype: str) -> TensorRef:
        """Let one receiver fetch the tensor that ``slot`` holds.

        The offer has its own hold on the slot; it ends when the receiver has taken (or declined) it, when it is
        withdrawn, or when its time to live is over.
        """
        ...

    @property
    def offering(self) -> bool:
        """Whether anything is offered that is neither taken nor expired."""
        ...

    def withdraw(self, ref: TensorRef) -> None:
        """End an offer of this process early. Safe when it has ended already."""
        ...

    async def fetch(self, ref: TensorRef, *, first: int = 0, timeout: float | None = None) -> Slot:
        """Bring ``tensor[first:]`` (along the first dimension) of the offered tensor into this process's arena.

        With ``first == 0``, what ``keep`` holds under ``ref.digest`` is given without moving a byte, and concurrent
        fetches of one digest share one transfer. The offer is over afterwards, whatever happened.

        Raises:
            TransferError: the bytes did not arrive whole and unchanged in time; nothing is held then.
        """
        ...

    async def fetch_all(self, refs: Sequence[TensorRef], *, first: int = 0, timeout: float | None = None) -> list[Slot]:
        """Fetch several tensors as ``fetch`` does one; memory for them is taken all at once, and all arrive or none."""
        ...

    def decline(self, ref: TensorRef) -> None:
        """Tell the offering process that nobody will fetch ``ref``; where it cannot be told, the offer expires."""
        ...

    def keep(self, digest: str, slot: Slot) -> None:
        """Remember the content of ``slot`` under ``digest`` for as long as its memory is not needed otherwise."""
        ...

    def find(self, digest: str) -> Slot | None:
        """A new hold on what is kept under ``digest``, now the most recently used, or None."""
        ...

    async def close(self) -> None:
        """Withdraw all offers, cancel all fetches, deregister the memory. Safe to call twice."""
        ...
