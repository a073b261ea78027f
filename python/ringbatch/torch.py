# SPDX-License-Identifier: Apache-2.0
"""Serves a PyTorch module: whole batches straight from the ring.

    import ringbatch.torch

    ringbatch.torch.serve(
        module,
        "resnet50",
        inputs=["x:f32[3,224,224]"],
        max_batch_size=32,
        half=True,
        channels_last=True,
    )

or from the command line, for an exported program, a TorchScript file, or what
a function of yours makes:

    ringbatch torch resnet50.pt2
    ringbatch torch resnet50.jit --input 'x:f32[3,224,224]' --half --channels_last
    ringbatch torch mymodels.vision:resnet50 --input 'x:f32[3,224,224]' --processes 2

The ring is registered as pinned memory once. Inputs are copied on a stream of
their own while the batch before them computes; outputs are written in place.
A module is recorded as CUDA graphs where that works.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import re
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any, Callable

import torch

from . import _sizes, _torch_check, _torch_compile, _torch_kept, _torch_load, errors
from ._lost import Lost
from ._refusal import report
from ._ring import Ring, Rows, keep_attached, run, worker_options
from ._serve_targets import name_of
from ._stopping import StopEvent, stop_on_signals
from ._tensors import in_memory
from ._torch_cache import cache_folder, kept_bytecode
from ._torch_fingerprint import fingerprint
from ._torch_lanes import Engine, agree, failure
from ._torch_planes import DTYPES, NAMES, Plane, Planes
from ._torch_sizes import Compute, Module, named_call, numpy_types, sized, torch_types
from ._worker import Ending

__all__ = ["serve"]

DEFAULT_MAX_BATCH = 32  # the broker's, where nobody says otherwise


def serve(
    module: Callable[..., Any],
    model: str,
    *,
    inputs: Sequence[str],
    outputs: Sequence[str] | None = None,
    device: str | torch.device | None = None,
    half: bool = False,
    bfloat16: bool = False,
    channels_last: bool = False,
    cuda_graphs: bool | None = None,
    freeze: bool = True,
    compile: str = "off",
    lengths: str | None = None,
    mask: str | None = None,
    pad: Sequence[str] | str | float | None = None,
    pad_sizes: bool = True,
    check: bool = True,
    tolerance: float | None = None,
    depth: int = 2,
    memory: str | None = None,
    stop: threading.Event | None = None,
    wait: float = 10.0,
    **options: Any,
) -> None:
    """Attaches to the broker as a worker and runs the module until stop is set.

    inputs and outputs are texts like "x:f32[3,224,224]", one row each; without
    outputs the module is run once to find out. options are those of
    ringbatch.worker, as max_batch_size=32, wait_time=0.005, and socket.
    wait: seconds to wait for a broker that is not there yet. When the broker
    is restarted the worker attaches again. Ctrl-C lets the batches that run
    finish first; a second one does not.

    cuda_graphs: True or False, or None: a torch.nn.Module is recorded if that
    works and gives the same results. freeze: TorchScript may fold and fuse
    operations; again only if the results agree. compile: "on" serves what
    torch.compile makes of the module, "auto" if its results agree and it is
    quicker for a full batch; the compiled code is kept for the next start.

    lengths, mask: the argument of the module that takes the true sizes of padded
    rows (int64, one per row), or their mask (bool, true where a row is); requests
    do not bring it. pad: the value that the module knows padding by, or ["tokens=1"]
    for single inputs. pad_sizes: round sizes up to buckets, powers of two unless buckets
    says otherwise, if the module ignores padding (docs/sizes.md).
    check: refuse a module whose rows do not give in a batch what they give alone,
    or whose outputs are not those declared; where inputs vary the latter is refused
    in any case, since padding is cut off by it. tolerance: how far results may
    differ, as a part of the largest number; default 0.001, or 0.02 on a GPU and
    where the module is quantized or computes with 16 bits.

    memory: "device" has the tensors lie in the memory of the module's GPU, for
    producers that have theirs there (docs/gpu.md); a single one says it itself:
    "x:f16[3,224,224]@device", "y:f32[10]@host".
    """
    if str(options.get("ragged", False)).lower() == "true":
        raise errors.Invalid("a module is given one tensor of all rows, and ragged rows have none in common: use @ringbatch.worker")
    _sizes.refuse_tolerance(tolerance)
    where = _device(device)
    if cuda_graphs is None and not isinstance(module, torch.nn.Module):
        cuda_graphs = False  # a function may do things that a replay would leave out
    brought = list(map(_input, inputs))
    plain = _sizes.Axes(brought, None)
    extras, pads = _sizes.extras(plain, lengths, mask), _sizes.pad_values(pad, brought)
    most = int(options.get("max_batch_size") or DEFAULT_MAX_BATCH)
    stop = stop or threading.Event()
    try:
        compute, takes_sizes, full = _prepare(
            module, plain, where, half, bfloat16, channels_last, freeze, extras, pads, compile, most, cuda_graphs, stop.is_set
        )
    except _torch_compile.Stopped:
        return
    exact = tolerance is None and not _torch_check.is_quantized(module)
    if tolerance is None:
        tolerance = _torch_check.tolerance(module, half or bfloat16 or where.type == "cuda")
    tried = Module(compute, plain, takes_sizes, where)
    axes, note = plain, ""
    shapes: list[_sizes.Output] = []
    if plain or outputs is None:
        axes, shapes, note = _sizes.settle(tried, brought, numpy_types(brought), options, pad_sizes, pads, tolerance)
    elif check:
        shapes = _torch_check.outputs_of_one_row(tried, plain)
    if note:
        print(f"note: {note}", file=sys.stderr, flush=True)
    if any(not a.buckets for a in axes.axes):
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's attention builds a plan for every new size, which takes 40 ms
    if outputs is None:
        outputs = _output_texts(compute, shapes, brought, plain, takes_sizes, where)
    elif shapes:
        shapes = _torch_check.fit([(name, shape, variable) for name, _, shape, variable in map(parse_spec, outputs)], shapes)
    if check and shapes and most > 1:
        _torch_check.refuse_mixed_rows(tried, plain, most, tolerance, shapes, exact)
    _sizes.add_buckets(options, axes)
    signature = " -> ".join(" ".join(_placed(text, memory, where) for text in side) for side in (inputs, outputs))
    options.setdefault("name", os.environ.get("RINGBATCH_WORKER_NAME", "torch"))
    if where.type == "cuda":
        options.setdefault("gpu", f"{where.index} {torch.cuda.get_device_name(where)}")
    policy = worker_options(depth=depth, **options)
    short_sleeps()
    ended = Ending(stop)
    specs = [(dtype, shape) for _, dtype, shape, _ in map(parse_spec, inputs)]
    # Before attaching: a worker that is still warming up would hold batches.
    engine = Engine(compute, specs, most, where, depth, cuda_graphs, axes, shapes, takes_sizes, full)
    _settle()

    def attached(ring: Ring) -> None:
        nonlocal engine
        if ring.max_batch_size > engine.max_rows:  # the broker knows the model by larger batches
            if full is not None:
                print(f"serving the module as it is: it was compiled for {most} rows, and the broker has batches of {ring.max_batch_size}; "
                      f"start with --max_batch_size={ring.max_batch_size}", file=sys.stderr, flush=True)  # fmt: skip
            engine = Engine(compute, specs, ring.max_batch_size, where, depth, cuda_graphs, axes, shapes, takes_sizes)
        planes = Planes(ring, where)
        engine.bind(planes.inputs, planes.outputs)
        print(f"serving {model}: {signature} on {options.get('gpu', where)}{axes.text()}", flush=True)
        try:
            with engine.current():
                run(ring, engine.lanes, ended)
        finally:
            engine.bind([], [])
            if not isinstance(sys.exc_info()[1], Lost):
                engine.check()  # the device is done with the memory
                planes.close()

    with ended.on_ctrl_c():
        keep_attached(lambda: Ring(model, signature, policy), attached, ended, wait)


def short_sleeps() -> None:
    """Lets this thread sleep for microseconds: the kernel rounds up by 50 µs otherwise."""
    pr_set_timerslack = 29
    ctypes.CDLL(None).prctl(pr_set_timerslack, 1000, 0, 0, 0)


def _settle() -> None:
    """What was loaded stays: from here on the garbage collector need not look at it, batch after batch."""
    gc.collect()
    gc.freeze()


def _device(given: str | torch.device | None) -> torch.device:
    """The device asked for, with its number; a GPU if there is one, where nobody asked."""
    device = torch.device(given or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise errors.NoGPU("no GPU here: PyTorch sees none")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _prepare(
    module: Callable[..., Any], axes: _sizes.Axes, device: torch.device, half: bool, bfloat16: bool, channels_last: bool, freeze: bool,
    extras: Sequence[_sizes.Extra] = (), pads: Sequence[float | None] = (), compile: str = "off", rows: int = 1, graphs: bool | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[Compute, bool, Compute | None]:  # fmt: skip
    """The module as a function of device tensors, in the precision asked for; True if the true sizes of the rows follow its inputs.

    The third is code that was compiled for full batches only, where there is some.
    """
    dtype = torch.float16 if half else torch.bfloat16 if bfloat16 else None
    if compile not in _torch_compile.MODES:
        raise errors.Invalid(f"compile is {compile!r}, must be one of {', '.join(_torch_compile.MODES)}")
    if _torch_load.is_exported(module):
        if dtype is not None or channels_last:
            raise errors.Invalid("an exported program keeps the precision and the layout that it was exported with: export it so")
    elif isinstance(module, torch.nn.Module):
        placed: Any = module.eval().to(device)
        if dtype is not None:
            placed = placed.to(dtype)
        if channels_last:
            placed = placed.to(memory_format=torch.channels_last)
        module = placed

    def ready(x: torch.Tensor) -> torch.Tensor:
        if dtype is not None and x.is_floating_point():
            x = x.to(dtype)
        return x.contiguous(memory_format=torch.channels_last) if channels_last and x.dim() == 4 else x

    def prepared(called: Callable[..., Any]) -> tuple[Compute, bool]:
        return sized(named_call(called, ready), axes, extras, pads)

    plain, sized_too = prepared(module)
    if compile != "off" and not isinstance(module, torch.jit.ScriptModule):
        recorded, within = device.type == "cuda" and graphs is not False, _torch_check.tolerance(module, dtype is not None)
        one_size = recorded and not axes  # code for one number of rows is better code, and sooner made
        examples = [_example(axes, sized_too, device, n) for n in ([rows] if one_size else sorted({rows, 1}, reverse=True))]

        where = torch.cuda.get_device_name(device) if device.type == "cuda" else device
        of = where, module, _torch_compile.code_of(module), [(tuple(x.shape), x.dtype) for x in examples[0]], dtype, channels_last, one_size

        # After a first run, which may import more, and before compiling, which does: what is imported is part of it.
        plain(examples[0])
        state = fingerprint(module) if one_size and isinstance(module, torch.nn.Module) else None

        def right(code: Callable[..., Any]) -> bool:
            return _torch_compile.differ_at_most(within, named_call(code, ready)(examples[0], {}), plain(examples[0]))

        def read(folder: str) -> bool:
            return state is None or _torch_kept.is_kept(f"{of} {device}", state, folder)

        @torch.inference_mode()
        def compiled() -> Compute:
            with _torch_compile.constant_weights() if one_size else contextlib.nullcontext():
                if state is not None and isinstance(module, torch.nn.Module):
                    code = _torch_kept.load_or_compile(module, list(map(ready, examples[0])), f"{of} {device}", state, cache_folder(), right)
                else:
                    code = torch.compile(module, dynamic=not one_size)
                found, _ = prepared(code)
                found(examples[0])
            return found

        with kept_bytecode():
            found = _torch_compile.choose(compile, plain, compiled, examples, within, recorded, of, read, stopped)
        return (plain, sized_too, found) if one_size else (found or plain, sized_too, None)
    if compile != "off":
        print("serving TorchScript, which cannot be compiled: export the module (.pt2), or name what makes it (package.module:name)", file=sys.stderr)
    if not freeze or not isinstance(module, torch.jit.ScriptModule):
        return plain, sized_too, None
    try:
        frozen, _ = prepared(_frozen(module, device))
        xs = _example(axes, sized_too, device)
        for _ in range(3):  # TorchScript compiles on the second run
            if not agree(frozen(xs), plain(xs)):
                raise ValueError("that gives other results")
    except (RuntimeError, AttributeError, ValueError) as e:  # it changes its parameters, or was frozen before, or …
        print(f"serving the module as it is, not frozen: {failure(e)}", file=sys.stderr)
        return plain, sized_too, None
    return frozen, sized_too, None


def _frozen(module: torch.jit.ScriptModule, device: torch.device) -> torch.jit.ScriptModule:
    """With constants for parameters: batch norms go into the convolutions before them, and on a GPU what is added and clipped after."""
    frozen = torch.jit.freeze(module)
    return torch.jit.optimize_for_inference(frozen) if device.type == "cuda" else frozen


def _example(axes: _sizes.Axes, sized: bool, device: torch.device, rows: int = 1) -> list[torch.Tensor]:
    """Rows of the largest size: random numbers, or zeros where an input is not floating-point."""
    make = {True: torch.rand, False: torch.zeros}
    xs = [make[t.is_floating_point]((rows, *i.shape), dtype=t, device=device) for i, t in zip(axes.inputs, torch_types(axes.inputs))]
    return [*xs, torch.tensor([axes.largest()] * rows, dtype=torch.int64, device=device)] if sized else xs


def parse_spec(text: str) -> tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...]]:
    """x:f32[3,<=224] as name, dtype, largest shape, variable dimensions."""
    m = re.fullmatch(r"([^:\[\]]+):(\w+)\[([\d,<=\s]*)\](@\w+(:\d+)?)?", text.strip())
    if not m or m[2] not in NAMES:
        raise errors.Invalid(f"tensor {text!r}: want name:dtype[dims], like x:f32[3,224,224]")
    dims = [d.strip() for d in m[3].split(",") if d.strip()]
    shape = tuple(int(d.removeprefix("<=")) for d in dims)
    return m[1], DTYPES[NAMES.index(m[2])], shape, tuple(i for i, d in enumerate(dims) if d.startswith("<="))


def _placed(text: str, memory: str | None, device: torch.device) -> str:
    """A tensor's text with where it lies: on the module's own GPU, if on any."""
    text = in_memory(text.strip(), memory)
    base, at, named = text.partition("@")
    if not at or named == "host":
        return base
    if device.type != "cuda":
        raise errors.NoGPU(f"tensor {base} in device memory: the module is on the {device}, and such memory is for modules on a GPU")
    if named not in ("device", f"device:{device.index}"):
        raise errors.WrongGPU(f"tensor {base} in the memory of {named}: the module is on cuda:{device.index}, and its tensors must be too")
    return f"{base}@device:{device.index}"


def _input(text: str) -> _sizes.Input:
    """Variable dimensions of one size go together: tokens:i64[<=512] and mask:i64[<=512] are as long as each other."""
    name, dtype, shape, variable = parse_spec(text)
    return _sizes.Input(name, NAMES[DTYPES.index(dtype)], shape, variable, tuple(f"<={shape[d]}" for d in variable))


def _output_texts(
    compute: Compute, shapes: Sequence[_sizes.Output], inputs: Sequence[_sizes.Input], axes: _sizes.Axes, sized: bool, device: torch.device
) -> list[str]:
    """Runs one row. Floating-point outputs take the first input's type."""
    first = torch_types(inputs[:1])[0]
    ys = compute(_example(axes, sized, device))
    texts = []
    for k, (y, shape) in enumerate(zip(ys, shapes)):
        dtype = first if y.is_floating_point() and first.is_floating_point else y.dtype
        texts.append(shape.dims(NAMES[DTYPES.index(dtype)], "y" if len(ys) == 1 else f"y{k}"))
    return texts


