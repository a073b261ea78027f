# SPDX-License-Identifier: Apache-2.0
"""Descriptions of tensors, and checks of the arrays that callers pass."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from ctypes import addressof
from typing import Any, Union

import numpy as np

from .. import errors
from . import structs as c
from .library import check

# By rb_dtype. NumPy has no bfloat16: its bits travel as uint16.
NAMES = ("bool", "u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64")
NUMPY = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "uint16", "float32", "float64")
_BY_NAME = {**dict(zip(NUMPY, NAMES)), **{d: d for d in NAMES}, "bfloat16": "bf16"}
del _BY_NAME["uint16"]  # as a declaration it would be taken for bfloat16

Dimension = Union[int, str]
# A type and the shape of a row, perhaps with where it lies: "device:0", or "host".
Spec = Union[tuple[Any, Sequence[Dimension]], tuple[Any, Sequence[Dimension], str]]


class Tensor:
    """One tensor of a model: a row of it, without the batch dimension."""

    __slots__ = ("dims_at", "dtype", "kind", "memory", "name", "offset", "on_device", "row_bytes", "shape", "stride", "variable")

    def __init__(self, t: c.Tensor, dims_at: int) -> None:
        self.name: str = t.name.decode()
        self.memory = f"device:{t.on_device - 1}" if t.on_device else "host"  # as the worker that allocated it counts GPUs
        self.on_device = bool(t.on_device)
        self.kind = NAMES[t.dtype - 1]
        self.dtype = np.dtype(NUMPY[t.dtype - 1])
        self.shape: tuple[int, ...] = tuple(t.shape[: t.rank])
        self.variable = tuple(i for i in range(t.rank) if t.variable >> i & 1)
        self.row_bytes: int = t.row_bytes
        self.offset: int = t.offset
        self.stride: int = t.stride
        self.dims_at = dims_at  # where its sizes begin among the variable dimensions of its side

    def __repr__(self) -> str:
        dims = ",".join(f"<={d}" if i in self.variable else str(d) for i, d in enumerate(self.shape))
        return f"{self.name}:{self.kind}[{dims}]{f'@{self.memory}' if self.on_device else ''}"

    @property
    def expected(self) -> str:
        """For messages: what an array has to be."""
        dims = tuple(f"0..{d}" if i in self.variable else d for i, d in enumerate(self.shape))
        bits = " (the bits of bfloat16)" if self.kind == "bf16" else ""
        return f"{self.dtype}{bits} of shape {_shape(dims)}, or rows of it"

    @property
    def expected_row(self) -> str:
        """For messages: what one row is."""
        return f"{self.dtype} of shape {_shape(tuple(f'0..{d}' if i in self.variable else d for i, d in enumerate(self.shape)))}"

    def holds(self, shape: tuple[int, ...]) -> bool:
        """Whether a row may have this shape."""
        return len(shape) == len(self.shape) and all(
            0 <= d <= most if i in self.variable else d == most for i, (d, most) in enumerate(zip(shape, self.shape))
        )

    def actual(self, dims: Sequence[int]) -> tuple[int, ...]:
        """The shape of a row, given the sizes of all variable dimensions of its side."""
        if not self.variable:
            return self.shape
        shape = list(self.shape)
        for n, i in enumerate(self.variable):
            shape[i] = dims[self.dims_at + n]
        return tuple(shape)

    def rows_of(self, shape: tuple[int, ...]) -> int:
        """-1 for one item of this tensor, n for n rows of it; raises otherwise."""
        for rows, row in ((-1, shape), (shape[0] if shape else 0, shape[1:])):
            if self.holds(row):
                if rows == 0:
                    raise errors.Rows(f"input {self.name!r}: expected at least one row, got shape {_shape(shape)}")
                return rows
        raise errors.Shape(f"input {self.name!r}: expected {self.expected}; got shape {_shape(shape)}")

    def convert(self, value: Any, cast: bool) -> np.ndarray:
        """The array that a caller passed, with this tensor's type or an error."""
        getattr(value, "dtype", None)  # a view that is over raises here; as a plain array it would only be empty
        array = self._array(value)
        if array.dtype == self.dtype:
            return array
        if array.size == 0 and isinstance(value, (list, tuple)):  # an empty list has no type of its own
            return array.astype(self.dtype)
        if cast and np.can_cast(array.dtype, self.dtype, "same_kind"):
            return array.astype(self.dtype)
        advice = f"Nothing is converted silently: pass x.astype({self.dtype.name!r}), or connect with cast=True"
        if cast:
            advice = "cast=True converts only to a type of the same kind"
        raise errors.DType(f"input {self.name!r}: expected {self.expected}; got {array.dtype} of shape {_shape(array.shape)}. {advice}")


    def _array(self, value: Any) -> np.ndarray:
        """The caller's value as an array of whatever type it has."""
        if isinstance(value, np.ma.MaskedArray):
            raise errors.Invalid(f"input {self.name!r}: a masked array, and the mask would be lost; pass x.filled(...) of it")
        if self.kind == "u8":
            if isinstance(value, bytes):
                return np.frombuffer(value, np.uint8)
            if isinstance(value, (list, tuple)) and value and all(isinstance(v, (bytes, bytearray, memoryview)) for v in value):
                value = [np.frombuffer(v, np.uint8) for v in value]
        try:
            array = np.asarray(value)
        except ValueError as e:
            if isinstance(value, (list, tuple)):
                raise self._ragged() from e
            raise
        if array.dtype == object and isinstance(value, (list, tuple)):  # NumPy before 1.24 makes no error of it
            raise self._ragged()
        return array

    def _ragged(self) -> errors.Shape:
        return errors.Shape(
            f"input {self.name!r}: expected {self.expected}; got a list of rows that differ in size. "
            "The rows of a request have one size: send one request for each (model.submit), they still share a batch where the model "
            "allows it"
        )


