# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode together, for text. Media need an encode worker: ``graphs.e_pd``."""

from __future__ import annotations

from dynamo_epd.serve.services import AggWorker, Frontend

# A worker that routes media to an encoder makes the frontend refuse every request until there is one.
AggWorker.args += ("--no-route-to-encoder",)
Frontend.link(AggWorker)
