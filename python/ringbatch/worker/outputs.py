# SPDX-License-Identifier: Apache-2.0
"""The outputs of a batch: their arrays, the sizes of their rows, and the requests that fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from .. import errors
from ..binding.casting import converted
from ..binding.ctypes_path import Columns
from ..binding.device import DeviceMemory
from ..binding.tensors import Tensor
from ..binding.views import Life, released
from . import unwritten
from .buffers import Buffers
from .lost_gpu import lost
from .ring import Ring, RingBatch
from .states import as_array


class Run(NamedTuple):
    """Adjacent rows of a batch in memory."""

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


class _Lazy:
    """An attribute that is computed at its first use; functools.cached_property takes a lock before Python 3.12."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        made = owner.__dict__[self._name] = self._make(owner)
        return made


def lazy(make: Callable[[Any], Any]) -> Any:
    return _Lazy(make)


class BatchOutputs:
    """The half of a ``Batch`` that its function writes."""

    def __init__(self, ring: Ring, buffers: Buffers, batch: RingBatch, debug: bool = False) -> None:
        self._ring, self._sig, self._mapping, self._buffers = ring, ring.signature, ring.mapping, buffers
        self._raw = batch
        self._debug, self._packed = debug, ring.packed
        if debug:
            for t in self._outputs_on_host():
                for slot, _, rows in batch.runs:
                    unwritten.mark(self._mapping.rows(t, slot, rows, t.shape))
        self.rows: int = batch.rows
        #: Rows of the arrays: ``rows``, or more if the worker asked for padding.
        self.padded: int = batch.pad_to

    # Computed when needed: making them all would take longer than a small batch.

    _b: Any = lazy(lambda batch: batch._raw.c)  # as C has it
    _life: Life = lazy(lambda batch: Life(batch._mapping.memory))
    _scatter: list[tuple[int, np.ndarray]] = lazy(lambda _: [])
    _row_dims: dict[int, Sequence[int]] = lazy(lambda _: {})  # sizes of the outputs' variable dimensions, if the function set them
    _sized: set[int] = lazy(lambda _: set())  # rows whose sizes follow from what the function returned
    _asked_runs: dict[str, set[int]] = lazy(lambda _: {})  # the runs of outputs that the function took
    _appended: dict[str, list[int]] = lazy(lambda _: {})  # the size of each row, of outputs that the function appended to
    _failed: set[int] = lazy(lambda _: set())  # requests
    #: Of a packed worker: where each row begins, and the last one ends; int32. By name, if the dimensions have names.
    offsets: Any = lazy(lambda batch: batch._offsets())
    # Sizes of the outputs' variable dimensions that the function did not set, by row.
    _default_dims: Sequence[Sequence[int]] = lazy(lambda batch: batch._find_default_dims())
    _made_out: dict[str, Any] = lazy(lambda _: {})

    def __len__(self) -> int:
        """The number of rows, without padding."""
        return self.rows

    @property
    def requests(self) -> list[Item]:
        """The requests of the batch, in the order of their rows."""
        n = self._sig.variable_inputs
        return [
            Item(m.row, m.rows, m.deadline / 1e9, m.committed / 1e9, tuple(m.dims[:n]))
            for m in self._b.request[: self._b.requests]
        ]

    @property
    def runs(self) -> list[Run]:
        """The contiguous pieces of the batch in shared memory."""
        return [Run(*r) for r in self._raw.runs]

    @property
    def slots(self) -> np.ndarray:
        """The slot of each row, to gather by index."""
        return self._raw.slots()

    @property
    def contiguous(self) -> bool:
        """Whether the rows are adjacent in shared memory, and there is no padding."""
        return self._raw.pieces == 1 and self.padded == self.rows

    def request_of(self, row: int) -> int:
        """The index in ``requests`` of a row's request."""
        for i, m in enumerate(self._b.request[: self._b.requests]):
            if m.row <= row < m.row + m.rows:
                return i
        raise errors.Invalid(f"row {row} of a batch of {self.rows}")

    def fail(self, i: int, error: BaseException | str) -> None:
        """Fails request i alone, as Failed or as the error's own status (``ringbatch.QueueFull("…")``)."""
        self._raw.fail(i, error)
        self._failed.add(i)

    def fail_all(self, error: BaseException | str) -> None:
        """Fails the batch as a whole, as an exception does. Requests that have failed already keep their error."""
        self._raw.fail_all(error)
        self._failed.update(range(self._raw.requests))

    @property
    def outputs(self) -> Columns:
        """All rows of each output, by name: write them."""
        return Columns(self._sig.output_index, self._output, self._made_out)

    def output_run(self, name: str, i: int) -> np.ndarray:
        """Run i of an output, in place. Do not mix with ``outputs[name]``."""
        t = _find(self._sig.outputs, name)
        found = self._life.view(self._run(t, i, t.shape))
        self._asked_runs.setdefault(name, set()).add(i)
        return found

    def _output(self, k: int) -> np.ndarray:
        t = self._sig.outputs[k]
        if t.name in self._appended:
            raise errors.Invalid(f"output {t.name!r}: append to it, or write batch.outputs, not both")
        self._check_numbers(t, "return a list with a str for each row")
        packed = t.variable and self._packed
        if self.contiguous and not packed:
            return self._life.view(self._run(t, 0, t.shape))
        if t.on_device:
            made = self._device.empty(self.padded, t)
            self._scatter.append((k, made))
            return made
        array = self._packed_rows("output", t) if packed else self._buffers.get("output", t, self.padded, t.shape)
        if self._debug:
            unwritten.mark(array)
        self._scatter.append((k, array))
        return self._life.view(array)

    def _run(self, t: Tensor, i: int, shape: tuple[int, ...]) -> np.ndarray:
        self._check_numbers(t, "inputs[name] is a list of str, and outputs are returned as one")
        if not 0 <= i < len(self._raw.runs):
            raise errors.Invalid(f"run {i} of a batch of {len(self._raw.runs)}")
        slot, _, rows = self._raw.runs[i]
        return self._mapping.rows(t, slot, rows, shape)

    def _check_numbers(self, t: Tensor, advice: str) -> None:
        if t.is_text:
            raise errors.Invalid(f"{t.name!r} is text, and has no array: {advice}")

    def _offsets(self) -> np.ndarray | dict[str, np.ndarray]:
        if not self._packed:
            raise errors.Invalid("only the batches of a packed worker (packed=[...]) have offsets")
        lengths = self._sig.lengths
        if "" in lengths:
            return _read_only(self._raw.offsets())
        return {name: _read_only(self._raw.offsets(name)) for name in lengths}

    def _packed_rows(self, side: str, t: Tensor) -> np.ndarray:
        return self._buffers.get(side, t, self._total(t), t.shape[1:])

    def _total(self, t: Tensor) -> int:
        """The length of a packed tensor."""
        return int((self.offsets[t.names[0]] if t.names[0] else self.offsets)[-1])

    def set_row_dims(self, row: int, *dims: int) -> None:
        """Sets the actual sizes of the outputs' variable dimensions for one row.

        Write each row from its beginning: ``outputs[name][row, :h, :w]``. A size may be 0.
        Sizes above the maximum fail the row's request alone.
        """
        i = self.request_of(row)
        if len(dims) != self._sig.variable_outputs:
            raise errors.Shape(f"the outputs have {self._sig.variable_outputs} variable dimensions, {len(dims)} sizes were given")
        for n, (d, most) in enumerate(zip(dims, self._sig.output_maxima)):
            if not 0 <= d <= most:
                self.fail(i, errors.Shape(f"variable output dimension {n} is 0..{most}, got {d}"))
                return
        for name, sizes in self._appended.items():
            if dims[_find(self._sig.outputs, name).dims_at] < sizes[row]:
                self.fail(i, errors.Shape(f"output {name!r}: row {row} took back steps: {sizes[row]} were appended, and stay"))
                return
        self._raw.set_row_dims(row, dims)
        self._row_dims[row] = dims

    def append(self, name: str, row: int, values: Any) -> None:
        """Appends to a row of an output of which only the first dimension varies: one step, an array of some, or bytes.

        Rows grow from size 0 on. A client that takes the answer in parts (``model.stream``) gets the first
        such output of the model at once. More than there is room for fails the row's request alone.
        """
        t = _find(self._sig.outputs, name)
        if tuple(t.variable) != (0,) or t.on_device:
            raise errors.Invalid(f"output {name!r} does not grow: declare it on the host, and let its first dimension alone vary")
        if not 0 <= row < self.rows:
            raise errors.Rows(f"row {row} of a batch of {self.rows}")
        part = steps(t, values)
        if part.ndim == len(t.shape) - 1:
            part = part[None]
        if part.shape[1:] != t.shape[1:] or part.ndim != len(t.shape):
            raise errors.Shape(f"output {name!r} grows by steps of shape {t.shape[1:]}; got shape {part.shape}")
        sizes = self._appended.get(name) or self._begin_appending(t)
        at, size = sizes[row], sizes[row] + len(part)
        if size > t.shape[0]:
            self.fail(self.request_of(row), errors.Shape(f"output {name!r} has at most {t.shape[0]}, row {row} would have {size}"))
            return
        self._mapping.rows(t, self._b.slot[row], 1, t.shape)[0][at:size] = part
        sizes[row] = size
        self._set_size(t, row, [size])
        if t is self._ring.growing:
            self._raw.show(row, size)

    def _begin_appending(self, t: Tensor) -> list[int]:
        if t.name in self._made_out or t.name in self._asked_runs:
            raise errors.Invalid(f"output {t.name!r}: append to it, or write batch.outputs, not both")
        sizes = self._appended[t.name] = [0] * self.rows
        for row in range(self.rows):
            self._set_size(t, row, [0])
        return sizes

    def _set_size(self, t: Tensor, row: int, sizes: Sequence[int]) -> None:
        """Sets the sizes of an output's variable dimensions for one row."""
        dims = list(self._dims_of(row))
        dims[t.dims_at : t.dims_at + len(sizes)] = sizes
        self._row_dims[row] = tuple(dims)
        self._sized.add(row)

    def _find_default_dims(self) -> Sequence[Sequence[int]]:
        sig, sizes = self._sig, self._raw.sizes
        if not sig.tied or sizes is None:
            return [sig.output_maxima] * self.rows
        return [tuple(most if k is None else row[k] for most, k in zip(sig.output_maxima, sig.output_from)) for row in sizes.tolist()]

    def _dims_of(self, row: int) -> Sequence[int]:
        """The sizes of the outputs' variable dimensions."""
        return self._row_dims.get(row) or self._default_dims[row]

    def _finish(self) -> None:
        """Puts the outputs into their slots."""
        made = self.__dict__
        if "_scatter" in made:
            self._put_in_place()
        for row in made.get("_sized", ()):
            try:
                self._raw.set_row_dims(row, self._row_dims[row])
            except errors.Shape as e:  # outputs that share a name differ
                self.fail(self.request_of(row), e)
        if self._debug:
            self._fail_unwritten()
        if "_row_dims" in made or self._sig.tied:
            self._pack()

    def _put_in_place(self) -> None:
        for k, array in self._scatter:
            t = self._sig.outputs[k]
            if t.on_device:
                self._device.scatter(self._mapping.plane(t), self.slots, array)
            elif t.variable and self._packed:
                self._raw.unpack(k, array.ctypes.data, array.nbytes)
                for row, size in enumerate(np.diff(self.offsets).tolist() if self._debug and not self._sig.tied else ()):
                    self._row_dims[row] = (size,) * self._sig.variable_outputs
            else:
                self._raw.scatter(k, array.ctypes.data, array.nbytes)

    def _pack(self) -> None:
        """Closes the gaps in outputs that are smaller than their maximum in an inner dimension."""
        for t in self._sig.outputs:
            if not any(t.variable):  # none, or only the first dimension
                continue
            for row in range(self.rows) if self._sig.tied else self._row_dims:
                shape = t.actual(self._dims_of(row))
                if shape[1:] == t.shape[1:]:
                    continue
                whole = self._mapping.rows(t, self._b.slot[row], 1, t.shape)[0]
                part = whole[_corner(shape)].copy()
                whole.reshape(-1)[: part.size] = part.reshape(-1)

    def _fail_unwritten(self) -> None:
        for t in self._outputs_on_host():
            for row in range(self.rows):
                shape = t.actual(self._dims_of(row))
                if unwritten.remains(self._mapping.rows(t, self._b.slot[row], 1, t.shape)[0][_corner(shape)]):
                    self.fail(self.request_of(row), f"output {t.name!r} of this request was not written, or not all of it")

    def _outputs_on_host(self) -> list[Tensor]:
        return [t for t in self._sig.outputs if not t.on_device]

    def _end(self) -> None:
        """Ends the arrays."""
        if self._mapping.device is not None:  # queued work still uses the slots
            try:
                self._device.synchronize()
            except RuntimeError as e:
                raise lost(e) from e
        if "_life" in self.__dict__:
            self._life.end(released)

    @property
    def _device(self) -> DeviceMemory:
        assert self._mapping.device
        return self._mapping.device