def _shape(dims: Sequence[Any]) -> str:
    return "(" + ", ".join(map(str, dims)) + ("," if len(dims) == 1 else "") + ")"


def describe(name: str, spec: Spec, memory: str | None = None) -> str:
    """A declaration as text: ("float32", (3, "<=224")) is x:f32[3,<=224]. memory is where it lies if it does not say so itself."""
    try:
        dtype, shape, *where = spec
        (own,) = where or (memory,)
    except (TypeError, ValueError):
        raise errors.Invalid(f"tensor {name!r}: expected (dtype, shape), or (dtype, shape, memory), got {spec!r}") from None
    kind = _BY_NAME.get(dtype if isinstance(dtype, str) else np.dtype(dtype).name)
    if kind is None:
        raise errors.Invalid(f"tensor {name!r}: dtype {dtype!r}; there are {', '.join(sorted(_BY_NAME))}")
    dims = [str(d).replace(" ", "") for d in ((shape,) if isinstance(shape, (int, str)) else shape)]
    for d in dims:
        if not re.fullmatch(r"(<=)?\d+", d):
            raise errors.Invalid(f"tensor {name!r}: dimension {d!r}; write 224, or '<=224' for a variable one")
    return in_memory(f"{name}:{kind}[{','.join(dims)}]", own)


def in_memory(text: str, memory: str | None) -> str:
    """A declaration with where it lies, unless it says so itself."""
    if memory is not None and not re.fullmatch(r"host|device(:\d+)?", memory):
        raise errors.Invalid(f"memory={memory!r}: want 'host', 'device' or 'device:0', with the number of the GPU")
    return text if memory in (None, "host") or "@" in text else f"{text}@{memory}"


def signature(inputs: Mapping[str, Spec], outputs: Mapping[str, Spec], memory: str | None = None) -> str:
    """A whole signature as text."""
    sides = (" ".join(describe(name, spec, memory) for name, spec in side.items()) for side in (inputs, outputs))
    return " -> ".join(sides)


class Signature:
    """The tensors of a connected model."""

    def __init__(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.input_names, self.output_names = [t.name for t in inputs], [t.name for t in outputs]
        self.input_index = {name: k for k, name in enumerate(self.input_names)}
        self.output_index = {name: k for k, name in enumerate(self.output_names)}
        self.variable_inputs = sum(len(t.variable) for t in inputs)
        self.variable_outputs = sum(len(t.variable) for t in outputs)
        self.output_maxima = tuple(t.shape[i] for t in outputs for i in t.variable)
        self.sized = self.variable_inputs + self.variable_outputs == 0
        self.on_device = any(t.on_device for t in [*inputs, *outputs])
        self.in_c = self.sized and not self.on_device  # the library copies whole requests
        self.single = self.in_c and len(inputs) == len(outputs) == 1

    def __repr__(self) -> str:
        return " ".join(map(repr, self.inputs)) + " -> " + " ".join(map(repr, self.outputs))


def signature_of(lib: Any, function: Any, handle: int, info: c.Model) -> Signature:
    """Asks for the tensors of a model."""
    return Signature(*(tensors_of(lib, function, handle, side, n) for side, n in ((c.INPUT, info.inputs), (c.OUTPUT, info.outputs))))


def tensors_of(lib: Any, function: Any, handle: int, side: int, count: int) -> list[Tensor]:
    """Asks for all tensors of one side of a model."""
    found: list[Tensor] = []
    dims = 0
    for k in range(count):
        t = c.Tensor()
        check(lib, function(handle, side, k, addressof(t)))
        found.append(Tensor(t, dims))
        dims += len(found[-1].variable)
    return found
