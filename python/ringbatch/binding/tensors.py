# SPDX-License-Identifier: Apache-2.0
"""Descriptions of tensors, and checks of the arrays that callers pass."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from ctypes import addressof
from typing import Any, NamedTuple, Union

import numpy as np

from .. import errors
from . import structs as c
from . import texts
from .casting import added, as_array, converted, is_masked
from .library import check

# By rb_dtype; FULL as in torch and ml_dtypes.
NAMES = ("bool", "u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64", "str", "f8e4m3fn", "f8e5m2")
FULL = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "str", "float8_e4m3fn",
        "float8_e5m2")  # fmt: skip
# Those that NumPy lacks, and the type of their bits.
BITS = {"bf16": "uint16", "f8e4m3fn": "uint8", "f8e5m2": "uint8"}
# A text is bytes of a type that no array of a caller has.
NUMPY: tuple[Any, ...] = tuple(texts.BYTE if kind == "str" else BITS.get(kind, name) for kind, name in zip(NAMES, FULL))
_BY_NAME = {**dict(zip(FULL, NAMES)), **{d: d for d in NAMES}}

Dimension = Union[int, str]
# A type and the shape of a row, perhaps with its memory ("device:0" or "host"); or the same as a text: "f32[3,<=224]@device:0".
Spec = Union[tuple[Any, Sequence[Dimension]], tuple[Any, Sequence[Dimension], str], str]
# All tensors of one side: specs by name, or texts like "x:f32[3,<=224]".
Specs = Union[Mapping[str, Spec], Sequence[str], str]


class Tensor:
    """One tensor of a model: a row of it, without the batch dimension."""

    __slots__ = (
        "dims_at", "dtype", "is_text", "kind", "memory", "name", "names", "offset", "on_device", "row_bytes", "shape", "stride", "variable",
    )  # fmt: skip

    def __init__(self, t: c.Tensor, dims_at: int) -> None:
        self.name: str = t.name.decode()
        self.memory = f"device:{t.on_device - 1}" if t.on_device else "host"  # as the worker that allocated it counts GPUs
        self.on_device = bool(t.on_device)
        self.kind = NAMES[t.dtype - 1]
        self.dtype = numpy_type(self.kind)
        self.shape: tuple[int, ...] = tuple(t.shape[: t.rank])
        self.variable = tuple(i for i in range(t.rank) if t.variable >> i & 1)
        self.names = tuple(t.dim[i].value.decode() for i in self.variable)  # of the variable dimensions, "" if they have none
        self.row_bytes: int = t.row_bytes
        self.offset: int = t.offset
        self.stride: int = t.stride
        self.is_text = self.kind == "str"
        self.dims_at = dims_at  # where its sizes begin among the variable dimensions of its side

    def __repr__(self) -> str:
        return f"{self.name}:{self.kind}[{dims_text(self.shape, _varies(self), self.names)}]{f'@{self.memory}' if self.on_device else ''}"

    @property
    def expected(self) -> str:
        """For messages: the array that a caller must pass."""
        return f"{self.expected_row}, or rows of it"

    @property
    def expected_row(self) -> str:
        """For messages: one row."""
        if self.is_text:
            of = f"lists of shape {_shape(self.shape[:-1])} of " if self.shape[1:] else ""
            return f"{of}str of at most {self.shape[-1]} bytes of UTF-8"
        bits = " (the bits of bfloat16)" if self.dtype.name == "uint16" else ""
        return f"{self.dtype}{bits} of shape {_shape([f'0..{d}' if i in self.variable else d for i, d in enumerate(self.shape)])}"

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
        got = shape[:-1] if self.is_text else shape
        for rows, row in ((-1, shape), (shape[0] if shape else 0, shape[1:])):
            if self.holds(row):
                if rows == 0:
                    raise errors.Rows(f"input {self.name!r}: expected at least one row, got shape {_shape(got)}")
                return rows
        raise errors.Shape(f"input {self.name!r}: expected {self.expected}; got shape {_shape(got)}")

    def convert(self, value: Any, cast: bool) -> np.ndarray:
        """The caller's array with this tensor's type, or an error."""
        if self.is_text:
            return texts.encode(value, self, "input")
        getattr(value, "dtype", None)  # raises for a view that is over
        array = self._array(value)
        if array.dtype == self.dtype:
            return array
        bits = self.kind == "bf16" and array.dtype == np.uint16
        if bits and not cast:
            return converted(array, self.dtype)
        if array.dtype.kind == "U":
            advice = ("pass its bytes, x.encode()" if self.kind == "u8" else
                "a model takes numbers, or declares str[<=256] for a text")
            raise errors.DType(f"input {self.name!r}: expected {self.expected}; got text: {advice}")
        if array.size == 0 and isinstance(value, (list, tuple)):  # an empty list has no type of its own
            return array.astype(self.dtype)
        unclear = bits or (self.kind[:2] == "f8" and array.dtype == np.uint8)
        if cast and not unclear and np.can_cast(array.dtype, self.dtype, "same_kind"):
            return converted(array, self.dtype, f"input {self.name!r}")
        how = f"np.array(x, {self.dtype.name!r})" if array is not value else f"x.astype({self.dtype.name!r})"
        advice = f"Nothing is converted silently: pass {how}, or connect with cast=True, which refuses values that do not fit"
        if self.kind == "bf16" and added("bfloat16") is None:
            advice = "NumPy has no bfloat16: pip install ml_dtypes, or pass the bits, with torch x.bfloat16().view(torch.uint16).numpy()"
        elif unclear:
            advice = f"These may be numbers or bits: pass x.astype({self.dtype.name!r}), or x.view({self.dtype.name!r}) of bits"
        elif cast:
            advice = f"cast=True does not convert {array.dtype} to {self.dtype}"
        raise errors.DType(f"input {self.name!r}: expected {self.expected}; got {array.dtype} of shape {_shape(array.shape)}. {advice}")


    def _array(self, value: Any) -> np.ndarray:
        """The caller's value as an array of its own type."""
        if is_masked(value):
            raise errors.Invalid(f"input {self.name!r}: a masked array, and the mask would be lost; pass x.filled(...) of it")
        if self.kind == "u8":
            if isinstance(value, bytes):
                return np.frombuffer(value, np.uint8)
            if isinstance(value, (list, tuple)) and value and all(isinstance(v, (bytes, bytearray, memoryview)) for v in value):
                value = [np.frombuffer(v, np.uint8) for v in value]
        try:
            array = as_array(value)
        except ValueError as e:
            if isinstance(value, (list, tuple)):
                raise self._ragged() from e
            raise
        # NumPy before 1.24 makes no error of it. A list with a number that is too large has no rows.
        if array.dtype == object and isinstance(value, (list, tuple)) and any(np.ndim(v) for v in array.flat):
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


