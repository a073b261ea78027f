# SPDX-License-Identifier: Apache-2.0
"""Sizes that vary: axes, buckets, true lengths and masks.

An *axis* is a size that requests choose: one variable dimension of an input, or
several that go together (the tokens of a text and their mask). Sizes are rounded
up to the axis's *buckets*, so that there are few shapes and rows of one bucket
share a batch. Rows are padded in the ring; their true sizes travel beside them.

The worker can pass the model a mask or the lengths (an :class:`Extra`).
trials.py finds out whether the model ignores padding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from .. import errors
from ..binding.tensors import Declared, dims_text

LEAST_BUCKET = 16  # smaller rows are hardly cheaper
MOST_SHAPES = 256  # tried before serving


class Input(NamedTuple):
    """An input as requests bring it: a row, without the batch dimension."""

    name: str
    kind: str  # its type, as in x:f32[3]
    shape: tuple[int, ...]  # the largest
    variable: tuple[int, ...]  # dimensions
    symbols: tuple[str, ...]  # of the variable dimensions; dimensions of one symbol have one size

    @classmethod
    def of(cls, t: Declared) -> Input:
        """Variable dimensions with the same name, or without one and with the same maximum, have one size:
        tokens:i64[<=512] and mask:i64[<=512] go together."""
        return cls(t.name, t.kind, t.shape, t.variable, tuple(name or f"<={t.shape[d]}" for d, name in zip(t.variable, t.names)))

    def __str__(self) -> str:
        return f"{self.name}:{self.kind}[{dims_text(self.shape, self.variable)}]"


class Axis(NamedTuple):
    symbol: str
    most: int
    names: tuple[str, ...]  # of its dimensions: tokens.0
    columns: tuple[int, ...]  # its dimensions among all variable ones
    buckets: tuple[int, ...]  # ascending; empty: sizes are not rounded


class Extra(NamedTuple):
    """An input of the model that the worker makes from the sizes of requests."""

    name: str
    what: str  # "lengths" or "mask"
    axis: int


Point = tuple[int, ...]  # a size of each axis


def powers_of_two(most: int) -> tuple[int, ...]:
    """The default buckets: 16, 32, 64 and so on, and the largest size."""
    return (*(2**i for i in range(LEAST_BUCKET.bit_length() - 1, most.bit_length()) if 2**i < most), most)


class Axes:
    """All sizes of a model that vary."""

    def __init__(self, inputs: Sequence[Input], buckets: Mapping[str, Sequence[int]] | None) -> None:
        """buckets: by dimension (tokens.0); powers of two for the others; None: no buckets."""
        self.inputs = list(inputs)
        found: dict[str, list[tuple[str, int, int]]] = {}
        self.columns = 0
        for i in inputs:
            for d, symbol in zip(i.variable, i.symbols):
                found.setdefault(symbol, []).append((f"{i.name}.{d}", self.columns, i.shape[d]))
                self.columns += 1
        self.axes: list[Axis] = []
        for symbol, places in found.items():
            names = tuple(name for name, _, _ in places)
            most = max(most for _, _, most in places)
            given = None if buckets is None else next((tuple(buckets[n]) for n in (symbol, *names) if n in buckets), powers_of_two(most))
            self.axes.append(Axis(symbol, most, names, tuple(column for _, column, _ in places), given or ()))
        self._axis_of = {c: n for n, a in enumerate(self.axes) for c in a.columns}

    def __len__(self) -> int:
        return len(self.axes)

    def find(self, name: str) -> int:
        """The axis of a dimension (tokens.0), or by its symbol."""
        for n, a in enumerate(self.axes):
            if name == a.symbol or name in a.names:
                return n
        raise errors.Invalid(f"{name!r} is no variable dimension; there are {', '.join(n for a in self.axes for n in a.names) or 'none'}")

    def settings(self) -> dict[str, str]:
        """The buckets, as the broker takes them."""
        return {f"buckets.{name}": ",".join(map(str, a.buckets)) for a in self.axes if a.buckets for name in a.names}

    def text(self) -> str:
        """The buckets, as the end of a log line."""
        return "".join(f"; {', '.join(a.names)} rounded up to {', '.join(map(str, a.buckets))}" for a in self.axes if a.buckets)

    def largest(self) -> Point:
        return tuple(a.most for a in self.axes)

    def points(self) -> list[Point]:
        """The sizes of batches, largest first; without buckets only the largest."""
        lists = [a.buckets[::-1] or (a.most,) for a in self.axes]
        return list(itertools.islice(itertools.product(*lists), MOST_SHAPES))

    def shapes(self, point: Point) -> list[tuple[int, ...]]:
        """The shape of a row in each input."""
        shapes, column = [], 0
        for i in self.inputs:
            shape = list(i.shape)
            for d in i.variable:
                shape[d] = min(point[self._axis_of[column]], i.shape[d])
                column += 1
            shapes.append(tuple(shape))
        return shapes

    def point(self, shapes: Sequence[Sequence[int]]) -> Point:
        """The inverse of shapes."""
        sizes = [shape[d] for i, shape in zip(self.inputs, shapes) for d in i.variable]
        return tuple(max(sizes[c] for c in a.columns) for a in self.axes)

    def axis_of(self, column: int) -> int:
        """The axis of a variable dimension, counted over all inputs."""
        return self._axis_of[column]

    def of_rows(self, sizes: np.ndarray) -> np.ndarray:
        """The columns of the axes, from the true sizes by variable dimension."""
        return sizes[:, [a.columns[0] for a in self.axes]]


def given_buckets(settings: Mapping[str, Any]) -> dict[str, list[int]]:
    """The buckets in policy settings: buckets.tokens.0=64,512 or buckets={"tokens.0": [64, 512]}."""
    found: dict[str, Any] = {key.removeprefix("buckets."): value for key, value in settings.items() if key.startswith("buckets.")}
    if isinstance(settings.get("buckets"), Mapping):
        found.update(settings["buckets"])
    try:
        lists = {name: value.strip("[]").split(",") if isinstance(value, str) else value for name, value in found.items()}
        buckets = {name: [int(v) for v in values] for name, values in lists.items()}
        if any(sizes != sorted({*sizes}) or sizes[0] < 1 for sizes in buckets.values()):
            raise ValueError
        return buckets
    except (TypeError, ValueError, IndexError):
        raise errors.Invalid(f"buckets {found}: want ascending sizes for each dimension, like buckets.tokens.0=64,512") from None


def extra_inputs(axes: Axes, lengths: str | None, mask: str | None) -> list[Extra]:
    """--lengths NAME and --mask NAME, each with =INPUT.DIMENSION where several sizes vary."""
    made = []
    for what, text in (("lengths", lengths), ("mask", mask)):
        if not text:
            continue
        name, _, of = text.partition("=")
        if not axes:
            raise errors.Invalid(f"--{what} {name}: no size of this model varies; declare one, like tokens:i64[<=512]")
        if not of and len(axes) > 1:
            raise errors.Invalid(f"--{what} {name}: several sizes vary; say of which: --{what} {name}={axes.axes[0].names[0]}")
        made.append(Extra(name, what, axes.find(of) if of else 0))
    return made


def pad_values(text: Sequence[str] | str | float | None, inputs: Sequence[Input]) -> list[float | None]:
    """The padding value of each input: one value for all, or NAME=VALUE each. None: zeros without a meaning."""
    values: list[float | None] = [None] * len(inputs)
    names = [i.name for i in inputs]
    for item in [text] if isinstance(text, (str, int, float)) else text or ():
        name, _, value = str(item).rpartition("=")
        if name and name not in names:
            raise errors.Invalid(f"--pad {item}: there is no input {name!r}; there are {', '.join(names)}")
        try:
            number = float(value)
        except ValueError:
            raise errors.Invalid(f"--pad {item}: want a number, or NAME=NUMBER") from None
        values = [number if name in ("", n) else old for n, old in zip(names, values)]
    return values


def pad(array: np.ndarray, sizes: Sequence[Sequence[int]], variable: Sequence[int], value: float) -> None:
    """Writes value behind the true sizes of each row's variable dimensions."""
    for row, true in zip(array, sizes):
        for d, n in zip(variable, true):
            row[(slice(None),) * d + (slice(n, None),)] = value


