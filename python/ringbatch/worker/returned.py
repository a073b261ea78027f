# SPDX-License-Identifier: Apache-2.0
"""Writes into a batch what its function returned."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import errors
from ..binding import texts
from ..binding.casting import converted_tensor
from ..binding.ctypes_path import Columns
from ..binding.device import is_device_array
from ..binding.tensors import Tensor
from .outputs import BatchOutputs, _corner, _same_kind
from .results import of_batch
from .states import as_array


class by_index:
    """The elements of all rows, for an output whose first dimension varies: ``return {"boxes": rb.by_index(boxes, image)}``.

    index: the row in the batch that each element belongs to, whole numbers in any order. The elements of a row keep their
    order; rows without any have size 0.
    """

    dtype = None  # results.of_batch leaves out what has none

    def __init__(self, values: Any, index: Any) -> None:
        self.values, self.index = values, index

    def rows(self, name: str, rows: int) -> list[np.ndarray]:
        """The elements of each row. name: the output's."""
        values, index = as_array(self.values), as_array(self.index)
        if index.dtype.kind not in "iu" and index.size:
            raise errors.Invalid(f"output {name!r}: the index is {index.dtype}: want the number of a row for each element, as integers")
        if index.ndim != 1 or values.shape[:1] != index.shape:
            raise errors.Invalid(f"output {name!r}: the index has shape {index.shape}, and its values {values.shape}: want the number of "
                "a row for each of them")
        wrong = index[(index < 0) | (index >= rows)]
        if wrong.size:
            raise errors.Invalid(f"output {name!r}: the index has row {wrong[0]} in a batch of {rows}: rows are counted from 0")
        order = np.argsort(index, kind="stable")
        return np.split(values[order], np.searchsorted(index[order], np.arange(1, rows)))


def write(batch: BatchOutputs, result: Any) -> None:
    """Writes each output that the function did not touch. One that was neither touched nor returned raises Invalid."""
    if isinstance(result, Columns) and result.of(batch._made_out):
        result = None  # batch.outputs itself: returning it writes nothing
    returned, said = by_name(batch, {} if result is None else result)
    for k, t in enumerate(batch._sig.outputs):
        if t.name in batch._made_out or t.name in batch._appended:
            continue
        if t.name in batch._asked_runs:
            _fail_other_runs(batch, t)
            continue
        value = returned.get(t.name)
        if value is not None:
            _write(batch, k, t, value)
        elif _is_awaited(batch, t):
            raise forgotten(t.name, {**returned, **dict.fromkeys(said, True)}, batch._sig.output_names)
    if said:
        warnings.warn(f"model {batch._ring.model!r}: the function also returned {', '.join(said)}, which is no output", stacklevel=1)


def by_name(batch: Any, result: Any) -> tuple[dict[str, Any], list[str]]:
    """The returned outputs by name, and all else that was returned. batch: also a FakeModel's."""
    sig = batch._sig
    returned, others = of_batch(result, {t.name: len(t.shape) - t.is_text for t in sig.outputs})
    for name in others.keys() & sig.state_index.keys():
        raise errors.Invalid(f'the function returned the state {name!r}: assign it, batch.state["{name}"] = ...')
    for name, value in returned.items():
        if isinstance(value, by_index):
            t = sig.outputs[sig.output_index[name]]
            if 0 not in t.variable or t.on_device or batch._packed:
                raise errors.Invalid(f"output {name!r}: by_index is for an output on the host whose first dimension varies, of a worker "
                    "that is not packed")
            returned[name] = value.rows(name, batch.padded)[: batch.rows]
    return returned, [f"{name} ({kind})" for name, kind in others.items() if name not in sig.output_index]


def _is_awaited(batch: BatchOutputs, t: Tensor, first: int = 0, rows: int | None = None) -> bool:
    """Whether a request that has not failed has elements of this output, in some of the rows."""
    some = range(first, first + (batch.rows if rows is None else rows))
    return any(math.prod(t.actual(batch._dims_of(row))) and batch.request_of(row) not in batch._failed for row in some)


def _fail_other_runs(batch: BatchOutputs, t: Tensor) -> None:
    """Fails the requests in runs that the function did not take."""
    taken = batch._asked_runs[t.name]
    left = [range(row, row + rows) for i, (_, row, rows) in enumerate(batch._raw.runs) if i not in taken]
    for i, m in enumerate(batch._b.request[: batch._b.requests]):
        if any(m.row in run for run in left) and _is_awaited(batch, t, m.row, m.rows):
            where = f"row {m.row} in a batch of {batch.rows}"
            batch.fail(i, f"the function did not write output {t.name!r} of {where}: take every output_run")


