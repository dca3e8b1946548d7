# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .._rules import PREFIX_SUM, VARIANT, int_list, refuse
from .._torch.shared_tensor import SharedTensorContainer

_INT32_MAX = 2**31 - 1


def _check_hashes(hashes: Any) -> None:
    if not isinstance(hashes, list) or not all(isinstance(words, list) for words in hashes):
        refuse("hashes-lists", "multimodal_hashes must be a list of lists", TypeError)
    if not hashes:
        refuse("hashes-empty", "min() arg is an empty sequence")
    if len({len(words) for words in hashes}) != 1:
        refuse("hashes-lists", "all hashes must have the same length")


def _check_uuids(uuids: Any, n: int) -> None:
    if uuids is None:
        return
    if not isinstance(uuids, list) or not all(uuid is None or isinstance(uuid, str) for uuid in uuids):
        refuse("uuids", "multimodal_uuids must be a list of str or None", TypeError)
    if len(uuids) != n:
        refuse("uuids", "multimodal_uuids must match multimodal_hashes")


def _check_spans(positions: Any, lengths: Any, n: int) -> None:
    int_list("plain-lists", "multimodal_positions", positions)
    int_list("plain-lists", "multimodal_lengths", lengths)
    if not len(positions) == len(lengths) == n:
        refuse("counts", "positions, lengths and hashes must be equally many")
    if any(p < 0 for p in positions) or any(length <= 0 for length in lengths):
        refuse("counts", "positions must be non-negative and lengths positive")


def _check_runs(n: int, lengths: list[int], offsets: Any, starts: Any, run_lengths: Any) -> None:
    fields = (offsets, starts, run_lengths)
    if all(f is None for f in fields):
        return
    if any(f is None for f in fields):
        refuse("runs-together", "the three run fields must be provided together")
    for name, values in zip(("cu_offsets", "positions", "lengths"), fields, strict=True):
        int_list("plain-lists", name, values)
        if any(v > _INT32_MAX for v in values):
            refuse("runs", f"{name} must fit int32")
    if len(offsets) != n + 1 or offsets[0] != 0 or offsets[-1] != len(starts) or len(starts) != len(run_lengths):
        refuse("runs", "offsets must go from 0 to the number of runs")
    if any(b < a for a, b in zip(offsets, offsets[1:], strict=False)):
        refuse("runs", "offsets must not decrease")
    if any(s < 0 for s in starts) or any(length <= 0 for length in run_lengths):
        refuse("runs", "positions must be non-negative and lengths positive")
    if any(s + length > _INT32_MAX for s, length in zip(starts, run_lengths, strict=True)):
        refuse("runs", "a run ends beyond int32")
    for i in range(n):
        a, b = offsets[i], offsets[i + 1]
        if sum(run_lengths[a:b]) != lengths[i]:
            refuse("runs", f"the runs of item {i} do not sum to its length")
        ends = [s + length for s, length in zip(starts[a:b], run_lengths[a:b], strict=True)]
        if any(s < end for end, s in zip(ends, starts[a + 1 : b], strict=False)):
            refuse("runs", "runs must be ordered and must not overlap")


if VARIANT == "four":

    @dataclass
    class MultimodalInput:
        multimodal_hashes: list[list[int]]
        multimodal_positions: list[int]
        multimodal_lengths: list[int]
        multimodal_uuids: list[str | None] | None = None

        def __post_init__(self) -> None:
            _check_hashes(self.multimodal_hashes)
            n = len(self.multimodal_hashes)
            _check_spans(self.multimodal_positions, self.multimodal_lengths, n)
            _check_uuids(self.multimodal_uuids, n)

        def runs(self) -> list[list[tuple[int, int]]]:
            return [[span] for span in zip(self.multimodal_positions, self.multimodal_lengths, strict=True)]