def check_packed(packed: Sequence[str], inputs: Sequence[Declared], outputs: Sequence[Declared] = ()) -> None:
    """Raises Invalid unless packed names all inputs of variable size, and their rows can be packed."""
    names = [t.name for t in inputs if t.variable]
    told = " ".join(map(str, [*inputs, *outputs]))
    if not isinstance(packed, (list, tuple)) or sorted(packed) != sorted(names) or not names:
        raise errors.Invalid(f"--packed {packed}: want a list of all inputs whose size varies, {names}; got {told}")
    varying = [t for t in (*inputs, *outputs) if t.variable]
    most = {(t.names, t.shape[0]) for t in varying}
    if {t.variable for t in varying} != {(0,)} or (len(most) > 1 and (("",) in {name for name, _ in most})):
        raise errors.Invalid(f"--packed {','.join(packed)}: an input's first dimension varies ('<=512'), no inner dimension does, and all "
            f"have one maximum, or all have names ('atoms<=200', 'edges<=2000'); got {told}")
    lengths = {t.names for t in inputs if t.variable}
    for t in outputs:
        if t.variable and t.names not in lengths:
            raise errors.Invalid(f"--packed {','.join(packed)}: no input has the dimension of the output {t}: its rows have no length")


# -- outputs


class Output(NamedTuple):
    """An output's row: its largest shape, and the axis that each dimension follows."""

    largest: tuple[int, ...]
    follows: tuple[int, ...]  # an axis, FIXED or UNKNOWN

    @property
    def variable(self) -> tuple[int, ...]:
        return tuple(d for d, f in enumerate(self.follows) if f != FIXED)

    @property
    def known(self) -> bool:
        return UNKNOWN not in self.follows

    def shape(self, point: Point) -> tuple[int, ...]:
        """The shape of a row if the axes have these sizes."""
        return tuple(point[f] if f >= 0 else n for n, f in zip(self.largest, self.follows))

    def holds(self, shape: Sequence[int], point: Point) -> bool:
        """Whether a result's row may have this shape. If all sizes are fixed, those of 1 do not count: [10,1] is [10]."""
        if not self.variable:
            return without_ones(shape) == without_ones(self.largest)
        return len(shape) == len(self.largest) and all(
            n <= most if f == UNKNOWN else n == most if f == FIXED or not point else n == point[f]
            for n, most, f in zip(shape, self.largest, self.follows)
        )

    def dims(self, kind: str, name: str) -> str:
        sizes = ",".join(f"<={n}" if f != FIXED else str(n) for n, f in zip(self.largest, self.follows))
        return f"{name}:{kind}[{sizes}]"

    @property
    def prefix(self) -> bool:
        """Whether a padded row begins with the bytes of the true row."""
        first = next((d for d, n in enumerate(self.largest) if n != 1 or self.follows[d] != FIXED), 0)
        return all(d == first for d in self.variable)


