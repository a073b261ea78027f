# SPDX-License-Identifier: Apache-2.0
"""Sizes that vary, for torch: padding, lengths and masks made on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import torch

from .. import errors
from ..binding.device import over_array
from ..binding.tensors import NAMES, NUMPY, Declared
from ..worker.arguments import Passing
from ..worker.axes import Axes, Extra, Input
from ..worker.results import Outputs
from .planes import DTYPES

Compute = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def sized(call: Compute, axes: Axes, extras: Sequence[Extra], pads: Sequence[float | None], fill: bool = False) -> tuple[Compute, bool]:
    """The module, which takes its extras behind its inputs, as a function of the inputs; True if the true sizes of the rows are
    behind them, a column for each axis.
    fill: one more row, whose sizes fill the padded ones: some modules want the largest length to be the tensor's.

    It uses operations on the device only, so that a CUDA graph records them.
    """
    if not extras and not any(pads):
        return call, False

    def compute(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        *given, sizes = xs
        if fill:
            whole = [sizes.new_full((1,), n) for n in axes.point([x.shape[1:] for x in given])]
            given, sizes = [torch.cat([x, x[:1]]) for x in given], torch.cat([sizes, torch.stack(whole, 1)])
        column, ready = 0, []
        for i, x, value in zip(axes.inputs, given, pads):
            for d in i.variable:
                if value:
                    x = x.masked_fill(_padding(x, 1 + d, sizes[:, axes.axis_of(column)]), value)
                column += 1
            ready.append(x)
        point = axes.point([x.shape[1:] for x in given])
        for e in extras:
            true = sizes[:, e.axis]
            ready.append(true if e.what == "lengths" else torch.arange(point[e.axis], device=true.device) < true[:, None])
        return [y[:-1] for y in call(ready)] if fill else call(ready)

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
        xs = [over_array(x.copy(), i.kind).to(self._device) for x, i in zip(rows, self._axes.inputs)]
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


def numpy_types(inputs: Sequence[Input]) -> list[np.dtype]:
    return [np.dtype(NUMPY[NAMES.index(i.kind)]) for i in inputs]


def torch_types(inputs: Sequence[Input]) -> list[torch.dtype]:
    return [DTYPES[NAMES.index(i.kind)] for i in inputs]


def named_call(
    module: Callable[..., Any], prepare: Callable[[torch.Tensor], torch.Tensor] | None, given: Sequence[str], how: Passing,
    outputs: Outputs, states: Sequence[Declared] = (),
) -> Compute:  # fmt: skip
    """Calls the module with prepared tensors; returns its outputs, the new states last. given: the names of the tensors.
    One thread at a time calls the result."""
    called, mode = how.caller(module, given), torch.inference_mode()  # made once: as a decorator it takes twice as long

    def call(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        with mode:
            return checked(xs, outputs(called(xs if prepare is None else list(map(prepare, xs)))))

    def checked(xs: list[torch.Tensor], ys: list[torch.Tensor]) -> list[torch.Tensor]:
        for y in ys:
            if y.is_nested:
                raise errors.Invalid("the module gives a nested tensor: wrap it in a module that makes it dense, with to_padded_tensor()")
            if y.layout != torch.strided:
                raise errors.Invalid(f"the module gives a tensor that is not dense ({y.layout}): wrap it in a module that makes it so, "
                    "with to_dense()")
            if y.device != xs[0].device:
                raise errors.Invalid(f"the module's inputs are on {xs[0].device}, and it gives a tensor on {y.device}: serve it on that "
                    "device (--device), or return the tensor to its inputs' device")
        for t, y in zip(states, ys[len(ys) - len(states) :]):
            if tuple(y.shape[1:]) != t.shape or y.is_floating_point() != DTYPES[NAMES.index(t.kind)].is_floating_point:
                raise errors.Invalid(f"state {t}: the module returns rows of {y.dtype} {list(y.shape[1:])} in its place")
        return [y.resolve_neg() if y.is_neg() else y for y in ys]

    return call
