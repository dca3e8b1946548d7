# SPDX-License-Identifier: Apache-2.0
"""Encode, prefill and decode, each on workers of its own."""

from __future__ import annotations

from dynamo_epd.serve.services import DecodeWorker, EncodeWorker, Frontend, PrefillWorker

Frontend.link(EncodeWorker).link(PrefillWorker).link(DecodeWorker)
