# SPDX-License-Identifier: Apache-2.0
"""Trial runs of a model before it is served.

A row must give the same results in a batch as alone (:func:`refuse_mixed_rows`).
A model that ignores padding gives the same results with it
(:func:`padding_ignored`); other models are served without buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Callable, Protocol

import numpy as np

from .. import errors
from ..binding.tensors import BITS
from .axes import UNKNOWN, Axes, Extra, Input, Output, Point, given_buckets, powers_of_two, probe_outputs

TOLERANCE, HALF_TOLERANCE, MORE = 1e-3, 2e-2, 0.05  # parts of the largest number; the second one for 16 bits, the third one as advice


_ROUNDING = {"bfloat16": HALF_TOLERANCE, "float8_e4m3fn": 0.15, "float8_e5m2": 0.15}


class Model(Protocol):
    """A model on trial."""

    def run(self, rows: Sequence[np.ndarray], true: Sequence[Sequence[int]] | None) -> list[np.ndarray]:
        """Runs a batch. true: each row's sizes of the axes, if it is padded."""


def agree(got: Sequence[np.ndarray], want: Sequence[np.ndarray], tolerance: float) -> bool:
    """Whether results are equal within tolerance times the largest number. Integers must be equal."""
    if len(got) != len(want):
        return False
    for y, z in zip(got, want):
        if y.shape != z.shape:
            return False
        if y.dtype.kind != "f" and "float" not in y.dtype.name:
            if not np.array_equal(y, z):
                return False
            continue
        nearest = max(tolerance, _ROUNDING.get(y.dtype.name, 0))
        y, z = y.astype(np.float64), z.astype(np.float64)
        most = np.abs(z[np.isfinite(z)]).max(initial=0.0)
        if not np.allclose(y, z, rtol=nearest, atol=nearest * most, equal_nan=True):
            return False
    return True


_FLOATS = ("f16", "bf16", "f32", "f64", "f8e4m3fn", "f8e5m2")


def is_mask(i: Input) -> bool:
    """Whether the input is a mask, by its name."""
    return "mask" in i.name.lower()


def example(inputs: Sequence[Input], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype], rows: int,
        seed: int = 0) -> list[np.ndarray]:
    """Rows for a trial: random numbers; for integers zeros and ones; ones for a mask."""
    rng = np.random.default_rng(seed)
    made = []
    for i, shape, dtype in zip(inputs, shapes, dtypes):
        if is_mask(i):
            value: Any = np.ones((rows, *shape))
        elif i.kind[:2] == "f8":  # bits of numbers below 1
            value = rng.integers(0, 0x38, (rows, *shape))
        elif i.kind in _FLOATS:
            value = rng.random((rows, *shape))
        else:
            value = rng.integers(0, 2, (rows, *shape))
        if i.kind == "bf16":  # the upper half of the bits of f32
            value = value.astype(np.float32).view(np.uint32) >> 16
        made.append(value.astype(dtype))
    return made


def neighbours_ignored(model: Model, xs: list[np.ndarray], outputs: Sequence[Output] = ()) -> bool:
    """Whether a row gives the same bits among other rows as among copies of itself."""
    batch = [x.copy() for x in xs]  # for all runs: some kernels compute differently at other addresses

    def row(i: int, copies: bool) -> list[np.ndarray]:
        for x, given in zip(batch, xs):
            x[...] = given[i] if copies else given
        return [y[i : i + 1].copy() for y in model.run(batch, None)]

    return all(equal_results(partial(row, i, False), partial(row, i, True), outputs) for i in range(len(xs[0])))


def rows_agree(model: Model, xs: list[np.ndarray], tolerance: float, outputs: Sequence[Output] = ()) -> bool:
    """Whether each row gives the same results in the batch as alone. For outputs of unknown size the common part is compared."""
    together = model.run(xs, None)
    if any(len(y) != len(xs[0]) for y in together):
        return False
    alone = [model.run([x[i : i + 1] for x in xs], None) for i in range(len(xs[0]))]
    if any(len(ys) != len(together) for ys in alone):
        return False
    for k, (y, *rows) in enumerate(zip(together, *alone)):
        corner = _common_corner((y, *rows), outputs[k].follows if k < len(outputs) else ())
        if corner is None or not agree([y[corner]], [np.concatenate([z[corner] for z in rows])], tolerance):
            return False
    return True


