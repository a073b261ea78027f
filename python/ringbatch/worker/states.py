# SPDX-License-Identifier: Apache-2.0
"""``batch.state``: what each row's sequence has kept from its last step.

A slot has two halves of each state. A step reads one half and writes the other. The
client changes to the written half only if the step ended well, so a retry reads the
old state again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import errors
from ..binding.casting import converted
from ..binding.ctypes_path import ByName
from ..binding.device import is_device_array
from ..binding.tensors import Tensor


class States(ByName):
    """The state of all rows by name. Reading gives a copy, zero where the row is fresh; assigning writes the next state."""

    __slots__ = ("_batch",)

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __getitem__(self, name: str) -> Any:
        made = self._batch._made_state
        if name not in made:
            made[name] = self._gather(self._find(name))
        return made[name]

    def __setitem__(self, name: str, value: Any) -> None:
        b, k = self._batch, self._find(name)
        t = b._sig.state[k]
        value = value if t.on_device else as_array(value)
        _check(t, value, b)
        if t.on_device:
            b._device.scatter(b._mapping.plane(t), b._raw.halves() ^ 1, value.detach())
        else:
            rows = np.ascontiguousarray(converted(value[: b.rows], t.dtype, f"state {name!r}"))
            b._raw.set_state(k, rows.__array_interface__["data"][0], rows.nbytes)
        b._made_state[name] = value
        b._new_state.add(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch._sig.state_index)

    def __len__(self) -> int:
        return len(self._batch._sig.state)

    def _find(self, name: str) -> int:
        k = self._batch._sig.state_index.get(name)
        if k is None:
            raise errors.Invalid(f"no state {name!r}; there are {', '.join(self) or 'none: @rb.worker(state=...) declares them'}")
        return k

    def _gather(self, k: int) -> Any:
        b = self._batch
        t = b._sig.state[k]
        if t.on_device:
            rows = b._device.gather(b._mapping.plane(t), b._raw.halves(), b.padded)
            rows[np.flatnonzero(b.fresh).tolist()] = 0  # on the host the library has cleared them
            return rows
        array = b._buffers.get("state", t, b.padded, t.shape)
        b._raw.gather_state(k, array.__array_interface__["data"][0], array.nbytes)
        return array


def _check(t: Tensor, value: Any, b: Any) -> None:
    shape, wanted = tuple(getattr(value, "shape", ())), f"{b.rows} rows of {t.expected_row}"
    if t.on_device and not is_device_array(value):
        raise errors.Invalid(f"state {t.name!r} is on the GPU: expected {wanted} there; got {type(value).__name__}")
    if shape[1:] != t.shape or shape[:1] not in ((b.rows,), (b.padded,)):
        raise errors.Shape(f"state {t.name!r}: expected {wanted}; got shape {shape}")
    if not t.on_device and not np.can_cast(value.dtype, t.dtype, "same_kind"):
        raise errors.DType(f"state {t.name!r}: expected {wanted}; got {value.dtype}")


def as_array(value: Any) -> np.ndarray:
    if isinstance(value, np.ma.MaskedArray):
        raise errors.Invalid("the function gave a masked array, and the mask would be lost: give y.filled(...) of it")
    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach().cpu()
    return np.asarray(value)