def without_ones(shape: Sequence[int]) -> list[int]:
    return [n for n in shape if n != 1]


FIXED, UNKNOWN = -1, -2

RowShapes = Callable[[Point], list[tuple[int, ...]]]


def probe_outputs(run: RowShapes, axes: Axes) -> list[Output]:
    """Finds the axis that each size of the outputs follows, by making each axis smaller once."""
    largest = run(axes.largest())
    follows = [[FIXED] * len(shape) for shape in largest]
    for n, axis in enumerate(axes.axes):
        if axis.most < 2:
            continue
        smaller = axis.most - max(1, axis.most // 4)
        point = (*axes.largest()[:n], smaller, *axes.largest()[n + 1 :])
        shapes = run(point)
        if len(shapes) != len(largest):
            raise errors.Invalid(f"there are {len(shapes)} outputs at size {smaller} and {len(largest)} at size {axis.most}")
        for k, shape in enumerate(shapes):
            if len(shape) != len(largest[k]):
                raise errors.Invalid(f"output {k} has {len(shape)} dimensions at size {smaller} and {len(largest[k])} at size {axis.most}")
            for d, (small, large) in enumerate(zip(shape, largest[k])):
                if small != large:
                    follows[k][d] = n if (small, large) == (smaller, axis.most) and follows[k][d] == FIXED else UNKNOWN
    return [Output(shape, tuple(f)) for shape, f in zip(largest, follows)]


def write_rows(plane: np.ndarray, slots: np.ndarray, ys: np.ndarray, output: Output, sizes: np.ndarray | None) -> None:
    """Writes rows into their slots of a plane. sizes: the true ones by axis, if rows are padded."""
    row = math.prod(ys.shape[1:])
    if sizes is None or output.prefix or not output.variable:
        plane[slots, :row] = ys.reshape(len(ys), row)
        return
    for slot, y, true in zip(slots, ys, sizes):
        shape = output.shape(tuple(true))
        plane[slot, : math.prod(shape)] = y[tuple(map(slice, shape))].reshape(-1)


def add_buckets(settings: dict[str, Any], axes: Axes) -> None:
    """Adds the buckets of the axes to the settings, which may name others."""
    given = given_buckets(settings)
    settings.update({key: sizes for key, sizes in axes.settings().items() if key.removeprefix("buckets.") not in given})
