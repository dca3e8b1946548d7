# SPDX-License-Identifier: Apache-2.0
"""``MultimodalInput``: the seven fields by which TensorRT-LLM keys the KV blocks of a prompt with media.

The names and rules are those of ``tensorrt_llm.inputs.multimodal.MultimodalInput``; one rule is ours: no prompt
position belongs to two items. A text-only prompt has None instead of an object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

from .errors import InvalidMetadata

INT32_MAX = 2**31 - 1
INT32_MIN = -(2**31)
HASH_WORDS = 8

Run = tuple[int, int]
"""``(start, length)`` of consecutive prompt positions that belong to one item."""


def item_name(index: int) -> str:
    """How an error message names an item: counted from 1, as a caller would."""
    return f"item {index + 1}"


def digest_to_words(digest: bytes) -> tuple[int, ...]:
    """A 32-byte digest as 8 signed int32, big-endian: the form of ``multimodal_hashes``."""
    if len(digest) != 4 * HASH_WORDS:
        raise InvalidMetadata("digest", f"has {len(digest)} bytes, must have 32")
    return tuple(int.from_bytes(digest[i : i + 4], "big", signed=True) for i in range(0, 32, 4))


def words_to_digest(words: Sequence[int]) -> bytes:
    """The inverse of ``digest_to_words``."""
    return b"".join(word.to_bytes(4, "big", signed=True) for word in words)


def interleaved_groups(item_runs: Sequence[Sequence[Run]]) -> list[list[int]]:
    """Groups of items of which one starts before another has ended; an item that stands alone is in no group."""
    groups: list[list[int]] = []
    end = -1
    for item in sorted(range(len(item_runs)), key=lambda i: item_runs[i][0]):
        if item_runs[item][0][0] < end:
            groups[-1].append(item)
        else:
            groups.append([item])
        end = max(end, sum(item_runs[item][-1]))
    return [group for group in groups if len(group) > 1]


@dataclass(frozen=True)
class MultimodalInput:
    """What an engine must know of the media in a prompt to key its blocks. Checked when it is made.

    Sequences are stored as tuples of plain ``int``; ``to_builtins`` gives lists.

    Attributes:
        multimodal_hashes: per item 8 signed int32, the big-endian words of its 32-byte digest.
        multimodal_positions: per item the prompt index of its first token.
        multimodal_lengths: per item how many prompt tokens belong to it; framing counted, gap text not.
        multimodal_uuids: None, or per item the caller's id or None.
        multimodal_item_run_cu_offsets: items + 1 offsets into the two flat run fields.
        multimodal_run_positions: start of each run, item by item, ascending inside an item.
        multimodal_run_lengths: length of each run.

    The three run fields are all given or all None; None says that each item is one run.

    Raises:
        InvalidMetadata: a rule is broken; names the field, the item and the values.
    """

    multimodal_hashes: tuple[tuple[int, ...], ...]
    multimodal_positions: tuple[int, ...]
    multimodal_lengths: tuple[int, ...]
    multimodal_uuids: tuple[str | None, ...] | None = None
    multimodal_item_run_cu_offsets: tuple[int, ...] | None = None
    multimodal_run_positions: tuple[int, ...] | None = None
    multimodal_run_lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        hashes = _sequence("multimodal_hashes", self.multimodal_hashes)
        if not hashes:
            raise InvalidMetadata("multimodal_hashes", "is empty; a prompt without media has no MultimodalInput")
        hashes = tuple(_hash(i, words) for i, words in enumerate(hashes))
        n = len(hashes)
        positions = _per_item("multimodal_positions", self.multimodal_positions, n, low=0)
        lengths = _per_item("multimodal_lengths", self.multimodal_lengths, n, low=1)
        values = {
            "multimodal_hashes": hashes,
            "multimodal_positions": positions,
            "multimodal_lengths": lengths,
            "multimodal_uuids": _uuids(self.multimodal_uuids, n),
            **self._checked_run_fields(n),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check_runs()

    def _checked_run_fields(self, n: int) -> dict[str, tuple[int, ...] | None]:
        names = ("multimodal_item_run_cu_offsets", "multimodal_run_positions", "multimodal_run_lengths")
        missing = [name for name in names if getattr(self, name) is None]
        if len(missing) == len(names):
            return dict.fromkeys(names)
        if missing:
            raise InvalidMetadata(missing[0], "is missing; the three run fields are given together or not at all")
        offsets = _ints(names[0], self.multimodal_item_run_cu_offsets, low=0)
        starts = _ints(names[1], self.multimodal_run_positions, low=0)
        lengths = _ints(names[2], self.multimodal_run_lengths, low=1)
        if len(offsets) != n + 1:
            raise InvalidMetadata(names[0], f"has {len(offsets)} entries, must have {n + 1} for {n} items")
        if offsets[0] != 0:
            raise InvalidMetadata(f"{names[0]}[0]", f"is {offsets[0]}, must be 0")
        for i, (a, b) in enumerate(pairwise(offsets)):
            if b < a:
                raise InvalidMetadata(f"{names[0]}[{i + 1}]", f"decreases from {a} to {b}", item=item_name(i))
        if len(starts) != len(lengths):
            raise InvalidMetadata(names[2], f"has {len(lengths)} entries but {names[1]} has {len(starts)}")
        if offsets[-1] != len(starts):
            raise InvalidMetadata(f"{names[0]}[{n}]", f"is {offsets[-1]}, but there are {len(starts)} runs")
        return dict(zip(names, (offsets, starts, lengths), strict=True))

    def _check_runs(self) -> None:
        for i, runs in enumerate(self.item_runs):
            name = item_name(i)
            total = end = 0
            for start, length in runs:
                if start < end:
                    raise InvalidMetadata(
                        "multimodal_run_positions",
                        f"run at {start} overlaps or precedes the run before it, which ends at {end - 1}",
                        item=name,
                    )
                end = start + length
                total += length
            if end - 1 > INT32_MAX:
                raise InvalidMetadata(
                    "multimodal_run_lengths", f"the last run ends at {end - 1}, beyond int32", item=name
                )
            if total != self.multimodal_lengths[i]:
                raise InvalidMetadata(
                    f"multimodal_lengths[{i}]",
                    f"is {self.multimodal_lengths[i]}, but the item's runs hold {total} tokens",
                    item=name,
                )
            if runs[0][0] != self.multimodal_positions[i]:
                raise InvalidMetadata(
                    f"multimodal_positions[{i}]",
                    f"is {self.multimodal_positions[i]}, but the item's first run starts at {runs[0][0]}",
                    item=name,
                )
        if self.num_items == 1:
            return
        ordered = sorted((start, length, i) for i, runs in enumerate(self.item_runs) for start, length in runs)
        for (a, a_len, i), (b, _, j) in pairwise(ordered):
            if b < a + a_len:
                raise InvalidMetadata(
                    "multimodal_run_positions",
                    f"position {b} belongs to item {i + 1} and to item {j + 1}",
                    item=item_name(j),
                )

    @property
    def num_items(self) -> int:
        return len(self.multimodal_hashes)

    @property
    def has_run_fields(self) -> bool:
        return self.multimodal_item_run_cu_offsets is not None

    @cached_property
    def item_runs(self) -> tuple[tuple[Run, ...], ...]:
        """Per item its runs ``(start, length)`` in prompt order."""
        offsets, starts, lengths = (
            self.multimodal_item_run_cu_offsets,
            self.multimodal_run_positions,
            self.multimodal_run_lengths,
        )
        if offsets is None or starts is None or lengths is None:
            pairs = zip(self.multimodal_positions, self.multimodal_lengths, strict=True)
            return tuple(((start, length),) for start, length in pairs)
        runs = tuple(zip(starts, lengths, strict=True))
        return tuple(runs[a:b] for a, b in pairwise(offsets))

    @cached_property
    def digests(self) -> tuple[bytes, ...]:
        """Per item the 32 digest bytes."""
        return tuple(words_to_digest(words) for words in self.multimodal_hashes)

    def check_prompt(self, num_tokens: int) -> None:
        """Raise ``InvalidMetadata`` where an item reaches beyond a prompt of ``num_tokens`` tokens."""
        for i, runs in enumerate(self.item_runs):
            start, length = runs[-1]
            if start + length > num_tokens:
                raise InvalidMetadata(
                    "multimodal_run_positions",
                    f"run {start} to {start + length - 1} ends beyond the prompt of {num_tokens} tokens",
                    item=item_name(i),
                )

    def to_builtins(self) -> dict[str, Any]:
        """The seven fields as a dict of lists of plain ints."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        out = {name: None if value is None else list(value) for name, value in out.items()}
        out["multimodal_hashes"] = [list(words) for words in self.multimodal_hashes]
        return out

    @classmethod
    def from_builtins(cls, obj: object) -> MultimodalInput:
        """The object received as a dict with the upstream field names; checked as if it were made here.

        Raises:
            InvalidMetadata: a field is missing, unknown, of another type, or breaks a rule.
        """
        if not isinstance(obj, Mapping):
            raise InvalidMetadata("multimodal_input", f"is {type(obj).__name__}, must be an object with seven fields")
        known = [f.name for f in fields(cls)]
        unknown = sorted(str(key) for key in obj if key not in known)
        if unknown:
            raise InvalidMetadata(unknown[0], f"is not a field of MultimodalInput; the fields are {', '.join(known)}")
        missing = [name for name in known[:3] if obj.get(name) is None]
        if missing:
            raise InvalidMetadata(missing[0], "is missing")
        return cls(**dict(obj))


