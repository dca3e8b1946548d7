# SPDX-License-Identifier: Apache-2.0
"""A graph of fake services: Front -> Middle -> Back."""

from __future__ import annotations

from dynamo_epd.serve.graph import Service


def _service(name: str, **options) -> Service:
    return Service(name, "fake_service", args=("--name", name), parser="fake_service:parser", **options)


Front = _service("Front", entry=True, aliases={"port": "http-port"})
Middle = _service("Middle", health=True)
Back = _service("Back", health=True)
Front.link(Middle).link(Back)
