# SPDX-License-Identifier: Apache-2.0
"""From our errors to the exceptions by which Dynamo's frontend chooses an HTTP status.

Seen with Dynamo 1.6.1: ``InvalidArgument`` is 400 with its message. ``HttpError(503)`` is 503 in the frontend's own
words and leaves the worker in routing, while Dynamo's connection errors (``CannotConnect``, ``EngineShutdown``, ...)
take it out for a while, so a fault of one request must never be raised as one of those. A plain ``ValueError`` loses
its message, anything else is a 500.
"""

from __future__ import annotations

import logging

from dynamo.llm.exceptions import DynamoException, HttpError, InvalidArgument, Unknown

from ..contract.errors import InvalidMetadata, InvalidRequest, Unavailable
from ..contract.handoff import HandoffError

logger = logging.getLogger(__name__)


def outcome(error: Exception) -> str:
    """The word for ``error`` in metrics and logs."""
    if isinstance(error, (InvalidRequest, InvalidArgument)):
        return "invalid"
    return "unavailable" if isinstance(error, Unavailable) else "failed"


def reason(error: Exception) -> str:
    """Why, from a closed list: ``metadata``, ``item``, ``request``, ``internal``, or the reason of ``Unavailable``."""
    if isinstance(error, InvalidMetadata):
        return "metadata"
    if isinstance(error, InvalidRequest):
        return "item" if error.item else "request"
    if isinstance(error, Unavailable):
        return error.reason
    return "request" if isinstance(error, InvalidArgument) else "internal"


def to_dynamo(error: Exception, request_id: str) -> Exception:
    """The exception to raise towards the frontend for ``error``; logs what the client will not be told."""
    if isinstance(error, (DynamoException, HttpError)):
        return error
    if isinstance(error, InvalidRequest):
        return InvalidArgument(str(error))
    if isinstance(error, Unavailable):
        logger.warning("request %s: %s", request_id, error)
        return HttpError(503, str(error))
    logger.error("request %s failed", request_id, exc_info=error)
    return Unknown(f"{type(error).__name__}: see the worker's log for request {request_id}")


def to_handoff_error(error: Exception, request_id: str) -> HandoffError:
    """``error`` as the encode worker sends it downstream, where prefill raises it again."""
    if isinstance(error, InvalidRequest):
        return HandoffError(400, str(error))
    if isinstance(error, Unavailable):
        logger.warning("request %s: %s", request_id, error)
        return HandoffError(503, str(error))
    logger.error("request %s failed", request_id, exc_info=error)
    return HandoffError(503, f"the encode worker failed on request {request_id}: {type(error).__name__}")