elif VARIANT == "seven":

    @dataclass
    class MultimodalInput:  # type: ignore[no-redef]
        multimodal_hashes: list[list[int]]
        multimodal_positions: list[int]
        multimodal_lengths: list[int]
        multimodal_uuids: list[str | None] | None = None
        multimodal_item_run_cu_offsets: list[int] | None = None
        multimodal_run_positions: list[int] | None = None
        multimodal_run_lengths: list[int] | None = None

        def __post_init__(self) -> None:
            _check_hashes(self.multimodal_hashes)
            n = len(self.multimodal_hashes)
            _check_spans(self.multimodal_positions, self.multimodal_lengths, n)
            _check_uuids(self.multimodal_uuids, n)
            _check_runs(
                n,
                self.multimodal_lengths,
                self.multimodal_item_run_cu_offsets,
                self.multimodal_run_positions,
                self.multimodal_run_lengths,
            )

        def runs(self) -> list[list[tuple[int, int]]]:
            offsets, starts, lengths = (
                self.multimodal_item_run_cu_offsets,
                self.multimodal_run_positions,
                self.multimodal_run_lengths,
            )
            if offsets is None or starts is None or lengths is None:
                return [[span] for span in zip(self.multimodal_positions, self.multimodal_lengths, strict=True)]
            flat = list(zip(starts, lengths, strict=True))
            return [flat[a:b] for a, b in zip(offsets, offsets[1:], strict=False)]

else:

    @dataclass
    class MultimodalInput:  # type: ignore[no-redef]
        multimodal_hashes: list[list[int]]
        multimodal_item_runs: list[list[tuple[int, int, list[int]]]]
        multimodal_uuids: list[str | None] | None = None

        def __post_init__(self) -> None:
            if not isinstance(self.multimodal_hashes, list):
                refuse("hashes-lists", "multimodal_hashes must be a list", TypeError)
            for words in self.multimodal_hashes:
                int_list("plain-lists", "multimodal_hashes", words)
                if len(words) != 8:
                    refuse("hashes-lists", "a hash must be 8 integers")
            if not isinstance(self.multimodal_item_runs, list) or len(self.multimodal_item_runs) != len(
                self.multimodal_hashes
            ):
                refuse("item-runs", "multimodal_item_runs must match multimodal_hashes")
            occupied: list[tuple[int, int]] = []
            for runs in self.multimodal_item_runs:
                if not isinstance(runs, list) or not runs:
                    refuse("item-runs", "an item's runs must be a list that is not empty")
                for run in runs:
                    if not isinstance(run, (list, tuple)) or len(run) != 3:
                        refuse("item-runs", "a run must be (start, length, offsets)", TypeError)
                    start, length, offsets = run
                    int_list("plain-lists", "run", [start, length, *offsets])
                    if start < 0 or length <= 0:
                        refuse("item-runs", "a run starts before 0 or has no length")
                    if list(offsets) != sorted({o for o in offsets if 0 <= o < length}):
                        refuse("item-runs", "offsets must be ordered, unique and within the run")
                    occupied.append((start, start + length))
                if [r[0] for r in runs] != sorted(r[0] for r in runs):
                    refuse("item-runs", "runs must be ordered")
            occupied.sort()
            if any(b < end for (_, end), (b, _) in zip(occupied, occupied[1:], strict=False)):
                refuse("item-runs", "runs must not overlap")
            _check_uuids(self.multimodal_uuids, len(self.multimodal_hashes))

        def runs(self) -> list[list[tuple[int, int]]]:
            return [[(start, length) for start, length, _ in runs] for runs in self.multimodal_item_runs]


if PREFIX_SUM:

    @dataclass
    class MultimodalRuntimeData:
        past_seen_token_num: int
        chunk_end_pos: int
        embed_mask_cumsum: torch.Tensor

else:

    @dataclass
    class MultimodalRuntimeData:  # type: ignore[no-redef]
        past_seen_token_num: int
        mm_token_lengths: list[int]
        mm_token_positions: list[int]


@dataclass
class MultimodalParams:
    multimodal_input: MultimodalInput | None = None
    multimodal_data: dict[str, Any] | None = field(default_factory=dict)
    multimodal_runtime: MultimodalRuntimeData | None = None

    def has_content(self) -> bool:
        return bool(self.multimodal_input or self.multimodal_data)

    def to_handle(self, element: str) -> None:
        if element != "multimodal_data":
            refuse("to-handle", f"unsupported element {element!r}")
        self.multimodal_data = _map(self.multimodal_data, _to_handle)

    def to_tensor(self, element: str) -> None:
        if element != "multimodal_data":
            refuse("to-handle", f"unsupported element {element!r}")
        self.multimodal_data = _map(self.multimodal_data, lambda value: value)


def _to_handle(value: Any) -> Any:
    return SharedTensorContainer.from_tensor(value).dump_to_dict() if isinstance(value, torch.Tensor) else value


def _map(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        if "method_key" in value:
            return SharedTensorContainer.from_dict(value).get_local_view()
        return {key: _map(entry, change) for key, entry in value.items()}
    if isinstance(value, list):
        return [_map(entry, change) for entry in value]
    return change(value)
