# SPDX-License-Identifier: Apache-2.0
"""``batch.state``: what each row's sequence has kept from its last step.

A slot has two halves of each state. A step reads one half and writes the other. The
client changes to the written half only if the step ended well, so a retry reads the
old state again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .. import errors
from ..binding import casting
from ..binding.casting import converted, is_masked
from ..binding.ctypes_path import ByName
from ..binding.device import is_device_array
from ..binding.tensors import Tensor
from ..binding.views import Mapping as SharedMapping
from .buffers import Buffers
from .ring import RingBatch


class States(ByName):
    """The state of all rows by name. Reading gives a copy, zero where the row is fresh; assigning writes the next state."""

    __slots__ = ("_buffers", "_made", "_mapping", "_raw", "_tensors", "assigned")

    def __init__(self, tensors: Sequence[Tensor], mapping: SharedMapping, raw: RingBatch, buffers: Buffers) -> None:
        self._tensors, self._mapping, self._raw, self._buffers = tensors, mapping, raw, buffers
        self._made: dict[str, Any] = {}
        self.assigned: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._gather(self._find(name))
        return self._made[name]

    def __setitem__(self, name: str, value: Any) -> None:
        k = self._find(name)
        t = self._tensors[k]
        value = value if t.on_device else as_array(value)
        _check(t, value, self._raw)
        if t.on_device:
            assert self._mapping.device
            self._mapping.device.scatter(self._mapping.plane(t), self._raw.halves() ^ 1, value.detach())
        else:
            rows = np.ascontiguousarray(converted(value[: self._raw.rows], t.dtype, f"state {name!r}"))
            self._raw.set_state(k, rows.__array_interface__["data"][0], rows.nbytes)
        self._made[name] = value
        self.assigned.add(name)

    def __iter__(self) -> Iterator[str]:
        return (t.name for t in self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _find(self, name: str) -> int:
        for k, t in enumerate(self._tensors):
            if t.name == name:
                return k
        raise errors.Invalid(f"no state {name!r}; there are {', '.join(self) or 'none: @rb.worker(state=...) declares them'}")

    def _gather(self, k: int) -> Any:
        t = self._tensors[k]
        if t.on_device:
            assert self._mapping.device
            rows = self._mapping.device.gather(self._mapping.plane(t), self._raw.halves(), self._raw.pad_to)
            self._raw.clear_fresh(rows)
            return rows
        array = self._buffers.get("state", t, self._raw.pad_to, t.shape)
        self._raw.gather_state(k, array.__array_interface__["data"][0], array.nbytes)
        return array


def _check(t: Tensor, value: Any, b: RingBatch) -> None:
    shape, wanted = tuple(getattr(value, "shape", ())), f"{b.rows} rows of {t.expected_row}"
    if t.on_device and not is_device_array(value):
        raise errors.Invalid(f"state {t.name!r} is on the GPU: expected {wanted} there; got {type(value).__name__}")
    if shape[1:] != t.shape or shape[:1] not in ((b.rows,), (b.pad_to,)):
        raise errors.Shape(f"state {t.name!r}: expected {wanted}; got shape {shape}")
    if not t.on_device and not np.can_cast(value.dtype, t.dtype, "same_kind"):
        raise errors.DType(f"state {t.name!r}: expected {wanted}; got {value.dtype}")


def as_array(value: Any) -> np.ndarray:
    if is_masked(value):
        raise errors.Invalid("the function gave a masked array, and the mask would be lost: give y.filled(...) of it")
    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach().cpu()
    return casting.as_array(value)
