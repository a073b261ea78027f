# SPDX-License-Identifier: Apache-2.0
"""Prepares a module: moves it to its device, and compiles or freezes it if the results agree."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Sequence
from typing import Any, Callable

import torch

from .. import errors
from ..binding.tensors import Declared, Specs, declared
from ..worker.arguments import passing, taken_by
from ..worker.axes import Axes, Extra, Input, Output
from ..worker.results import Outputs, only_names
from . import checks, compiling, loading
from .lanes import agree, failure
from .module_call import Compute, named_call, sized, torch_types
from .options import Options
from .planes import output_kind


def prepare(
    module: Callable[..., Any], axes: Axes, device: torch.device, dtype: torch.dtype | None, o: Options,
    extras: Sequence[Extra] = (), pads: Sequence[float | None] = (), rows: int = 1, states: Sequence[Declared] = (),
    outputs: Outputs | None = None, args: Sequence[str] | None = None, packed: bool = False,
) -> tuple[Compute, bool, Compute | None]:  # fmt: skip
    """Three results: the module as a function of device tensors; whether that takes the true sizes of the rows behind its
    inputs; and code that was compiled for full batches only, if there is any. args: the inputs in the module's order.
    packed: the offsets of the rows are the last input. outputs: what is taken of its results, by default all.
    """
    taken = outputs or outputs_of(None)
    names = [i.name for i in axes.inputs] + ["offsets"] * packed
    by_name = [t.name for t in states] + [e.name for e in extras] if args or not packed else names
    how = passing(taken_by(module), [name for name in names if name not in by_name], args, by_name)
    if o.compile not in compiling.MODES:
        raise errors.Invalid(f"compile is {o.compile!r}, must be one of {', '.join(compiling.MODES)}")
    if loading.is_exported(module):
        if dtype is not None or o.channels_last:
            raise errors.Invalid("an exported program keeps its precision and layout: export it in the ones that you want")
    elif isinstance(module, torch.nn.Module):
        placed: Any = module.eval().to(device)
        if dtype is not None:
            placed = placed.to(dtype)
        if o.channels_last:
            placed = placed.to(memory_format=torch.channels_last)
        module = placed

    def ready(x: torch.Tensor) -> torch.Tensor:
        if dtype is not None and x.is_floating_point():
            x = x.to(dtype)
        return x.contiguous(memory_format=torch.channels_last) if o.channels_last and x.dim() == 4 else x

    def prepared(called: Callable[..., Any], fill: bool) -> tuple[Compute, bool]:
        given, change = [*names, *(e.name for e in extras)], ready if dtype is not None or o.channels_last else None
        return sized(named_call(called, change, given, how, taken, states), axes, extras, pads, fill)

    plain, sized_too = prepared(module, False)
    fill = any(e.what == "lengths" for e in extras) and _wants_a_full_row(plain, prepared(module, True)[0], axes, device)
    if fill:
        plain, _ = prepared(module, True)
    if o.compile != "off" and not isinstance(module, torch.jit.ScriptModule):
        recorded, within = device.type == "cuda" and o.cuda_graphs is not False, checks.tolerance(module, dtype is not None)
        one_size = recorded and not axes  # code for one number of rows is faster, and compiles faster
        examples = [example_rows(axes, sized_too, device, n) for n in ([rows] if one_size else sorted({rows, 1}, reverse=True))]

        with checks.refused_inputs(axes.inputs):
            plain(examples[0])

        @torch.inference_mode()
        def compiled() -> Compute:
            with compiling.constant_weights() if one_size else contextlib.nullcontext():
                found, _ = prepared(torch.compile(module, dynamic=not one_size), fill)
                found(examples[0])
            return found

        found = compiling.choose(o.compile, plain, compiled, examples, within, recorded)
        return (plain, sized_too, found) if one_size else (found or plain, sized_too, None)
    if o.compile != "off":
        print("serving TorchScript, which cannot be compiled: export the module (.pt2), or name what makes it (package.module:name)",
            file=sys.stderr)
    if not o.freeze or not isinstance(module, torch.jit.ScriptModule):
        return plain, sized_too, None
    try:
        folded = torch.jit.freeze(module)  # parameters are constants: batch norms go into the convolutions before them
        frozen, _ = prepared(torch.jit.optimize_for_inference(folded) if device.type == "cuda" else folded, fill)
        xs = example_rows(axes, sized_too, device)
        for _ in range(3):  # TorchScript compiles on the second run
            if not agree(frozen(xs), plain(xs)):
                raise ValueError("that gives other results")
    except (RuntimeError, AttributeError, ValueError) as e:  # it changes its parameters, or was frozen before
        print(f"serving the module as it is, not frozen: {failure(e)}", file=sys.stderr)
        return plain, sized_too, None
    return frozen, sized_too, None


def _wants_a_full_row(plain: Compute, filled: Compute, axes: Axes, device: torch.device) -> bool:
    """Whether the module works, or keeps its outputs' sizes, only if a row's length is that of the tensor."""
    *xs, sizes = example_rows(axes, True, device)
    xs.append((sizes + 1) // 2)
    try:
        want = [y.shape for y in filled(xs)]
    except Exception:  # the trials say why
        return False
    try:
        return [y.shape for y in plain(xs)] != want
    except Exception:
        return True


def example_rows(axes: Axes, sized: bool, device: torch.device, rows: int = 1) -> list[torch.Tensor]:
    """Rows of the largest size: random numbers, or zeros if an input is not floating-point."""
    make = {True: torch.rand, False: torch.zeros}
    xs = [make[t.is_floating_point]((rows, *i.shape), device=device).to(t) for i, t in zip(axes.inputs, torch_types(axes.inputs))]
    return [*xs, torch.tensor([axes.largest()] * rows, dtype=torch.int64, device=device)] if sized else xs


def outputs_of(given: Specs | None, states: Sequence[Declared] = (), index: str | None = None) -> Outputs:
    """What is taken of a module's results: outputs=["logits"] names some; declarations name all."""
    picked = only_names(given)
    names = [t.name for t in declared(given or ())] if picked is None else picked
    return Outputs(lambda y: isinstance(y, torch.Tensor), names, picked is not None, [t.name for t in states], index)


def output_texts(
    compute: Compute, shapes: Sequence[Output], inputs: Sequence[Input], axes: Axes, sized: bool, device: torch.device, outputs: Outputs
) -> list[str]:
    """The outputs of one row, as texts."""
    ys = compute(example_rows(axes, sized, device))
    return [s.dims(output_kind(y, torch_types(inputs[:1])[0], name), name) for y, s, name in zip(ys, shapes, outputs.names)]


# -- the process


def short_sleeps() -> None:
    """Lets this thread sleep for microseconds: by default the kernel adds 50 µs."""
    pr_set_timerslack = 29
    ctypes.CDLL(None).prctl(pr_set_timerslack, 1000, 0, 0, 0)


def settle_memory() -> None:
    """Takes loaded objects out of later garbage collections."""
    gc.collect()
    gc.freeze()


def device_of(given: str | torch.device | None) -> torch.device:
    """The given device with its number; by default a GPU if there is one."""
    device = torch.device(given or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise errors.NoGPU("no GPU here: PyTorch sees none")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