class Declared(NamedTuple):
    """A tensor as somebody declared it: a row, without the batch dimension."""

    name: str
    kind: str
    shape: tuple[int, ...]  # the largest
    variable: tuple[int, ...]  # dimensions
    memory: str  # "" if the declaration leaves it out
    names: tuple[str, ...]  # of the variable dimensions, "" without one; dimensions of one name have one size

    def __str__(self) -> str:
        return f"{self.name}:{self.kind}[{dims_text(self.shape, _varies(self), self.names)}]{'@' * bool(self.memory)}{self.memory}"

    @property
    def items(self) -> tuple[int, ...]:
        """The shape of a row for a caller: of a str without the bytes of a text."""
        return self.shape[:-1] if self.kind == "str" else self.shape

    @property
    def dtype(self) -> np.dtype:
        return numpy_type(self.kind)


def numpy_type(kind: str) -> np.dtype:
    """Without ml_dtypes uint16 has the bits of bfloat16, and arrays of float8 are of no use: see needs_numpy."""
    k = NAMES.index(kind)
    return (added(FULL[k]) if kind in BITS else None) or np.dtype("V1" if kind.startswith("f8") else NUMPY[k])


def needs_numpy(tensors: Iterable[Tensor | Declared]) -> None:
    """Refuses types that arrays cannot have: bits in uint8 would be taken for numbers."""
    for t in tensors:
        if t.kind.startswith("f8") and t.dtype == "V1" and t.memory in ("", "host"):
            raise errors.Invalid(f"tensor {t}: NumPy has no {FULL[NAMES.index(t.kind)]}: pip install ml_dtypes")


