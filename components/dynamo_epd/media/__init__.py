# SPDX-License-Identifier: Apache-2.0
"""From what a request names (``source``) to bytes (``fetch``) to ``image``, ``video``, ``audio`` or ``embedding``.

``fetch.fetch`` is a coroutine; the decoders are plain functions that burn CPU, thread-safe, to be run in a thread.
Everything that is wrong with the caller's media is ``InvalidRequest`` with the item's label in front.
"""
