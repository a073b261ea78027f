# SPDX-License-Identifier: Apache-2.0
"""Trials of a module before it is served: rows must not depend on one another, outputs must be as declared."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch

from .. import errors
from ..binding.tensors import Declared, dims_text
from ..worker import trials
from ..worker.axes import FIXED, UNKNOWN, Axes, Input, Output, without_ones
from ..worker.lost_gpu import Lost
from ..worker.results import Outputs
from .lanes import failure
from .module_call import Module, numpy_types

CHECKED_ROWS = 3


@contextlib.contextmanager
def refused_inputs(inputs: Sequence[Input]) -> Iterator[None]:
    """Refuses a module that fails in its first runs, unless another start may succeed."""
    try:
        yield
    except (errors.Error, Lost):
        raise
    except Exception as e:
        if _of_the_machine(e):
            raise
        texts = " and ".join(map(str, inputs))
        raise errors.Invalid(
            f"the module fails with rows of {texts}: {failure(e)}. Does --input give the type and shape of one row, without the batch?"
        ) from e


def outputs_of_one_row(tried: Module, axes: Axes) -> list[Output]:
    """Empty if the module fails on the trial's numbers."""
    try:
        return trials.settle(tried, axes.inputs, numpy_types(axes.inputs), {}, False, [], trials.TOLERANCE)[1]
    except errors.Invalid:
        raise
    except Exception:
        return []


def fit(declared: Sequence[Declared], found: Sequence[Output], taken: Outputs) -> list[Output]:
    """The declared outputs. Each dimension follows the input's size that the trial found."""
    if len(declared) != len(found):
        gives = " and ".join(f"{name} {list(o.largest)}" if len(found) > 1 else str(list(o.largest)) for name, o in zip(taken.names, found))
        raise errors.Invalid(f"the module gives {len(found)} output{'s' * (len(found) != 1)}, {gives}, and {len(declared)} are declared")
    return [_fit(d, f) for d, f in zip(declared, found)]


def _fit(declared: Declared, found: Output) -> Output:
    shape, variable = declared.shape, declared.variable
    if not variable and not found.variable and without_ones(shape) == without_ones(found.largest):
        return Output(shape, (FIXED,) * len(shape))  # [10,1] as [10]
    but = f"output {declared.name!r} is declared as [{dims_text(shape, variable)}], and the module gives {list(found.largest)}"
    if len(shape) != len(found.largest):
        raise errors.Invalid(f"{but}: declare it with {len(found.largest)} dimensions, not {len(shape)}")
    for d in found.variable:
        if d not in variable:
            raise errors.Invalid(f"{but}: dimension {d} varies with the inputs; declare it so, <={found.largest[d]}")
    for d, (n, most) in enumerate(zip(shape, found.largest)):
        if n < most or (n > most and d not in variable):
            raise errors.Invalid(f"{but}: dimension {d} is {most}, not {n}")
    follows = [UNKNOWN if d in variable and f == FIXED else f for d, f in enumerate(found.follows)]
    return Output(shape, tuple(follows))


def refuse_mixed_rows(
    tried: Module, axes: Axes, most: int, tolerance: float, outputs: Sequence[Output], exact: bool, taken: Outputs
) -> None:
    """Refuses a module that fails with several rows, or whose rows depend on one another."""
    rows = min(CHECKED_ROWS, most)
    xs = trials.example(axes.inputs, axes.shapes(axes.largest()), numpy_types(axes.inputs), rows)
    try:
        ys = tried.run(xs, None)
    except Exception as e:
        if isinstance(e, errors.Error) or _of_the_machine(e):
            raise
        raise errors.Invalid(
            f"the module takes one row, and fails with {rows}: a batch of 1 is fixed in it, in the shape of a view, say. "
            f"Make it for any number of rows, or serve single rows (--max-batch-size=1). {failure(e)}"
        ) from None
    grown = [k for k, (y, o) in enumerate(zip(ys, outputs)) if o.known and math.prod(y.shape[1:]) != math.prod(o.largest)]
    for k in grown:
        raise errors.Invalid(f"in a batch of {rows} a row gives other results than alone: its {taken.names[k]!r} has shape "
            f"{list(ys[k].shape[1:])} there, and {list(outputs[k].largest)} alone, so rows of this model depend on one another"
            f"{taken.others(grown)}")
    trials.refuse_mixed_rows(tried, xs, tolerance, outputs, exact=exact)


_MACHINE = ("out of memory", "can't allocate memory", "CUDA error", "CUDA_ERROR", "CUDA driver", "CUBLAS_STATUS", "CUDNN_STATUS",
    "cuDNN error")


def _of_the_machine(e: Exception) -> bool:
    """Whether the machine caused the error, so that another start may succeed. Most versions of PyTorch have only the text."""
    return isinstance(e, (MemoryError, OSError)) or any(text in str(e) for text in _MACHINE)


def tolerance(module: object, coarse: bool) -> float:
    """How far results may differ, as a part of the largest number. coarse: the module computes with 16 bits."""
    return trials.HALF_TOLERANCE if coarse or is_quantized(module) or _has_16_bits(module) else trials.TOLERANCE


def is_quantized(module: object) -> bool:
    """Whether the module is quantized: then each row may depend a little on the largest number of the batch."""
    if not isinstance(module, torch.nn.Module):
        return False
    if any(t.is_quantized for t in _tensors(module)):
        return True
    if isinstance(module, torch.jit.ScriptModule):
        return "quantized::" in str(module.inlined_graph)
    parts = list(module.modules())
    operations = (str(n.target) for p in parts if isinstance(p, torch.fx.GraphModule) for n in p.graph.nodes)
    return any("quantized" in name for name in (*(type(p).__module__ for p in parts), *operations))


def _has_16_bits(module: object) -> bool:
    """Whether the module computes with numbers of 16 bits or fewer."""
    if not isinstance(module, torch.nn.Module):
        return False
    # By the type: a lazy parameter has no elements yet.
    if any(t.is_floating_point() and t.dtype.itemsize <= 2 for t in _tensors(module)):
        return True
    graph = str(module.inlined_graph) if isinstance(module, torch.jit.ScriptModule) else ""
    return any(sign in graph for sign in (": Half(", ": BFloat16("))  # a frozen module has its weights there, too


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
