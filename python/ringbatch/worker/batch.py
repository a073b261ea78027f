# SPDX-License-Identifier: Apache-2.0
"""``Batch``: the rows of some requests, which a worker's function runs together."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from .. import errors
from ..binding.ctypes_path import Columns
from ..binding.device import owned_rows
from ..binding.paths import copy_inputs, write_outputs
from ..binding.tensors import Tensor
from . import returned
from .outputs import BatchOutputs, _find, _read_only, lazy
from .states import States

_COPIED_BYTES = 32 << 10  # inputs up to this size are copies, which need no guard


class Batch(BatchOutputs):
    """Requests that run together.

    A *request* comes from one client, has one row or more, and ends as a whole. A
    *row* is one item of every tensor, without the batch dimension. Arrays,
    ``len(batch)`` and ``batch.rows`` count rows; ``requests`` has the rows of each request.

    ``inputs[name]`` and ``outputs[name]`` have all rows of the batch. They are views
    of shared memory if the rows are adjacent there, otherwise copies. Inputs up to 32 KiB
    are copies, and may be kept. To avoid the
    copy use :attr:`runs`, :meth:`input_run` and :meth:`output_run`. Inputs are
    read-only: a retry, or the next stage of a pipeline, reads them again.

    With ``ragged=True`` an input of variable size is a list with a view of each row. With
    ``packed=["tokens"]`` it is one array of all rows, one after the other without padding; row i is
    ``[offsets[i]:offsets[i + 1]]``. If its dimension has a name, use ``offsets[name]``. Outputs of variable size have that form, too.

    Text has no arrays: ``inputs[name]`` is a list of str, and such a list is returned.

    For tensors on the device the arrays are torch tensors on its GPU. The batch is
    answered when torch's current stream is done. ``inputs[name]`` is a copy on the GPU,
    since torch has no read-only tensors; ``input_run`` is the shared memory.

    A model with state reads ``state[name]`` and assigns it, once for each batch. ``fresh``
    says which rows begin a sequence.
    """

    #: The live weights of this batch, read-only arrays by name; {} if the worker follows none. Valid until the batch is over.
    weights: Mapping[str, np.ndarray] = MappingProxyType({})
    #: The version of the live weights; 0 if the worker follows none.
    version = 0

    _gathered: int | None = None  # the largest gathered input, if it is worth gathering ahead
    _gathered_bytes = 1 << 20  # the library's limit for that

    # The arrays by name. Columns refer to the batch, so the batch must not keep them: a forgotten
    # batch goes at once, without the garbage collector.
    _made_in: dict[str, Any] = lazy(lambda batch: copy_inputs(batch._raw.at, batch._ring.plain_inputs, _COPIED_BYTES))

    @property
    def inputs(self) -> Columns:
        """All rows of each input, by name."""
        return Columns(self._sig.input_index, self._input, self._made_in)

    #: The state of each row's sequence, by name: reading gives a copy, assigning writes the next step's state.
    state: States = lazy(lambda batch: States(batch._sig.state, batch._mapping, batch._raw, batch._buffers))

    @property
    def fresh(self) -> np.ndarray:
        """Whether each row begins a sequence, so that its state is zero. A plain request does, and padding."""
        found = np.ones(self.padded, bool)
        found[: self.rows] = self._raw.fresh()
        return found

    @property
    def id(self) -> int:
        """The number of the batch, as traces show it."""
        return self._b.id

    @property
    def ragged(self) -> bool:
        """Whether requests of different sizes share this batch."""
        return bool(self._b.ragged)

    def input_run(self, name: str, i: int) -> np.ndarray:
        """Run i of an input, in place. Do not write it: on the device nothing prevents that."""
        t = _find(self._sig.inputs, name)
        if t.variable and self.ragged:
            raise errors.Shape(f"the batch is ragged: the rows of {name!r} have no array in common; inputs[{name!r}] is a list of them")
        return self._life.view(_read_only(self._run(t, i, self._shape(t))))

    def input_shape(self, row: int, name: str) -> tuple[int, ...]:
        """The true shape of a row; in a bucketed model the array may be larger."""
        return _find(self._sig.inputs, name).actual(self._b.request[self.request_of(row)].dims)

    def _shape(self, t: Tensor) -> tuple[int, ...]:
        """The shape of an input's rows in this batch."""
        return t.actual(self._b.dims)

    def _input(self, k: int) -> Any:
        t = self._sig.inputs[k]
        if t.is_text:
            return self._raw.texts(k)
        if t.variable and self._packed:
            array = self._packed_rows("input", t)
            self._raw.pack(k, array.__array_interface__["data"][0], array.nbytes)
            return _read_only(array)
        if t.variable and self.ragged:
            return self._exact_rows(t)
        shape = self._shape(t)
        small = not t.on_device and self.padded * t.row_bytes <= _COPIED_BYTES
        if self.contiguous and not small:
            rows = self.input_run(t.name, 0)
            return owned_rows(rows) if t.on_device else rows
        if t.on_device:
            return self._device.gather(self._mapping.plane(t), self.slots, self.padded)
        array = np.empty((self.padded, *shape), t.dtype) if small else self._buffers.get("input", t, self.padded, shape)
        self._raw.gather(k, array.__array_interface__["data"][0], array.nbytes)
        if array.nbytes > self._gathered_bytes:
            self._gathered, self._gathered_bytes = k, array.nbytes
        return _read_only(array)

    def _prefetch(self, k: int) -> None:
        """Begins to gather the k-th input."""
        t = self._sig.inputs[k]
        if self._is_gathered(t):
            array = self._buffers.get("input", t, self.padded, self._shape(t))
            self._raw.prefetch(k, array.__array_interface__["data"][0], array.nbytes)

    def _is_gathered(self, t: Tensor) -> bool:
        return not self.contiguous and not (t.variable and self.ragged) and not t.on_device

    def _exact_rows(self, t: Tensor) -> list[np.ndarray]:
        """A view of each row, in place and in its own size."""
        views: list[np.ndarray] = []
        for m in self._b.request[: self._b.requests]:
            rows = _read_only(self._mapping.rows(t, self._b.slot[m.row], m.rows, t.actual(m.dims)))
            views += (self._life.view(rows[i]) for i in range(m.rows))
        return views

    def _take(self, result: Any) -> None:
        """Writes the returned outputs. If the function touched batch.outputs[name], the returned value is ignored.
        An output that was neither returned nor touched fails the batch: the slots still have the bytes of earlier requests."""
        touched = not self.__dict__.keys().isdisjoint(("_made_out", "_asked_runs", "_appended"))
        if touched or not write_outputs(self._raw.at, self._ring.plain_outputs, result):
            returned.write(self, result)
        for t in self._sig.state:
            if t.row_bytes and t.name not in self.state.assigned and len(self._failed) < self._raw.requests:
                raise errors.Invalid(f'state {t.name!r} was not assigned: write batch.state["{t.name}"] = ..., also if it stays the same')