def _common_corner(results: Sequence[np.ndarray], follows: Sequence[int]) -> tuple[slice, ...] | None:
    """The part that all results have: a batch may be padded to its longest row. None if known sizes differ."""
    shapes = {y.shape[1:] for y in results}
    if len(shapes) > 1:
        if any(len(shape) != len(follows) for shape in shapes):
            return None
        if any(f != UNKNOWN and len({*sizes}) > 1 for f, sizes in zip(follows, zip(*shapes))):
            return None
    return (slice(None), *(slice(min(n)) for n in zip(*shapes)))


def refuse_tolerance(given: float | None) -> None:
    """Refuses a tolerance that is no part of a number."""
    if given is not None and not 0 <= given < math.inf:
        raise errors.Invalid(f"--tolerance {given:g}: want a part of the largest number, like 0.05")


def refuse_mixed_rows(
    model: Model, xs: list[np.ndarray], tolerance: float, outputs: Sequence[Output] = (), adjustable: bool = True, exact: bool = True
) -> None:
    """Refuses a model whose rows give other results in a batch than alone. adjustable: there is a --tolerance.

    exact: a row must not change by a bit with its neighbours. Alone it has another shape, so rounding may differ.
    """
    def advice() -> str:
        helps = adjustable and tolerance < MORE and rows_agree(model, xs, MORE, outputs)
        return f"Serve single rows (--max-batch-size=1){f', allow more (--tolerance {MORE:g})' * helps} or anything (--no-check)"

    if exact and not neighbours_ignored(model, xs, outputs):
        why = "a row gives other results beside other rows: rows of this model depend on one another"
        raise errors.Invalid(f"in a batch of {len(xs[0])} {why}. {advice()}")
    if not rows_agree(model, xs, tolerance, outputs):
        raise errors.Invalid(
            f"in a batch of {len(xs[0])} the rows give other results than alone, by more than {tolerance:g} of the largest: "
            f"rows of this model depend on one another (or chance is in it). {advice()}"
        )


def padding_ignored(
    model: Model, axes: Axes, outputs: Sequence[Output], dtypes: Sequence[np.dtype], pads: Sequence[float | None], tolerance: float
) -> bool:
    """Whether a row gives the same bits with any padding.

    With --pad the model ignores only that value: then a padded row is also compared with the unpadded one.
    """
    for point, true in _padded_points(axes, 1, 5, 7):
        row = _PaddedRow(model, axes, outputs, dtypes, pads, point, true)
        if not equal_results(partial(row.run, False), partial(row.run, True), nan=False):
            return False
    if all(value is None for value in pads):
        return True
    rows = [_PaddedRow(model, axes, outputs, dtypes, pads, point, true) for point, true in _padded_points(axes, 5)]
    return all(agree(row.run(False), model.run(row.small, [row.true]), tolerance) for row in rows)


class _PaddedRow:
    """A row in a bucket. All its runs use the same arrays, since some kernels compute differently at other addresses."""

    def __init__(
        self, model: Model, axes: Axes, outputs: Sequence[Output], dtypes: Sequence[np.dtype], pads: Sequence[float | None],
        point: Point, true: Point,
    ) -> None:  # fmt: skip
        self.true, self._model = true, model
        # Arrays of such a type have its bits: of all numbers only 0 has the same.
        self._pads = [0.0 if value is not None and i.kind in BITS else value for i, value in zip(axes.inputs, pads)]
        self._corners = [tuple(map(slice, (1, *o.shape(true)))) for o in outputs]
        self.small = example(axes.inputs, axes.shapes(true), dtypes, 1)
        shapes = axes.shapes(point)
        self._whole = [np.empty((1, *shape), x.dtype) for x, shape in zip(self.small, shapes)]
        masks = [is_mask(i) for i in axes.inputs]
        if not any(i.variable and not mask for i, mask in zip(axes.inputs, masks)):
            masks = [False] * len(masks)  # there is nothing to mask
        ones = [np.ones(shape) if i.kind not in _FLOATS else None for i, shape in zip(axes.inputs, shapes)]
        random = example(axes.inputs, shapes, dtypes, 1, seed=1)
        self._others = [0 if mask else r if one is None else one for mask, one, r in zip(masks, ones, random)]

    def run(self, other: bool) -> list[np.ndarray]:
        """The results without padding. Padding is --pad's value, or zeros as clients write them, or other numbers; zeros in a mask."""
        for x, whole, value, filling in zip(self.small, self._whole, self._pads, self._others):
            whole[...] = value if value is not None else filling if other else 0
            whole[tuple(map(slice, x.shape))] = x
        return [y[corner].copy() for y, corner in zip(self._model.run(self._whole, [self.true]), self._corners)]