def _sequence(field: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise InvalidMetadata(field, f"is {type(value).__name__}, must be a list")
    return tuple(value)


def _int(field: str, value: object, low: int) -> int:
    if type(value) is not int:
        raise InvalidMetadata(field, f"is {value!r} of type {type(value).__name__}, must be a plain int")
    if not low <= value <= INT32_MAX:
        raise InvalidMetadata(field, f"is {value}, must be between {low} and {INT32_MAX}")
    return value


def _ints(field: str, value: object, low: int) -> tuple[int, ...]:
    values = _sequence(field, value)
    for i, v in enumerate(values):
        if type(v) is not int or not low <= v <= INT32_MAX:
            _int(f"{field}[{i}]", v, low)
    return values


def _per_item(field: str, value: object, n: int, low: int) -> tuple[int, ...]:
    values = _ints(field, value, low)
    if len(values) != n:
        raise InvalidMetadata(field, f"has {len(values)} entries, but multimodal_hashes has {n}")
    return values


def _hash(index: int, words: object) -> tuple[int, ...]:
    field = f"multimodal_hashes[{index}]"
    values = _sequence(field, words)
    if len(values) != HASH_WORDS:
        raise InvalidMetadata(field, f"has {len(values)} words, must have {HASH_WORDS}", item=item_name(index))
    for i, v in enumerate(values):
        _int(f"{field}[{i}]", v, INT32_MIN)
    return values


def _uuids(value: object, n: int) -> tuple[str | None, ...] | None:
    if value is None:
        return None
    uuids = _sequence("multimodal_uuids", value)
    if len(uuids) != n:
        raise InvalidMetadata("multimodal_uuids", f"has {len(uuids)} entries, but multimodal_hashes has {n}")
    for i, uuid in enumerate(uuids):
        if uuid is not None and not isinstance(uuid, str):
            raise InvalidMetadata(
                f"multimodal_uuids[{i}]", f"is {type(uuid).__name__}, must be a string or null", item=item_name(i)
            )
    return uuids
