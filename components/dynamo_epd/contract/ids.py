# SPDX-License-Identifier: Apache-2.0
"""Token ids as an array, checked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .errors import InvalidMetadata
from .multimodal_input import INT32_MAX


def id_array(field: str, values: Sequence[int] | np.ndarray) -> np.ndarray:
    """A new int32 array ``[n]`` of token ids.

    Raises:
        InvalidMetadata: ``values`` (called ``field`` in the message) is not a flat list of non-negative int32.
    """
    try:
        array = np.asarray(values)
    except (OverflowError, ValueError) as error:
        raise InvalidMetadata(field, f"is not a list of integers: {error}") from error
    if array.ndim != 1:
        raise InvalidMetadata(field, f"has {array.ndim} dimensions, must have 1")
    if array.size and array.dtype.kind not in "iu":
        big = array.dtype.kind == "O" and all(type(v) is int for v in array.tolist())
        raise InvalidMetadata(field, f"holds {'numbers beyond 64 bits' if big else array.dtype}, must hold int32")
    if array.size and (array.min() < 0 or array.max() > INT32_MAX):
        at = int(np.flatnonzero((array < 0) | (array > INT32_MAX))[0])
        raise InvalidMetadata(f"{field}[{at}]", f"is {array[at]}, must be between 0 and {INT32_MAX}")
    return array.astype(np.int32)