def slots_behind(size: int, t: Tensor) -> int:
    """The rows in that many bytes; of an empty tensor as many as any ring has, with two halves each."""
    return size // t.stride if t.stride else 1 << 21


def _varies(t: Tensor | Declared) -> tuple[int, ...]:
    """The dimensions that are written with <=: of a str the bytes of a text, too."""
    return (len(t.shape) - 1,) if t.kind == "str" else t.variable


def dims_text(shape: Sequence[int], variable: Sequence[int], names: Sequence[str] = ()) -> str:
    named = dict(zip(variable, names))
    return ",".join(f"{named.get(i, '')}<={d}" if i in variable else str(d) for i, d in enumerate(shape))


def parse(text: str) -> Declared:
    """Reads x:f32[3,<=224]@device:0."""
    m = re.fullmatch(r"([^:\[\]\s]+):(\w+)\[(.*)\](?:@(.*))?", text.strip())
    if not m:
        raise errors.Invalid(f"tensor {text!r}: expected name:dtype[dims], like x:f32[3,224,224], with <=224 for a size that varies")
    return _declared(m[1], m[2], [d for d in m[3].split(",") if d.strip()], m[4])


def declared(given: Specs) -> list[Declared]:
    """The tensors of one side, in either notation."""
    if isinstance(given, str):
        return [parse(text) for text in given.split()]
    if not isinstance(given, Mapping):
        return [parse(text) for text in given]
    return [_of_spec(name, spec) for name, spec in given.items()]


def numbers(given: Specs) -> list[Declared]:
    """The same for a module, which takes and gives no text."""
    found = declared(given)
    for t in found:
        if t.kind == "str":
            raise errors.Invalid(f"tensor {t}: a module takes and gives numbers; make them of text in a @ringbatch.worker")
    return found


def _of_spec(name: str, spec: Spec) -> Declared:
    if isinstance(spec, str):
        return parse(f"{name}:{spec}")
    try:
        dtype, shape, *memory = spec
        (own,) = memory or (None,)
    except (TypeError, ValueError):
        raise errors.Invalid(
            f"tensor {name!r}: expected (dtype, shape), (dtype, shape, memory) or a text like 'f32[4]', got {spec!r}"
        ) from None
    return _declared(name, dtype, (shape,) if isinstance(shape, (int, str)) else shape, own)


def _declared(name: str, dtype: Any, dims: Sequence[Dimension], memory: str | None) -> Declared:
    kind = "str" if dtype is str else _BY_NAME.get(dtype if isinstance(dtype, str) else np.dtype(dtype).name)
    if kind is None:
        raise errors.Invalid(f"tensor {name!r}: dtype {dtype!r}; there are {', '.join(sorted(_BY_NAME))}")
    sizes = [str(d).replace(" ", "") for d in dims]
    for d in sizes:
        if not re.fullmatch(r"(([A-Za-z][A-Za-z0-9_]{0,30})?<=)?\d+", d):
            raise errors.Invalid(f"tensor {name!r}: dimension {d!r}; write 224, '<=224' for a variable one, or 'atoms<=224' with a name")
    shape = tuple(int(d.rpartition("<=")[2]) for d in sizes)
    variable = tuple(i for i, d in enumerate(sizes) if "<=" in d)
    names = tuple(sizes[i].partition("<=")[0] for i in variable)
    if kind == "str":
        if variable != (len(shape) - 1,) or names != ("",):
            raise errors.Invalid(f"tensor {name!r}: a str has its most bytes last, and only them with <=: 'str[<=256]' or ('str', '<=256')")
        variable = names = ()  # its memory is fixed
        if memory not in (None, "host"):
            raise errors.Invalid(f"tensor {name!r}: a str is in host memory")
    return Declared(name, kind, shape, variable, _memory(memory), names)


def _memory(given: str | None) -> str:
    if given is not None and not re.fullmatch(r"host|device(:\d+)?", given):
        raise errors.Invalid(f"memory={given!r}: want 'host', 'device' or 'device:0', with the number of the GPU")
    return given or ""


def signature(inputs: Specs, outputs: Specs, memory: str | None = None, state: Specs = ()) -> str:
    """A whole signature as text. memory: of tensors that do not name their own."""
    reads, writes, keeps = ([in_memory(t, memory) for t in declared(side)] for side in (inputs, outputs, state))
    _check_state(reads, writes, keeps)
    text = " -> ".join(" ".join(map(str, side)) for side in (reads, writes))
    return " ".join([text, "state", *map(str, keeps)]) if keeps else text


