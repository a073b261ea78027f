"""What a worker's function is given: the rows of some requests."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from . import errors
from ._request import Columns
from ._ring import Ring, RingBatch
from ._tensors import Tensor
from ._views import Life, _released


class Run(NamedTuple):
    """Rows of a batch that lie one after the other in memory."""

    slot: int
    row: int
    rows: int


class Item(NamedTuple):
    """One request of a batch: ``rows`` rows from ``row`` on."""

    row: int
    rows: int
    deadline: float  # on time.monotonic(); 0 if it has none
    committed: float
    dims: tuple[int, ...]  # true sizes of the inputs' variable dimensions

    @property
    def slice(self) -> slice:
        return slice(self.row, self.row + self.rows)


class Buffers:
    """Arrays for batches that are not contiguous, used again and again."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, str, tuple[int, ...]], np.ndarray] = {}

    def get(self, side: str, t: Tensor, rows: int, shape: tuple[int, ...]) -> np.ndarray:
        key = (side, t.name, shape)
        array = self._arrays.get(key)
        if array is None or len(array) < rows:
            array = self._arrays[key] = np.empty((rows, *shape), t.dtype)
        return array[:rows]


class Batch:
    """Some requests to be run together.

    A *request* is what one client sent and what is answered, or fails, alone;
    it has one row or more. A *row* is one item of every tensor, without the
    batch dimension. The arrays are of rows; ``requests`` says which rows are
    whose, ``len(batch)`` counts requests and ``batch.rows`` rows.

    ``inputs[name]`` and ``outputs[name]`` have all rows of the batch: views
    into shared memory if the rows lie one after the other there, otherwise
    copies in arrays of our own (outputs are put in place at the end). To do
    without the copy use :attr:`runs`, :meth:`input_run` and :meth:`output_run`.
    """

    def __init__(self, ring: Ring, buffers: Buffers, batch: RingBatch) -> None:
        self._sig, self._mapping, self._buffers = ring.signature, ring.mapping, buffers
        self._raw, self._b = batch, batch.c
        self._life = Life(ring.mapping)
        self._scatter: list[tuple[Tensor, np.ndarray]] = []
        self._output_dims: dict[int, tuple[int, ...]] = {}  # by request
        self.rows: int = batch.rows
        #: Rows of the arrays: ``rows``, or more if the worker asked for padding.
        self.padded: int = self._b.pad_to
        # Whether anybody has asked for an output, to write it.
        self._used_outputs = False
        self._made: tuple[dict, dict] = {}, {}

    @property
    def inputs(self) -> Columns:
        """All rows of each input, by name."""
        return Columns(self._sig.input_names, self._input, self._made[0])

    @property
    def outputs(self) -> Columns:
        """All rows of each output, by name: write them."""
        return Columns(self._sig.output_names, self._output, self._made[1])

    @property
    def id(self) -> int:
        return self._b.id

    def __len__(self) -> int:
        """The number of requests."""
        return self._b.requests

    @property
    def requests(self) -> list[Item]:
        n = self._sig.variable_inputs
        return [
            Item(m.row, m.rows, m.deadline / 1e9, m.committed / 1e9, tuple(m.dims[:n]))
            for m in self._b.request[: self._b.requests]
        ]

    @property
    def runs(self) -> list[Run]:
        return [Run(*r) for r in self._raw.runs]

    @property
    def slots(self) -> np.ndarray:
        """The slot of each row, for those who gather by index."""
        return np.array((ctypes.c_uint32 * self.rows).from_address(self._raw.slots_at), np.intp)

    def input_run(self, name: str, i: int) -> np.ndarray:
        """Run i of an input, in place."""
        return self._run(self._sig.inputs, name, i)

    def output_run(self, name: str, i: int) -> np.ndarray:
        """Run i of an output, in place. Do not mix with ``outputs[name]``."""
        self._used_outputs = True
        return self._run(self._sig.outputs, name, i)

    def input_shape(self, i: int, name: str) -> tuple[int, ...]:
        """The true shape of request i's rows; in a bucketed model the array may be larger."""
        return _find(self._sig.inputs, name).actual(self._b.request[i].dims)

    def _run(self, side: list[Tensor], name: str, i: int) -> np.ndarray:
        t = _find(side, name)
        if not 0 <= i < len(self._raw.runs):
            raise errors.Invalid(f"run {i} of a batch of {len(self._raw.runs)}")
        slot, _, rows = self._raw.runs[i]
        return self._life.view(self._mapping.rows(t, slot, rows, self._shape(t, side)))

    def _shape(self, t: Tensor, side: list[Tensor]) -> tuple[int, ...]:
        """Of a row: what the batch's inputs share; the maximum for outputs."""
        return t.actual(self._b.dims) if side is self._sig.inputs else t.shape

    @property
    def contiguous(self) -> bool:
        """Whether the arrays are the shared memory itself."""
        return len(self._raw.runs) == 1 and self.padded == self.rows

    def _input(self, k: int) -> np.ndarray:
        t = self._sig.inputs[k]
        shape = self._shape(t, self._sig.inputs)
        if self.contiguous:
            return self._run(self._sig.inputs, t.name, 0)
        array = self._buffers.get("input", t, self.padded, shape)
        for slot, row, rows in self._raw.runs:
            array[row : row + rows] = self._mapping.rows(t, slot, rows, shape)
        array[self.rows :] = 0
        return array

    def _output(self, k: int) -> np.ndarray:
        t = self._sig.outputs[k]
        self._used_outputs = True
        if self.contiguous:
            return self._run(self._sig.outputs, t.name, 0)
        array = self._buffers.get("output", t, self.padded, t.shape)
        self._scatter.append((t, array))
        return array

    def set_output_dims(self, i: int, *dims: int) -> None:
        """The actual sizes of the variable dimensions of request i's outputs.

        They have been written, or will be, from the beginning of each
        dimension on: ``outputs[name][row, :h, :w]``.
        """
        self._raw.set_output_dims(i, dims)
        self._output_dims[i] = dims

    def fail(self, i: int, error: BaseException | str) -> None:
        """Ends request i as Failed; its neighbours are left alone."""
        self._raw.fail(i, error)

    def fail_all(self, error: BaseException | str) -> None:
        """Ends every request that has not failed yet."""
        self._raw.fail_all(error)

    def _put_in_place(self) -> None:
        for t, array in self._scatter:
            for slot, row, rows in self._raw.runs:
                self._mapping.rows(t, slot, rows, t.shape)[...] = array[row : row + rows]

    def _pack(self) -> None:
        """Moves outputs together that are smaller than their maximum in an inner dimension: clients find them without gaps."""
        for t in self._sig.outputs:
            if not any(t.variable):  # none, or only the first dimension
                continue
            for i, dims in self._output_dims.items():
                shape, item = t.actual(dims), self._b.request[i]
                if shape[1:] == t.shape[1:]:
                    continue
                for row in range(item.row, item.row + item.rows):
                    whole = self._mapping.rows(t, self._b.slot[row], 1, t.shape)[0]
                    part = whole[tuple(slice(0, d) for d in shape)].copy()
                    whole.reshape(-1)[: part.size] = part.reshape(-1)

    def _finish(self) -> None:
        """Puts the outputs where the clients will look for them."""
        self._put_in_place()
        if self._output_dims:
            self._pack()

    def _end(self) -> None:
        """The arrays are over."""
        self._life.end(_released)


def _find(side: Sequence[Tensor], name: str) -> Tensor:
    for t in side:
        if t.name == name:
            return t
    raise errors.Invalid(f"no tensor {name!r}; there are {', '.join(t.name for t in side)}")
