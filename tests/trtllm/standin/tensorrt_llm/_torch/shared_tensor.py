# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from typing import Any

import torch

_TENSORS: dict[int, torch.Tensor] = {}
_NUMBERS = itertools.count(1)


class SharedTensorContainer:
    """A tensor by a number. As in the real one, a CPU tensor's whole storage is what is shared."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> SharedTensorContainer:
        if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
            raise RuntimeError("a view of larger memory was shared: all of it would be moved to shared memory")
        return cls(tensor)

    @classmethod
    def from_dict(cls, handle: dict[str, Any]) -> SharedTensorContainer:
        return cls(_TENSORS.pop(handle["storage_handle"]))

    def dump_to_dict(self) -> dict[str, Any]:
        number = next(_NUMBERS)
        _TENSORS[number] = self._tensor
        return {"method_key": 2, "storage_handle": number, "tensor_size": list(self._tensor.shape)}

    def get_local_view(self) -> torch.Tensor:
        return self._tensor
