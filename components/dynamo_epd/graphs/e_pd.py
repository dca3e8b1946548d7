# SPDX-License-Identifier: Apache-2.0
"""Encode on workers of its own; prefill and decode together."""

from __future__ import annotations

from dynamo_epd.serve.services import AggWorker, EncodeWorker, Frontend

Frontend.link(EncodeWorker).link(AggWorker)
