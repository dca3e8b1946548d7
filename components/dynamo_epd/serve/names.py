# SPDX-License-Identifier: Apache-2.0
"""Helping with misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?``, with the known name nearest to ``name``, however far; all of them where they are few."""
    names = sorted(known)
    if not names:
        return "there are none"
    folded = {plain(n): n for n in names}
    nearest = folded[difflib.get_close_matches(plain(name), folded, n=1, cutoff=0.0)[0]]
    return f"did you mean {nearest!r}?" + (f" (known: {', '.join(names)})" if len(names) <= 8 else "")


def plain(name: str) -> str:
    """``name`` as two spellings of a key are compared: lower case, dashes for underscores."""
    return name.replace("_", "-").lower()