def _corner(shape: tuple[int, ...]) -> tuple[Any, ...]:
    return (*(slice(0, d) for d in shape), ...)


def _same_kind(t: Tensor, array: np.ndarray) -> np.ndarray:
    if t.kind[:2] == "f8" and array.dtype == np.uint8:
        raise errors.DType(f"output {t.name!r} is {t.dtype}, the function returned uint8: numbers or bits? Say y.astype({t.dtype.name!r}), "
            f"or y.view({t.dtype.name!r}) of bits")
    if array.size and not np.can_cast(array.dtype, t.dtype, "same_kind"):
        raise errors.DType(f"output {t.name!r} is {t.dtype}, the function returned {array.dtype}")
    return converted(array, t.dtype, f"output {t.name!r}")


def steps(t: Tensor, values: Any) -> np.ndarray:
    """What a function appends: an array, a number, a list of numbers, or bytes."""
    if isinstance(values, (bytes, bytearray)):
        values = np.frombuffer(values, np.uint8)
    array = as_array(values)
    if hasattr(values, "dtype") or array.dtype.kind != "i" or t.dtype.kind not in "iu":
        return _same_kind(t, array)
    cast = array.astype(t.dtype)  # Python's whole numbers fit any whole type that has room for them
    if (cast != array).any():
        raise errors.DType(f"output {t.name!r} is {t.dtype}, which has no room for {values!r}")
    return cast


def _find(side: Sequence[Tensor], name: str) -> Tensor:
    for t in side:
        if t.name == name:
            return t
    raise errors.Invalid(f"no tensor {name!r}; there are {', '.join(t.name for t in side)}")


def _read_only(rows: Any) -> Any:
    """Locks input rows. Tensors on the device cannot be locked."""
    if isinstance(rows, np.ndarray):
        rows.setflags(write=False)
    return rows
