# SPDX-License-Identifier: Apache-2.0
"""What the encode worker's health check encodes, and where it sends it: a picture, and a peer of its own."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import soundfile
import torch
from PIL import Image

from ..contract.errors import TransferError
from ..contract.handoff import Modality
from ..media.source import MediaReference
from ..models.base import Family
from ..transfer import Endpoint, TransferConfig, open_transfer
from ..transfer.base import Slot, Transfer
from ..transfer.config import GRANULE

DIGEST = "canary"


def canary_item(family: Family) -> tuple[MediaReference, list[int], bytes]:
    """A small item that ``family`` takes, the ids that stand for it in a prompt, and its bytes.

    A picture, or a sound where the model hears only.
    """
    markers = {modality: marker for marker, modality in reversed(family.markers())}
    modality: Modality = "image" if "image" in markers else "audio"
    buffer = io.BytesIO()
    if modality == "image":
        Image.new("RGB", (64, 64), (120, 60, 30)).save(buffer, "PNG")
    else:
        rate = family.sampling_rate or 16_000
        soundfile.write(buffer, np.sin(np.arange(rate, dtype=np.float32) / 20), rate, format="WAV")
    ids = family.tokenizer(markers[modality], add_special_tokens=False)["input_ids"]
    return MediaReference(modality, 0, DIGEST, ""), list(ids), buffer.getvalue()


class CanaryPeer:
    """A second, small endpoint in this process that fetches what the worker offers, as prefill would.

    Between two endpoints of one process, ``auto`` would always map the memory; what a peer on another host may need of
    NIXL is a write, so that is what it does here.

    Args:
        config: of the worker's own endpoint.
    """

    def __init__(self, config: TransferConfig):
        mode = "write" if config.mode == "auto" else config.mode
        self._config = replace(config, port=0, keep_bytes=0, mode=mode, agent_prefix=f"{config.agent_prefix}-{DIGEST}")
        self._endpoint: Endpoint | None = None

    async def take(
        self, transfer: Transfer, slots: Sequence[Slot], shapes: Sequence[tuple[tuple[int, ...], str]]
    ) -> None:
        """Offer ``slots``, fetch them, and compare.

        Args:
            shapes: shape and dtype of the tensor in each slot.

        Raises:
            TransferError: they did not arrive, or not as they are; the next call starts with an endpoint of its own.
        """
        nbytes = sum(-(-slot.nbytes // GRANULE) for slot in slots) * GRANULE
        refs = []
        try:
            if self._endpoint is None:
                self._endpoint = await open_transfer(replace(self._config, arena_bytes=nbytes + GRANULE))
            for slot, (shape, dtype) in zip(slots, shapes, strict=True):
                refs.append(transfer.offer(slot, digest=DIGEST, shape=shape, dtype=dtype))
            for slot, ref in zip(slots, refs, strict=True):
                copy = await self._endpoint.fetch(ref)
                try:
                    sent, come = (s.tensor(ref.shape, ref.dtype).view(torch.uint8) for s in (slot, copy))
                    if not torch.equal(sent, come):
                        raise TransferError("checksum", "the canary's embedding arrived changed")
                finally:
                    copy.release()
        except BaseException:
            await self.close()
            raise
        finally:
            for ref in refs:
                transfer.withdraw(ref)

    async def close(self) -> None:
        """Close the endpoint; ``take`` opens another one."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await endpoint.close()
