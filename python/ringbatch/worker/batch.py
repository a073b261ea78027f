# SPDX-License-Identifier: Apache-2.0
"""``Batch``: the rows of some requests, which a worker's function runs together."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Callable, NamedTuple

import numpy as np

from .. import errors
from ..binding import texts
from ..binding.casting import converted, converted_tensor
from ..binding.ctypes_path import Columns
from ..binding.device import DeviceMemory, is_device_array, owned_rows
from ..binding.paths import copy_inputs, write_outputs
from ..binding.tensors import Tensor
from ..binding.views import Life, released
from .buffers import Buffers
from .lost_gpu import lost
from .results import of_batch
from .ring import Ring, RingBatch
from .states import States, as_array

_COPIED_BYTES = 32 << 10  # inputs up to this size are copies, which need no guard


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


def _lazy(make: Callable[[Any], Any]) -> Any:
    return _Lazy(make)


class Batch:
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

    def __init__(self, ring: Ring, buffers: Buffers, batch: RingBatch, debug: bool = False) -> None:
        self._ring, self._sig, self._mapping, self._buffers = ring, ring.signature, ring.mapping, buffers
        self._raw = batch
        self._debug, self._packed = debug, ring.packed
        if debug:
            for t in self._on_host(self._sig.outputs):
                for slot, _, rows in batch.runs:
                    mark_unwritten(self._mapping.rows(t, slot, rows, t.shape))
        self.rows: int = batch.rows
        #: Rows of the arrays: ``rows``, or more if the worker asked for padding.
        self.padded: int = batch.pad_to

    # Computed when needed: making them all would take longer than a small batch.

    _b: Any = _lazy(lambda batch: batch._raw.c)  # as C has it
    _life: Life = _lazy(lambda batch: Life(batch._mapping.memory))
    _scatter: list[tuple[int, np.ndarray]] = _lazy(lambda _: [])
    _row_dims: dict[int, Sequence[int]] = _lazy(lambda _: {})  # sizes of the outputs' variable dimensions, if the function set them
    _sized: set[int] = _lazy(lambda _: set())  # rows whose sizes follow from what the function returned
    _asked_runs: dict[str, set[int]] = _lazy(lambda _: {})  # the runs of outputs that the function took
    _appended: dict[str, list[int]] = _lazy(lambda _: {})  # the size of each row, of outputs that the function appended to
    _failed: set[int] = _lazy(lambda _: set())  # requests

    #: Of a packed worker: where each row begins, and the last one ends; int32. By name, if the dimensions have names.
    offsets: Any = _lazy(lambda batch: batch._offsets())
    # Sizes of the outputs' variable dimensions that the function did not set, by row.
    _default_dims: Sequence[Sequence[int]] = _lazy(lambda batch: batch._find_default_dims())

    # The arrays by name. Columns refer to the batch, so the batch must not keep them: a forgotten
    # batch goes at once, without the garbage collector.
    _made_in: dict[str, Any] = _lazy(lambda batch: copy_inputs(batch._raw.at, batch._ring.plain_inputs, _COPIED_BYTES))
    _made_out: dict[str, Any] = _lazy(lambda _: {})

    @property
    def inputs(self) -> Columns:
        """All rows of each input, by name."""
        return Columns(self._sig.input_index, self._input, self._made_in)

    @property
    def outputs(self) -> Columns:
        """All rows of each output, by name: write them."""
        return Columns(self._sig.output_index, self._output, self._made_out)

    #: The state of each row's sequence, by name: reading gives a copy, assigning writes the next step's state.
    state: States = _lazy(lambda batch: States(batch._sig.state, batch._mapping, batch._raw, batch._buffers))

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

    def input_run(self, name: str, i: int) -> np.ndarray:
        """Run i of an input, in place. Do not write it: on the device nothing prevents that."""
        return self._run(self._sig.inputs, name, i)

    def output_run(self, name: str, i: int) -> np.ndarray:
        """Run i of an output, in place. Do not mix with ``outputs[name]``."""
        found = self._run(self._sig.outputs, name, i)
        self._asked_runs.setdefault(name, set()).add(i)
        return found

    def input_shape(self, i: int, name: str) -> tuple[int, ...]:
        """The true shape of request i's rows; in a bucketed model the array may be larger."""
        return _find(self._sig.inputs, name).actual(self._b.request[i].dims)

    def _check_numbers(self, t: Tensor, advice: str) -> None:
        if t.is_text:
            raise errors.Invalid(f"{t.name!r} is text, and has no array: {advice}")

    def _run(self, side: list[Tensor], name: str, i: int) -> np.ndarray:
        t = _find(side, name)
        self._check_numbers(t, "inputs[name] is a list of str, and outputs are returned as one")
        if t.variable and side is self._sig.inputs and self.ragged:
            raise errors.Shape(f"the batch is ragged: the rows of {name!r} have no array in common; inputs[{name!r}] is a list of them")
        if not 0 <= i < len(self._raw.runs):
            raise errors.Invalid(f"run {i} of a batch of {len(self._raw.runs)}")
        slot, _, rows = self._raw.runs[i]
        found = self._mapping.rows(t, slot, rows, self._shape(t, side))
        return self._life.view(_read_only(found) if side is self._sig.inputs else found)

    def _shape(self, t: Tensor, side: list[Tensor]) -> tuple[int, ...]:
        """The shape of a row: common to the batch's inputs; the maximum for outputs."""
        return t.actual(self._b.dims) if side is self._sig.inputs else t.shape

    @property
    def contiguous(self) -> bool:
        """Whether the rows are adjacent in shared memory, and there is no padding."""
        return self._raw.pieces == 1 and self.padded == self.rows

    @property
    def ragged(self) -> bool:
        """Whether requests of different sizes share this batch."""
        return bool(self._b.ragged)

    def _offsets(self) -> np.ndarray | dict[str, np.ndarray]:
        if not self._packed:
            raise errors.Invalid("only the batches of a packed worker (packed=[...]) have offsets")
        lengths = self._sig.lengths
        if "" in lengths:
            return _read_only(self._raw.offsets())
        return {name: _read_only(self._raw.offsets(name)) for name in lengths}

    def _total(self, t: Tensor) -> int:
        """The length of a packed tensor."""
        return int((self.offsets[t.names[0]] if t.names[0] else self.offsets)[-1])

    def _packed_rows(self, side: str, t: Tensor) -> np.ndarray:
        return self._buffers.get(side, t, self._total(t), t.shape[1:])

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
        shape = self._shape(t, self._sig.inputs)
        small = not t.on_device and self.padded * t.row_bytes <= _COPIED_BYTES
        if self.contiguous and not small:
            rows = self._run(self._sig.inputs, t.name, 0)
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
            array = self._buffers.get("input", t, self.padded, self._shape(t, self._sig.inputs))
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

    def _output(self, k: int) -> np.ndarray:
        t = self._sig.outputs[k]
        if t.name in self._appended:
            raise errors.Invalid(f"output {t.name!r}: append to it, or write batch.outputs, not both")
        self._check_numbers(t, "return a list with a str for each row")
        packed = t.variable and self._packed
        if self.contiguous and not packed:
            return self._run(self._sig.outputs, t.name, 0)
        if t.on_device:
            made = self._device.empty(self.padded, t)
            self._scatter.append((k, made))
            return made
        array = self._packed_rows("output", t) if packed else self._buffers.get("output", t, self.padded, t.shape)
        if self._debug:
            mark_unwritten(array)
        self._scatter.append((k, array))
        return self._life.view(array)

    def request_of(self, row: int) -> int:
        """The index in ``requests`` of a row's request."""
        for i, m in enumerate(self._b.request[: self._b.requests]):
            if m.row <= row < m.row + m.rows:
                return i
        raise errors.Invalid(f"row {row} of a batch of {self.rows}")

    def set_output_dims(self, i: int, *dims: int) -> None:
        """Sets the actual sizes of the outputs' variable dimensions, for all rows of request i.

        Write each row from its beginning: ``outputs[name][row, :h, :w]``. A size may be 0.
        Sizes above the maximum fail request i alone.
        """
        if not 0 <= i < self._b.requests:
            raise errors.Invalid(f"request {i} of a batch of {self._b.requests}")
        m = self._b.request[i]
        self._set_dims(range(m.row, m.row + m.rows), i, dims)

    def set_row_dims(self, row: int, *dims: int) -> None:
        """Sets them for one row: three images of one request have three numbers of boxes."""
        self._set_dims([row], self.request_of(row), dims)

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
        part = _steps(t, values)
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
        self._grow(t, row, size)
        if t is self._ring.growing:
            self._raw.show(row, size)

    def _begin_appending(self, t: Tensor) -> list[int]:
        if t.name in self._made_out or t.name in self._asked_runs:
            raise errors.Invalid(f"output {t.name!r}: append to it, or write batch.outputs, not both")
        sizes = self._appended[t.name] = [0] * self.rows
        for row in range(self.rows):
            self._grow(t, row, 0)
        return sizes

    def _grow(self, t: Tensor, row: int, size: int) -> None:
        dims = list(self._dims_of(row))
        dims[t.dims_at] = size
        self._row_dims[row] = tuple(dims)
        self._sized.add(row)

    def _set_dims(self, rows: Iterable[int], i: int, dims: Sequence[int]) -> None:
        if len(dims) != self._sig.variable_outputs:
            raise errors.Shape(f"the outputs have {self._sig.variable_outputs} variable dimensions, {len(dims)} sizes were given")
        for n, (d, most) in enumerate(zip(dims, self._sig.output_maxima)):
            if not 0 <= d <= most:
                self.fail(i, errors.Shape(f"variable output dimension {n} is 0..{most}, got {d}"))
                return
        for row in rows:
            for name, sizes in self._appended.items():
                if dims[_find(self._sig.outputs, name).dims_at] < sizes[row]:
                    self.fail(i, errors.Shape(f"output {name!r}: row {row} took back steps: {sizes[row]} were appended, and stay"))
                    return
            self._raw.set_row_dims(row, dims)
            self._row_dims[row] = tuple(dims)

    def fail(self, i: int, error: BaseException | str) -> None:
        """Fails request i alone, as Failed or as the error's own status (``ringbatch.QueueFull("…")``)."""
        self._raw.fail(i, error)
        self._failed.add(i)

    def fail_all(self, error: BaseException | str) -> None:
        """Fails the batch as a whole, as an exception does. Requests that have failed already keep their error."""
        self._raw.fail_all(error)
        self._failed.update(range(self._raw.requests))

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

    def _find_default_dims(self) -> Sequence[Sequence[int]]:
        sig, sizes = self._sig, self._raw.sizes
        if not sig.tied or sizes is None:
            return [sig.output_maxima] * self.rows
        return [tuple(most if k is None else row[k] for most, k in zip(sig.output_maxima, sig.output_from)) for row in sizes.tolist()]

    def _dims_of(self, row: int) -> Sequence[int]:
        """The sizes of the outputs' variable dimensions."""
        return self._row_dims.get(row) or self._default_dims[row]

    def _own_size(self, t: Tensor, row: int, part: np.ndarray) -> np.ndarray:
        """A row without its padding in the dimensions that an input has, too."""
        for n, i in enumerate(t.variable):
            column, true = self._sig.output_from[t.dims_at + n], self._default_dims[row][t.dims_at + n]
            if column is None or part.shape[i] == true:
                continue
            if part.shape[i] != self._b.dims[column]:
                raise errors.Shape(f"output {t.name!r}: this row has {true} {t.names[n]} in the inputs; got shape {part.shape}")
            part = part[(slice(None),) * i + (slice(true),)]
        return part

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

    # -- returned outputs

    def _take(self, result: Any) -> None:
        """Writes the returned outputs. If the function touched batch.outputs[name], the returned value is ignored.
        An output that was neither returned nor touched fails the batch: the slots still have the bytes of earlier requests."""
        touched = not self.__dict__.keys().isdisjoint(("_made_out", "_asked_runs", "_appended"))
        if touched or not write_outputs(self._raw.at, self._ring.plain_outputs, result):
            self._take_each(result)
        for t in self._sig.state:
            if t.name not in self.state.assigned and len(self._failed) < self._raw.requests:
                raise errors.Invalid(f'state {t.name!r} was not assigned: write batch.state["{t.name}"] = ..., also if it stays the same')

    def _take_each(self, result: Any) -> None:
        if isinstance(result, Columns) and result.of(self._made_out):
            result = None  # batch.outputs itself: returning it writes nothing
        returned, said = self._by_name({} if result is None else result)
        for k, t in enumerate(self._sig.outputs):
            if t.name in self._made_out or t.name in self._appended:
                continue
            if t.name in self._asked_runs:
                self._fail_other_runs(t)
                continue
            value = returned.get(t.name)
            if value is not None:
                self._write(k, t, value)
            elif self._is_awaited(t):
                raise forgotten(t.name, {**returned, **dict.fromkeys(said, True)}, self._sig.output_names)
        if said:
            warnings.warn(f"model {self._ring.model!r}: the function also returned {', '.join(said)}, which is no output", stacklevel=1)

    def _by_name(self, result: Any) -> tuple[dict[str, Any], list[str]]:
        """The returned outputs by name, and what else was returned."""
        returned, others = of_batch(result, {t.name: len(t.shape) - t.is_text for t in self._sig.outputs})
        for name in others.keys() & self._sig.state_index.keys():
            raise errors.Invalid(f'the function returned the state {name!r}: assign it, batch.state["{name}"] = ...')
        return returned, [f"{name} ({kind})" for name, kind in others.items() if name not in self._sig.output_index]

    def _is_awaited(self, t: Tensor, first: int = 0, rows: int | None = None) -> bool:
        """Whether a request that has not failed has elements of this output, in some of the rows."""
        some = range(first, first + (self.rows if rows is None else rows))
        return any(math.prod(t.actual(self._dims_of(row))) and self.request_of(row) not in self._failed for row in some)

    def _fail_other_runs(self, t: Tensor) -> None:
        """Fails the requests in runs that the function did not take."""
        taken = self._asked_runs[t.name]
        left = [range(row, row + rows) for i, (_, row, rows) in enumerate(self._raw.runs) if i not in taken]
        for i, m in enumerate(self._b.request[: self._b.requests]):
            if any(m.row in run for run in left) and self._is_awaited(t, m.row, m.rows):
                where = f"row {m.row} in a batch of {self.rows}"
                self.fail(i, f"the function did not write output {t.name!r} of {where}: take every output_run")

    def _write(self, k: int, t: Tensor, value: Any) -> None:
        if t.on_device:
            return self._write_on_device(t, value)
        if t.is_text:
            return self._write_texts(k, t, value)
        if t.variable and self._packed:
            array, shape = as_array(value), (self._total(t), *t.shape[1:])
            if array.shape != shape:
                raise errors.Shape(f"output {t.name!r}: expected all rows packed, {t.dtype} of shape {shape}; got shape {array.shape}")
            self._scatter.append((k, np.ascontiguousarray(_same_kind(t, array))))
            return
        if t.variable and isinstance(value, (list, tuple)):  # each row in its own size
            if len(value) != self.rows:
                raise errors.Rows(f"output {t.name!r}: a batch of {self.rows} rows, got a list of {len(value)}")
            for row, part in enumerate(value):
                self._write_row(k, t, row, as_array(part))
            return
        array = as_array(value)
        if array.ndim != 1 + len(t.shape) or len(array) not in (self.rows, self.padded):
            raise errors.Shape(f"output {t.name!r}: expected {self.rows} rows of {t.expected_row}; got shape {array.shape}")
        if not t.variable:
            if array.shape[1:] != t.shape:
                raise errors.Shape(f"output {t.name!r}: expected rows of {t.expected_row}; got shape {array.shape}")
            array = np.ascontiguousarray(_same_kind(t, array))
            self._raw.scatter(k, array.__array_interface__["data"][0], array.nbytes)
            return
        for row in range(self.rows):
            self._write_row(k, t, row, array[row])

    def _write_texts(self, k: int, t: Tensor, value: Any) -> None:
        """Writes a list of str. If one does not fit, its request fails alone."""
        if isinstance(value, str) or not hasattr(value, "__len__") or len(value) not in (self.rows, self.padded):
            got = f"{len(value)} of them" if isinstance(value, (list, tuple, np.ndarray)) else type(value).__name__
            raise errors.Shape(f"output {t.name!r}: expected a list of {self.rows} rows of {t.expected_row}; got {got}")
        array = np.full((self.rows, *t.shape), texts.END)
        for row in range(self.rows):
            try:
                text = texts.encode(value[row], t, "output")
                if text.shape != t.shape:
                    raise errors.Shape(f"output {t.name!r}: expected rows of {t.expected_row}; got shape {text.shape[:-1]}")
                array[row] = text
            except (errors.Shape, errors.Size, errors.DType) as e:
                self.fail(self.request_of(row), e)
        self._raw.scatter(k, array.ctypes.data, array.nbytes)

    def _write_on_device(self, t: Tensor, value: Any) -> None:
        shape = tuple(getattr(value, "shape", ()))
        if not is_device_array(value) or shape[1:] != t.shape or shape[0] not in (self.rows, self.padded):
            raise errors.Shape(
                f"output {t.name!r} is on the GPU: expected a tensor there, {self.rows} rows of {t.expected_row}; got "
                f"{type(value).__name__} of shape {shape}"
            )
        to: Any = self.outputs[t.name]
        to[: shape[0]].copy_(converted_tensor(value.detach(), to.dtype, f"output {t.name!r}"))

    def _write_row(self, k: int, t: Tensor, row: int, part: np.ndarray) -> None:
        """Writes one row in its own size. If it does not fit, its request fails alone."""
        try:
            if not t.holds(part.shape):
                raise errors.Shape(f"output {t.name!r}: expected a row of {t.expected_row}; got shape {part.shape}")
            part = self._own_size(t, row, part)
            self.outputs[t.name][row][_corner(part.shape)] = _same_kind(t, part)
        except (errors.Shape, errors.DType) as e:
            self.fail(self.request_of(row), e)
            return
        dims = list(self._dims_of(row))
        dims[t.dims_at : t.dims_at + len(t.variable)] = (part.shape[i] for i in t.variable)
        self._row_dims[row] = tuple(dims)
        self._sized.add(row)

    # -- the end

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

    def _fail_unwritten(self) -> None:
        for t in self._on_host(self._sig.outputs):
            for row in range(self.rows):
                shape = t.actual(self._dims_of(row))
                if is_unwritten(self._mapping.rows(t, self._b.slot[row], 1, t.shape)[0][_corner(shape)]):
                    self.fail(self.request_of(row), f"output {t.name!r} of this request was not written, or not all of it")

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

    @staticmethod
    def _on_host(side: list[Tensor]) -> list[Tensor]:
        return [t for t in side if not t.on_device]


