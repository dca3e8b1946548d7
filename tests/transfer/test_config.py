# SPDX-License-Identifier: Apache-2.0
"""What may be set, and what cannot be together."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_epd.contract.errors import ConfigError
from dynamo_epd.transfer import TransferConfig, transfer_config
from dynamo_epd.transfer.config import GRANULE, MAX_ARENA_BYTES


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arena_bytes": GRANULE - 1}, "arena_bytes 4095"),
        ({"arena_bytes": MAX_ARENA_BYTES + 1}, "arena_bytes"),
        ({"offer_ttl": 0.0}, "offer_ttl 0.0"),
        ({"timeout": -1.0}, "timeout -1.0"),
        ({"kind": "disk"}, "memory kind 'disk' is not one of host, cuda"),
        ({"mode": "push"}, "transfer mode 'push' is not one of auto, map, read, write, stream"),
        ({"mode": "map", "kind": "cuda"}, "transfer mode 'map' is for host memory"),
        ({"mode": "stream", "kind": "cuda"}, "transfer mode 'stream' is for host memory"),
        ({"keep_bytes": -1}, "keep_bytes -1"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TransferConfig(**settings)


@pytest.mark.parametrize("mode", ["auto", "read", "write"])
def test_device_memory_has_the_data_planes_ways(mode: Any) -> None:
    assert TransferConfig(kind="cuda", mode=mode).mode == mode


def test_the_environment_counts_where_nothing_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_EPD_TRANSFER_MODE", "stream")
    monkeypatch.setenv("DYN_EPD_OFFER_TTL", "7")
    monkeypatch.setenv("DYN_EPD_VERIFY_TRANSFERS", "yes")
    found = transfer_config(timeout=3.0)
    assert (found.mode, found.offer_ttl, found.verify_transfers, found.timeout) == ("stream", 7.0, True, 3.0)
    assert transfer_config(mode="map").mode == "map"
    with pytest.raises(ConfigError, match="unknown transfer settings: speed"):
        transfer_config(offer_ttl=1.0, speed=1)
    monkeypatch.setenv("DYN_EPD_OFFER_TTL", "soon")
    with pytest.raises(ConfigError, match="DYN_EPD_OFFER_TTL='soon'"):
        transfer_config()
