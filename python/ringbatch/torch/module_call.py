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
from ..worker.results import Outputs
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

    def __init__(self, compute: Compute, axes: Axes, sized: bool, device: torch.device, outputs: Outputs) -> None:
        self._compute, self._axes, self._sized, self._device, self._outputs = compute, axes, sized, device, outputs

    def run(self, rows: Sequence[np.ndarray], true: Sequence[Sequence[int]] | None) -> list[np.ndarray]:
        xs = [_tensor(x, i.kind).to(self._device) for x, i in zip(rows, self._axes.inputs)]
        if self._sized:
            point = self._axes.point([x.shape[1:] for x in rows])
            xs.append(torch.tensor([point] * len(rows[0]) if true is None else true, dtype=torch.int64, device=self._device))
        with torch.jit.optimized_execution(False):  # type: ignore[no-untyped-call, attr-defined, unused-ignore]
            ys = self._compute(xs)  # TorchScript must not specialise on trials
        n = len(rows[0])
        wrong = {k: y for k, y in enumerate(ys) if y.dim() == 0 or len(y) != n}
        for y in wrong.values():
            raise errors.Invalid(f"{n} rows went in, and a tensor of shape {list(y.shape)} came out: a served module returns a row "
                f"for each row, or a list of them (--lists){self._outputs.others([*wrong])}")
        return [(y.float() if y.is_floating_point() else y).cpu().numpy() for y in ys]


def _tensor(x: np.ndarray, kind: str) -> torch.Tensor:
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if kind == "bf16" else torch.from_numpy(x)


def numpy_types(inputs: Sequence[Input]) -> list[np.dtype]:
    return [np.dtype(NUMPY[NAMES.index(i.kind)]) for i in inputs]


def torch_types(inputs: Sequence[Input]) -> list[torch.dtype]:
    return [DTYPES[NAMES.index(i.kind)] for i in inputs]


def named_call(
    module: Callable[..., Any], prepare: Callable[[torch.Tensor], torch.Tensor], given: Sequence[str], how: Passing, outputs: Outputs,
    states: Sequence[Declared] = (),
) -> Call:  # fmt: skip
    """Calls the module with prepared tensors; returns its outputs, the new states last. given: the names of the tensors."""

    @torch.inference_mode()
    def call(xs: list[torch.Tensor], named: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        ys: list[torch.Tensor] = outputs(how.call(module, {**dict(zip(given, map(prepare, xs))), **named}))
        for y in ys:
            if y.is_nested:
                raise errors.Invalid("the module gives a nested tensor: wrap it in a module that makes it dense, with to_padded_tensor()")
            if y.layout != torch.strided:
                raise errors.Invalid(f"the module gives a tensor that is not dense ({y.layout}): wrap it in a module that makes it so, "
                    "with to_dense()")
        for t, y in zip(states, ys[len(ys) - len(states) :]):
            if tuple(y.shape[1:]) != t.shape or y.is_floating_point() != DTYPES[NAMES.index(t.kind)].is_floating_point:
                raise errors.Invalid(f"state {t}: the module returns rows of {y.dtype} {list(y.shape[1:])} in its place")
        return ys

    return call