def _write(batch: BatchOutputs, k: int, t: Tensor, value: Any) -> None:
    if t.on_device:
        return _write_on_device(batch, t, value)
    if t.is_text:
        return _write_texts(batch, k, t, value)
    if t.variable and batch._packed:
        array, shape = as_array(value), (batch._total(t), *t.shape[1:])
        if array.shape != shape:
            raise errors.Shape(f"output {t.name!r}: expected all rows packed, {t.dtype} of shape {shape}; got shape {array.shape}")
        batch._scatter.append((k, np.ascontiguousarray(_same_kind(t, array))))
        return
    if t.variable and isinstance(value, (list, tuple)):  # each row in its own size
        if len(value) != batch.rows:
            raise errors.Rows(f"output {t.name!r}: a batch of {batch.rows} rows, got a list of {len(value)}")
        for row, part in enumerate(value):
            _write_row(batch, k, t, row, as_array(part))
        return
    array = as_array(value)
    if array.ndim != 1 + len(t.shape) or len(array) not in (batch.rows, batch.padded):
        raise errors.Shape(f"output {t.name!r}: expected {batch.rows} rows of {t.expected_row}; got shape {array.shape}")
    if not t.variable:
        if array.shape[1:] != t.shape:
            raise errors.Shape(f"output {t.name!r}: expected rows of {t.expected_row}; got shape {array.shape}")
        array = np.ascontiguousarray(_same_kind(t, array))
        batch._raw.scatter(k, array.__array_interface__["data"][0], array.nbytes)
        return
    for row in range(batch.rows):
        _write_row(batch, k, t, row, array[row])


def _write_texts(batch: BatchOutputs, k: int, t: Tensor, value: Any) -> None:
    """Writes a list of str. If one does not fit, its request fails alone."""
    if isinstance(value, str) or not hasattr(value, "__len__") or len(value) not in (batch.rows, batch.padded):
        got = f"{len(value)} of them" if isinstance(value, (list, tuple, np.ndarray)) else type(value).__name__
        raise errors.Shape(f"output {t.name!r}: expected a list of {batch.rows} rows of {t.expected_row}; got {got}")
    array = np.full((batch.rows, *t.shape), texts.END)
    for row in range(batch.rows):
        try:
            text = texts.encode(value[row], t, "output")
            if text.shape != t.shape:
                raise errors.Shape(f"output {t.name!r}: expected rows of {t.expected_row}; got shape {text.shape[:-1]}")
            array[row] = text
        except (errors.Shape, errors.Size, errors.DType) as e:
            batch.fail(batch.request_of(row), e)
    batch._raw.scatter(k, array.ctypes.data, array.nbytes)


def _write_on_device(batch: BatchOutputs, t: Tensor, value: Any) -> None:
    shape = tuple(getattr(value, "shape", ()))
    if not is_device_array(value) or shape[1:] != t.shape or shape[0] not in (batch.rows, batch.padded):
        raise errors.Shape(
            f"output {t.name!r} is on the GPU: expected a tensor there, {batch.rows} rows of {t.expected_row}; got "
            f"{type(value).__name__} of shape {shape}"
        )
    to: Any = batch.outputs[t.name]
    to[: shape[0]].copy_(converted_tensor(value.detach(), to.dtype, f"output {t.name!r}"))


def _write_row(batch: BatchOutputs, k: int, t: Tensor, row: int, part: np.ndarray) -> None:
    """Writes one row in its own size. If it does not fit, its request fails alone."""
    try:
        if not t.holds(part.shape):
            raise errors.Shape(f"output {t.name!r}: expected a row of {t.expected_row}; got shape {part.shape}")
        part = _own_size(batch, t, row, part)
        batch.outputs[t.name][row][_corner(part.shape)] = _same_kind(t, part)
    except (errors.Shape, errors.DType) as e:
        batch.fail(batch.request_of(row), e)
        return
    batch._set_size(t, row, [part.shape[i] for i in t.variable])


def _own_size(batch: BatchOutputs, t: Tensor, row: int, part: np.ndarray) -> np.ndarray:
    """A row without its padding in the dimensions that an input has, too."""
    for n, i in enumerate(t.variable):
        column, true = batch._sig.output_from[t.dims_at + n], batch._default_dims[row][t.dims_at + n]
        if column is None or part.shape[i] == true:
            continue
        if part.shape[i] != batch._b.dims[column]:
            raise errors.Shape(f"output {t.name!r}: this row has {true} {t.names[n]} in the inputs; got shape {part.shape}")
        part = part[(slice(None),) * i + (slice(true),)]
    return part


def forgotten(name: str, returned: Mapping[str, Any], names: Sequence[str]) -> errors.Invalid:
    """The error of an output that the function neither returned nor touched."""
    said = ", ".join(other for other in returned if returned[other] is not None) or "None"
    what = "the output" if len(names) == 1 else f"a dict with {', '.join(names)}"
    advice = f'return {what}, or write batch.outputs["{name}"][...]'
    return errors.Invalid(f"the function returned {said} and wrote no output {name!r}: {advice}")