def _check_state(inputs: list[Declared], outputs: list[Declared], state: list[Declared]) -> None:
    taken = {**{t.name: "an output" for t in outputs}, **{t.name: "an input" for t in inputs}}
    for t in state:
        if t.kind == "str":
            raise errors.Invalid(f"state {t}: a state has numbers, which begin as zeros")
        if t.variable:
            raise errors.Invalid(f"state {t}: the shape of a state is fixed; declare its largest size")
        if len(t.shape) >= c.MAX_RANK:
            raise errors.Invalid(f"state {t}: a state has at most {c.MAX_RANK - 1} dimensions")
        if t.name in taken:
            raise errors.Invalid(f"state {t.name!r} has the name of {taken[t.name]}; each tensor has its own name")
        taken[t.name] = "another state"


def sides(text: str) -> tuple[list[str], list[str], list[str]]:
    """The inputs, outputs and state of a signature as text."""
    reads, _, rest = text.partition("->")
    writes, _, keeps = rest.partition(" state ")
    return reads.split(), writes.split(), keeps.split()


def in_memory(t: Declared, memory: str | None) -> Declared:
    """The tensor with its memory, empty for the host's. memory: the default."""
    where = t.memory or ("" if t.kind == "str" else _memory(memory))
    return t._replace(memory="" if where == "host" else where)


class Signature:
    """The tensors of a connected model."""

    def __init__(self, inputs: list[Tensor], outputs: list[Tensor], state: list[Tensor]) -> None:
        self.inputs, self.outputs, self.state = inputs, outputs, state
        self.input_names, self.output_names = [t.name for t in inputs], [t.name for t in outputs]
        self.input_index = {name: k for k, name in enumerate(self.input_names)}
        self.output_index = {name: k for k, name in enumerate(self.output_names)}
        self.state_index = {t.name: k for k, t in enumerate(state)}
        self.variable_inputs = sum(len(t.variable) for t in inputs)
        self.variable_outputs = sum(len(t.variable) for t in outputs)
        #: The variable input dimension from which packed rows take their lengths, by its name; "" for those without.
        self.lengths: dict[str, int] = {}
        for column, name in enumerate(name for t in inputs for name in t.names):
            self.lengths.setdefault(name, column)
        #: Of each variable dimension of the outputs: the input dimension of the same name, or None.
        self.output_from = tuple(self.lengths.get(name) if name else None for t in outputs for name in t.names)
        self.tied = any(column is not None for column in self.output_from)
        self.output_maxima = tuple(t.shape[i] for t in outputs for i in t.variable)
        self.texts = any(t.is_text for t in [*inputs, *outputs])
        self.sized = self.variable_inputs + self.variable_outputs == 0
        self.on_device = any(t.on_device for t in [*inputs, *outputs])

    def __repr__(self) -> str:
        return " ".join(map(str, [*self.inputs, "->", *self.outputs, *["state"] * bool(self.state), *self.state]))


def signature_of(lib: Any, function: Any, handle: int, info: c.Model) -> Signature:
    """Asks for the tensors of a model."""
    inputs, outputs = (tensors_of(lib, function, handle, side, n) for side, n in ((c.INPUT, info.inputs), (c.OUTPUT, info.outputs)))
    return Signature(inputs, outputs, _states_of(lib, function, handle))


def _states_of(lib: Any, function: Any, handle: int) -> list[Tensor]:
    """Asks for the state of a model. A slot has two halves, one after the other; ``stride`` is from half to half."""
    found: list[Tensor] = []
    t = c.Tensor()
    while (status := function(handle, c.STATE, len(found), addressof(t))) == 0:
        t.stride = t.row_bytes
        found.append(Tensor(t, 0))
    if status != errors.Invalid.status:  # that one says: there are no more
        check(lib, status)
    return found


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


def growing(outputs: list[Tensor]) -> Tensor | None:
    """The output that grows: the first one of which only the first dimension varies."""
    return next((t for t in outputs if tuple(t.variable) == (0,) and not t.on_device), None)
