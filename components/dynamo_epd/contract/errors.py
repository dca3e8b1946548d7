# SPDX-License-Identifier: Apache-2.0
"""The errors that cross a package boundary inside dynamo-epd.

They carry no Dynamo type, so that ``contract``, ``models``, ``media``, ``transfer`` and ``engine`` stay free of it;
``workers`` turns each into the exception (and so the HTTP status) that the frontend understands.
"""

from __future__ import annotations


class EpdError(Exception):
    """Base of all errors raised on purpose by this package."""


class InvalidRequest(EpdError):
    """The caller's input cannot be served as it is (HTTP 400).

    Args:
        message: what is wrong and what to do, in one sentence.
        item: which media item, as the caller would name it (``"image 2"``), or None for the whole request.
    """

    def __init__(self, message: str, *, item: str | None = None):
        super().__init__(f"{item}: {message}" if item else message)
        self.item = item


class InvalidMetadata(InvalidRequest):
    """Multimodal metadata that breaks a rule of ``MultimodalInput`` or of the layout.

    Args:
        field: name of the offending field, with an index where there is one (``multimodal_lengths[1]``).
    """

    def __init__(self, field: str, message: str, *, item: str | None = None):
        super().__init__(f"{field}: {message}", item=item)
        self.field = field


class Unavailable(EpdError):
    """A worker or peer that this request needs is not there; trying again later may work (HTTP 503).

    Args:
        reason: a short label for metrics.
    """

    reason = "unavailable"

    def __init__(self, message: str, *, reason: str | None = None):
        super().__init__(message)
        if reason is not None:
            self.reason = reason


class DeadlineExceeded(Unavailable):
    """A remote step did not finish before its deadline."""

    reason = "deadline"


class TransferError(Unavailable):
    """Moving bytes between two processes failed; nothing that was received may be used.

    Args:
        reason: a short label from a closed list, used by metrics (``timeout``, ``peer_lost``, ``expired``,
            ``arena_full``, ``too_large``, ``checksum``, ``generation``, ``protocol``, ``cancelled``).
    """

    def __init__(self, reason: str, message: str):
        super().__init__(message, reason=reason)


class ConfigError(EpdError):
    """A flag, a YAML key or a model directory that cannot be used as given; raised at start-up."""
