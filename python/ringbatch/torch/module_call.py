# SPDX-License-Identifier: Apache-2.0
"""Sizes that vary, for torch: padding, lengths and masks made on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import torch

from .. import errors
from ..binding.tensors import NAMES, NUMPY, Declared
from ..worker.arguments import Passing
from ..worker.axes import Axes, Extra, Input
from .planes import DTYPES

Compute = Callable[[list[torch.Tensor]], list[torch.Tensor]]
Call = Callable[[list[torch.Tensor], dict[str, torch.Tensor]], list[torch.Tensor]]


def sized(call: Call, axes: Axes, extras: Sequence[Extra], pads: Sequence[float | None]) -> tuple[Compute, bool]:
    """The module as a function of its inputs; True if it takes the true sizes of the rows behind them, a column for each axis.

    It uses operations on the device only, so that a CUDA graph records them.
    """
    if not extras and not any(pads):
        return lambda xs: call(xs, {}), False

    def compute(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        *given, sizes = xs
        column, ready = 0, []
        for i, x, value in zip(axes.inputs, given, pads):
            for d in i.variable:
                if value:
                    x = x.masked_fill(_padding(x, 1 + d, sizes[:, axes.axis_of(column)]), value)
                column += 1
            ready.append(x)
        point = axes.point([x.shape[1:] for x in given])
        named = {}
        for e in extras:
            true = sizes[:, e.axis]
            named[e.name] = true if e.what == "lengths" else torch.arange(point[e.axis], device=true.device) < true[:, None]
        return call(ready, named)

    return compute, True


def _padding(x: torch.Tensor, dimension: int, true: torch.Tensor) -> torch.Tensor:
    """A mask of the padding, in a shape that broadcasts with x."""
    behind = torch.arange(x.shape[dimension], device=x.device) >= true[:, None]
    return behind.view(len(x), *(x.shape[d] if d == dimension else 1 for d in range(1, x.dim())))


class Module:
    """A computation on NumPy arrays, for trials."""

    def __init__(self, compute: Compute, axes: Axes, sized: bool, device: torch.device) -> None:
        self._compute, self._axes, self._sized, self._device = compute, axes, sized, device

    def run(self, rows: Sequence[np.ndarray], true: Sequence[Sequence[int]] | None) -> list[np.ndarray]:
        xs = [_tensor(x, i.kind).to(self._device) for x, i in zip(rows, self._axes.inputs)]
        if self._sized:
            point = self._axes.point([x.shape[1:] for x in rows])
            xs.append(torch.tensor([point] * len(rows[0]) if true is None else true, dtype=torch.int64, device=self._device))
        with torch.jit.optimized_execution(False):  # type: ignore[no-untyped-call, attr-defined, unused-ignore]
            ys = self._compute(xs)  # TorchScript must not specialise on trials
        n = len(rows[0])
        for y in ys:
            if y.dim() == 0 or len(y) != n:
                raise errors.Invalid(f"{n} rows went in, and a tensor of shape {list(y.shape)} came out: a served module returns a row "
                    "for each row")
        return [(y.float() if y.is_floating_point() else y).cpu().numpy() for y in ys]


def _tensor(x: np.ndarray, kind: str) -> torch.Tensor:
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if kind == "bf16" else torch.from_numpy(x)


def numpy_types(inputs: Sequence[Input]) -> list[np.dtype]:
    return [np.dtype(NUMPY[NAMES.index(i.kind)]) for i in inputs]


def torch_types(inputs: Sequence[Input]) -> list[torch.dtype]:
    return [DTYPES[NAMES.index(i.kind)] for i in inputs]


def named_call(
    module: Callable[..., Any], prepare: Callable[[torch.Tensor], torch.Tensor], given: Sequence[str], how: Passing,
    states: Sequence[Declared] = (), outputs: Sequence[str] = (),
) -> Call:  # fmt: skip
    """Calls the module with prepared tensors; returns a list, the new states last. given, outputs: their names, if known."""
    names = [t.name for t in states]

    @torch.inference_mode()
    def call(xs: list[torch.Tensor], named: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        y = how.call(module, {**dict(zip(given, map(prepare, xs))), **named})
        if names and isinstance(y, dict):
            y = _by_name(y, outputs, names)
        ys = list(y) if isinstance(y, (tuple, list)) else [y]
        for k, one in enumerate(ys):
            if not isinstance(one, torch.Tensor):
                what = "None" if one is None else f"a {type(one).__name__}"
                where = f" as result {k} of {len(ys)}" if isinstance(y, (tuple, list)) else ""
                raise errors.Invalid(f"the module gives {what}{where}: want a tensor, or a tuple of tensors; wrap it in a module that "
                    "picks them")
        for y in ys:
            if y.is_nested:
                raise errors.Invalid("the module gives a nested tensor: wrap it in a module that makes it dense, with to_padded_tensor()")
            if y.layout != torch.strided:
                raise errors.Invalid(f"the module gives a tensor that is not dense ({y.layout}): wrap it in a module that makes it so, "
                    "with to_dense()")
        if states:
            _check_states(ys, states, outputs)
        return ys

    return call


def _by_name(results: dict[str, Any], outputs: Sequence[str], states: Sequence[str]) -> list[Any]:
    if not outputs:
        raise errors.Invalid(f"the module returns {', '.join(results)} by name: declare the outputs (--output)")
    for name in (*outputs, *states):
        if name not in results:
            what = "the new state" if name in states else "output"
            raise errors.Invalid(f"the module returns {', '.join(results)}, and not {what} {name!r}")
    return [results[name] for name in (*outputs, *states)]


def _check_states(ys: list[torch.Tensor], states: Sequence[Declared], outputs: Sequence[str]) -> None:
    """Refuses results without the new states. They would be written over the state of the sequence."""
    if len(ys) <= len(states) or (outputs and len(ys) != len(outputs) + len(states)):
        wanted = ", ".join(outputs) or "its outputs"
        new = ", ".join(repr(t.name) for t in states)
        raise errors.Invalid(f"the module returns {len(ys)} tensor{'s' * (len(ys) != 1)}: want {wanted}, and then the new state, {new}")
    for t, y in zip(states, ys[-len(states) :]):
        if tuple(y.shape[1:]) != t.shape or y.is_floating_point() != DTYPES[NAMES.index(t.kind)].is_floating_point:
            raise errors.Invalid(f"state {t}: the module returns rows of {y.dtype} {list(y.shape[1:])} in its place")