def forgotten(name: str, returned: Mapping[str, Any], names: Sequence[str]) -> errors.Invalid:
    """The error of an output that the function neither returned nor touched."""
    said = ", ".join(other for other in returned if returned[other] is not None) or "None"
    what = "the output" if len(names) == 1 else f"a dict with {', '.join(names)}"
    advice = f'return {what}, or write batch.outputs["{name}"][...]'
    return errors.Invalid(f"the function returned {said} and wrote no output {name!r}: {advice}")


# -- debug mode: outputs are filled with a pattern before the function runs

_PATTERN_BYTE = 0xA5


def mark_unwritten(rows: np.ndarray) -> None:
    rows[...] = _pattern(rows.dtype)


def is_unwritten(row: np.ndarray) -> bool:
    """Whether elements were not written. Of small types, whose pattern may be a value, only if all have the pattern."""
    if row.size == 0:
        return False
    bits = np.dtype(f"u{row.dtype.itemsize}")
    left = np.ascontiguousarray(row).view(bits) == _pattern(row.dtype).view(bits)
    return bool(left.any() if row.dtype.itemsize > 2 or row.dtype == bool else left.all())


def _pattern(dtype: np.dtype) -> np.ndarray:
    return np.frombuffer(bytes([_PATTERN_BYTE]) * dtype.itemsize, dtype)


def _read_only(rows: Any) -> Any:
    """Locks input rows. Tensors on the device cannot be locked."""
    if isinstance(rows, np.ndarray):
        rows.setflags(write=False)
    return rows


def _corner(shape: tuple[int, ...]) -> tuple[Any, ...]:
    return (*(slice(0, d) for d in shape), ...)


def _same_kind(t: Tensor, array: np.ndarray) -> np.ndarray:
    if array.size and not np.can_cast(array.dtype, t.dtype, "same_kind"):
        raise errors.DType(f"output {t.name!r} is {t.dtype}, the function returned {array.dtype}")
    return converted(array, t.dtype, f"output {t.name!r}")


def _steps(t: Tensor, values: Any) -> np.ndarray:
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