_NOISE = 4  # results may differ by this many times the difference of two equal runs


def equal_results(
    one: Callable[[], list[np.ndarray]], other: Callable[[], list[np.ndarray]], outputs: Sequence[Output] = (), nan: bool = True
) -> bool:
    """Whether two runs of equal shapes give equal results. They may differ about as much as two equal runs do.

    nan: whether NaN equals NaN. If any filling may turn into NaN, equal NaNs prove nothing.
    """
    first = one()
    if not nan and any(np.isnan(y).any() for y in first if y.dtype.kind == "f"):
        return False
    apart = _apart(first, other(), outputs)
    return apart == 0 or apart <= _NOISE * _apart(first, one(), outputs) < math.inf


def _apart(ys: Sequence[np.ndarray], zs: Sequence[np.ndarray], outputs: Sequence[Output]) -> float:
    """The largest difference; infinite if shapes or NaNs differ."""
    most = 0.0 if len(ys) == len(zs) else math.inf
    for k, (y, z) in enumerate(zip(ys, zs)):
        corner = _common_corner((y, z), outputs[k].follows if k < len(outputs) else ())
        if corner is None:
            return math.inf
        y, z = y[corner], z[corner]
        differ = (y != z) & ((y == y) | (z == z))  # NaN equals NaN here
        with np.errstate(all="ignore"):
            d = float(np.abs(y[differ].astype(np.float64) - z[differ].astype(np.float64)).max(initial=0.0))
        most = max(most, math.inf if math.isnan(d) else d)
    return most


def _padded_points(axes: Axes, *eighths: int) -> Iterator[tuple[Point, Point]]:
    """The smallest and the largest buckets, each with true sizes of some eighths of it."""
    for point in dict.fromkeys((*axes.points()[-1:], *axes.points()[:1])):
        for true in dict.fromkeys(tuple(max(1, n * part // 8) for n in point) for part in eighths):
            if true != point:
                yield point, true


def settle(
    model: Model, inputs: Sequence[Input], dtypes: Sequence[np.dtype], settings: Mapping[str, Any], wanted: bool,
    pads: Sequence[float | None], tolerance: float, extras: Sequence[Extra] = (),
) -> tuple[Axes, list[Output], str]:  # fmt: skip
    """The axes and outputs of a model, and a note if it is served without the wanted buckets.

    settings: of the policy, perhaps with buckets. wanted: round other sizes up to powers of two.
    """
    given = given_buckets(settings)
    asked = bool(given) or settings.get("buckets") == "auto"
    axes = Axes(inputs, given if wanted or asked else None)

    def shapes(point: Point) -> list[tuple[int, ...]]:
        return [y.shape[1:] for y in model.run(example(inputs, axes.shapes(point), dtypes, 1), None)]

    outputs = probe_outputs(shapes, axes)
    if not any(a.buckets for a in axes.axes):
        return axes, outputs, ""
    if not all(o.known for o in outputs):
        why = "an output has a size that is none of the inputs'"
    elif not padding_ignored(model, axes, outputs, dtypes, pads, tolerance):
        why = "the results of a row change with its padding"
    else:
        return axes, outputs, ""
    if asked:
        return axes, outputs, f"{why}; rows are padded because buckets were asked for"
    name, sizes = axes.axes[0].names[0], ",".join(map(str, powers_of_two(axes.axes[0].most)))
    told = [e.what for e in extras] + ["pad"] * any(value is not None for value in pads)
    ways = {"mask": "pass it a mask (--mask NAME)", "lengths": "pass it the true sizes (--lengths NAME)",
        "pad": "name the value that it ignores (--pad 0)"}  # fmt: skip
    left = " or ".join(way for what, way in ways.items() if what not in told)
    advice = f"{f'If the model can ignore padding, {left}; ' * bool(left)}--buckets.{name}={sizes} pads in any case"
    return Axes(inputs, None), outputs, f"only requests of equal size share a batch: {why}. {advice}"