def alone(module: Callable[..., Any], inputs: Sequence[str], rows: int, go_on: Callable[[], bool], done: Callable[[], Any], **o: Any) -> None:
    """The upper bound: full batches from this process's own pinned memory, no broker.

    Before each batch is waited for go_on is asked, and ends everything by
    returning False; done is called when it is done. As many batches are in
    flight as a worker would have.
    """
    device = _device(o.pop("device", None))
    depth, graphs = o.pop("depth", 2), o.pop("cuda_graphs", None)
    short_sleeps()
    axes = _sizes.Axes(list(map(_input, inputs)), None)
    compute, _, full = _prepare(module, axes, device, rows=rows, graphs=graphs, **o)
    slots = depth * rows
    numbers = torch.arange(slots, dtype=torch.int32)

    def plane(text: str) -> Plane:
        _, dtype, shape, variable = parse_spec(text)
        host = torch.rand((slots, int(torch.Size(shape).numel()))).to(dtype)
        return Plane(shape, variable, host.pin_memory() if device.type == "cuda" else host)

    specs = [(dtype, shape) for _, dtype, shape, _ in map(parse_spec, inputs)]
    engine = Engine(compute, specs, rows, device, depth, graphs, full=full)
    largest = [_sizes.Output(tuple(y.shape[1:]), (_sizes.FIXED,) * (y.dim() - 1)) for y in compute(_example(axes, False, device))]
    outputs = _output_texts(compute, largest, axes.inputs, axes, False, device)
    engine.bind([plane(s) for s in inputs], [plane(s) for s in outputs])
    _settle()
    shapes = [shape for _, shape in specs]
    batches = [Rows(rows, numbers[n * rows :].data_ptr(), [(n * rows, 0, rows)], shapes) for n in range(depth)]
    with engine.current():
        for lane, batch in zip(engine.lanes, batches):
            lane.start(batch)
        while True:
            for lane, batch in zip(engine.lanes, batches):
                if not go_on():
                    return
                lane.wait()
                done()
                lane.release()
                lane.start(batch)


