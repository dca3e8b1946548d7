# SPDX-License-Identifier: Apache-2.0
"""Helping with misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``did you mean 'x'? Known: ...``, with the known name that is nearest to ``name`` however far that is."""
    names = sorted(known)
    if not names:
        return "there are none"
    folded = {plain(n): n for n in names}
    nearest = folded[difflib.get_close_matches(plain(name), folded, n=1, cutoff=0.0)[0]]
    others = ", ".join(names) if len(names) <= 8 else f"{len(names)} others"
    return f"did you mean {nearest!r}? (known: {others})"


def plain(name: str) -> str:
    """``name`` as two spellings of a key are compared: lower case, dashes for underscores."""
    return name.replace("_", "-").lower()