def serve_file(a: argparse.Namespace, settings: dict[str, Any]) -> int:
    """What ``ringbatch torch`` does."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.jit")  # TorchScript is what was asked for
    how: dict[str, Any] = dict(
        half=a.half, bfloat16=a.bfloat16, channels_last=a.channels_last, cuda_graphs=a.cuda_graphs, freeze=a.freeze,
        compile=a.compile, depth=a.depth, device=a.device,
    )  # fmt: skip
    try:
        if a.alone:
            answers = os.dup(1)
            os.dup2(2, 1)  # what is printed, here or by the module, would count as batches
        module, told = _torch_load.load(a.target, a.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        inputs = _torch_load.inputs_of(a.target, told, a.input)
        if a.alone:
            alone(module, inputs, a.alone, lambda: os.read(0, 1) != b"", lambda: os.write(answers, b"."), **how)
            return 0
        stop = StopEvent()
        stop_on_signals(stop)
        name = a.name or os.environ.get("RINGBATCH_MODEL") or name_of(a.target)
        sizes: dict[str, Any] = dict(lengths=a.lengths, mask=a.mask, pad=a.pad, pad_sizes=a.buckets, **settings)
        serve(module, name, inputs=inputs, outputs=a.output, check=a.check, tolerance=a.tolerance, memory=a.memory, stop=stop, socket=a.socket, **how, **sizes)
    except (errors.Error, Lost, OSError, RuntimeError, ValueError) as e:
        report("ringbatch torch", a.target, e, failure(e))
        return 1
    return 0


if __name__ == "__main__":
    from ringbatch import _torch_cli

    _torch_cli.main_and_exit()
