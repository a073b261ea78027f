# SPDX-License-Identifier: Apache-2.0
"""``ringbatch.torch.serve``: prepares a module, tries it, and serves it until it is stopped."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any, Callable

import torch

from .. import errors
from ..binding.library import Duration
from ..binding.tensors import Declared, Specs, declared, parse, signature
from ..weights.following import Follower
from ..weights.following import follower as open_follower
from ..weights.modules import ModuleLoad
from ..worker import program, trials
from ..worker.arguments import listed
from ..worker.axes import Axes, Input, Output, add_buckets, extra_inputs, pad_values
from ..worker.import_path import name_of
from ..worker.lost_gpu import Lost
from ..worker.refusal import for_python, report
from ..worker.ring import Ring, keep_attached, run, worker_options
from ..worker.signals import StopEvent, stop_on_signals
from ..worker.worker import Ending
from . import checks, loading
from . import packed as packing
from .alone import alone
from .follow import FollowingLane
from .lanes import Engine, failure
from .module_call import Module, numpy_types, torch_types
from .planes import Planes, placed
from .preparing import device_of, output_texts, prepare, settle_memory, short_sleeps

DEFAULT_MAX_BATCH = 32  # the broker's default


@for_python
def serve(
    module: Callable[..., Any],
    model: str,
    *,
    inputs: Specs,
    args: Sequence[str] | str | None = None,
    outputs: Specs | None = None,
    state: Specs = (),
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
    packed: str | None = None,
    check: bool = True,
    tolerance: float | None = None,
    depth: int = 2,
    memory: str | None = None,
    weights: str = "none",
    stop: threading.Event | None = None,
    wait: Duration = 10.0,
    **options: Any,
) -> None:
    """Attaches to the broker as a worker and runs the module until stop is set.

    model: the model's name, which clients connect to. inputs, outputs: one row of
    each tensor, as in ringbatch.worker: ["x:f32[3,224,224]"] or
    {"x": ("float32", (3, 224, 224))}. The module takes its inputs by these names. If it has
    others, args says their order: args=["ids", "mask"]. Without outputs the module runs once to find
    them. options: those of ringbatch.worker (max_batch_size=32, wait_time=0.005),
    and socket. wait: how long to wait for a broker, 10 s by default. When the broker
    is restarted the worker attaches again. The first Ctrl-C lets running batches
    finish; the second does not.

    state: the tensors of a sequence (docs/state.md), {"h": ("float32", (512,))}. The module
    takes them by keyword, and returns its outputs and then the new state, in that order;
    or a dict by the names of outputs and state, if outputs are declared.

    cuda_graphs: None records a torch.nn.Module if that works and the results agree.
    freeze: TorchScript may fold and fuse operations if the results agree.
    compile: "on" serves the module compiled by torch.compile; "auto" does so if the
    results agree and a full batch is faster. The code is kept for the next start.

    lengths, mask: the module's argument for the true sizes of padded rows (int64, one
    per row) or for their mask (bool). Requests do not bring it. pad: the value that the
    module ignores as padding, or ["tokens=1"] for single inputs. pad_sizes: round sizes
    up to buckets (powers of two, or buckets=...) if the module ignores padding
    (docs/sizes.md).
    packed: the name of an input, tokens:i64[<=512] for example. Rows of all sizes share a batch without
    padding. The module gets all inputs by keyword, variable ones as one tensor (total, ...), and
    offsets, int32 of rows + 1. "tokens=ids,offsets=cu" chooses other keywords. Set max_batch_cost, the
    tokens of a batch.
    check: refuse a module whose rows give other results in a batch than alone, or
    whose outputs differ from the declared ones. If inputs vary, wrong outputs are
    always refused, because padding is cut off by them. tolerance: how far results may
    differ, as a part of the largest number; default 0.001, or 0.02 on a GPU and for
    modules that are quantized or compute with 16 bits.

    memory: "device" puts the tensors into the memory of the module's GPU, for producers
    on that GPU (docs/gpu.md). One tensor names its own: "x:f16[3,224,224]@device".

    weights: "live" follows the versions that a ringbatch.publisher of this model publishes: they
    are copied into the module in place. The worker waits for the first one.
    """
    if not packed and str(options.get("ragged", False)).lower() == "true":
        raise errors.Invalid("a module is given one tensor of all rows, and ragged rows have none in common: pack them (--packed), "
            "or use @ringbatch.worker")
    trials.refuse_tolerance(tolerance)
    options.setdefault("version", program.of_function(module))
    where = device_of(device)
    if cuda_graphs is None and not isinstance(module, torch.nn.Module):
        cuda_graphs = False  # a replay would leave out the side effects of a function
    tensors, states = declared(inputs), declared(state)
    signature(inputs, outputs or (), state=state)  # refuses a name that is used twice
    load_version = live_load(module, weights, compile, where)
    if load_version is not None:
        freeze = False  # it would fold the weights
    stop = stop or threading.Event()
    if packed:
        if states:
            raise errors.Invalid("--packed does not go with --state")
        if args:
            raise errors.Invalid("--packed passes inputs by name, INPUT=KEYWORD: leave out --args")
        if lengths or mask or pad or channels_last or compile != "off":
            raise errors.Invalid("--packed goes with none of --lengths, --mask, --pad, --channels-last and --compile: there is no padding, "
                "and the module runs as it is")
        rows = int(options.get("max_batch_size") or DEFAULT_MAX_BATCH)
        found, make = packing.plan(module, packed, tensors, None if outputs is None else declared(outputs), where, options, half=half,
            bfloat16=bfloat16, graphs=cuda_graphs, check=check, tolerance=tolerance, depth=depth)  # fmt: skip
        with checks.refused_inputs(list(map(Input.of, tensors))):
            first = make(rows)
        _serve(model, (tensors, found, ()), first, make, "; rows are packed", memory, options, stop, wait, load_version)
        return
    brought = list(map(Input.of, [*tensors, *states]))
    plain = Axes(brought, None)
    extras, pads = extra_inputs(plain, lengths, mask), pad_values(pad, brought)
    most = int(options.get("max_batch_size") or DEFAULT_MAX_BATCH)
    compute, takes_sizes, full = prepare(
        module, plain, where, half, bfloat16, channels_last, freeze, extras, pads, compile, most, cuda_graphs, states,
        [t.name for t in declared(outputs or ())], listed(args),
    )  # fmt: skip
    exact = tolerance is None and not checks.is_quantized(module)
    if tolerance is None:
        tolerance = checks.tolerance(module, half or bfloat16 or where.type == "cuda")
    tried = Module(compute, plain, takes_sizes, where)
    axes, note = plain, ""
    shapes: list[Output] = []
    if plain or outputs is None:
        with checks.refused_inputs(brought):
            axes, shapes, note = trials.settle(tried, brought, numpy_types(brought), options, pad_sizes, pads, tolerance, extras)
    elif check:
        shapes = checks.outputs_of_one_row(tried, plain)
    if note:
        print(f"note: {note}", file=sys.stderr, flush=True)
    if any(not a.buckets for a in axes.axes):
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's attention takes 40 ms to plan each new size
    last = len(shapes) - len(states)  # the new state is behind the outputs
    if outputs is None:
        given = [parse(text) for text in output_texts(compute, shapes[:last], brought, plain, takes_sizes, where)]
    else:
        given = declared(outputs)
        shapes = checks.fit(given, shapes[:last]) + shapes[last:] if shapes else shapes
    if check and shapes and most > 1:
        checks.refuse_mixed_rows(tried, plain, most, tolerance, shapes, exact)
    add_buckets(options, axes)
    specs = [(dtype, i.shape) for i, dtype in zip(brought, torch_types(brought))]

    def larger(rows: int) -> Engine:
        if full is not None:
            print(f"serving the module as it is: it was compiled for {most} rows, and the broker has batches of {rows}; "
                  f"start with --max-batch-size={rows}", file=sys.stderr, flush=True)  # fmt: skip
        return Engine(compute, specs, rows, where, depth, cuda_graphs, axes, shapes, takes_sizes)

    with checks.refused_inputs(brought):  # before attaching: a worker that is still warming up would hold batches
        engine = Engine(compute, specs, most, where, depth, cuda_graphs, axes, shapes, takes_sizes, full)
    _serve(model, (tensors, given, states), engine, larger, axes.text(), memory, options, stop, wait, load_version)


def live_load(module: Any, weights: str, compile: str, device: torch.device) -> ModuleLoad | None:
    """Copies live weights into the module; None if it follows none."""
    if weights not in ("none", "live"):
        raise errors.Invalid(f"weights={weights!r}: want 'none' or 'live'")
    if weights == "none":
        return None
    if compile != "off" and device.type == "cuda":
        raise errors.Invalid("--weights live: on a GPU, compiled code has the weights folded in (--compile); leave one of them out")
    return ModuleLoad(module, in_order=True)


def _serve(
    model: str, sides: tuple[Sequence[Declared], ...], engine: Engine, larger: Callable[[int], Engine], text: str,
    memory: str | None, options: dict[str, Any], stop: threading.Event, wait: Duration, load_version: ModuleLoad | None,
) -> None:  # fmt: skip
    """Serves a module that is warmed up. larger: makes an engine for larger batches, which the broker's policy may allow."""
    where = engine.device
    reads, writes, keeps = ([str(placed(t, memory, where)) for t in side] for side in sides)
    tensors = signature(reads, writes, state=keeps)
    options.setdefault("name", os.environ.get("RINGBATCH_WORKER_NAME", "torch"))
    if where.type == "cuda":
        options.setdefault("gpu", f"{where.index} {torch.cuda.get_device_name(where)}")
    policy = worker_options(depth=len(engine.lanes), **options)
    short_sleeps()
    ended = Ending(stop)
    settle_memory()
    follower: Follower | None = None

    def attached(ring: Ring) -> None:
        nonlocal engine
        if ring.max_batch_size > engine.max_rows:
            engine = larger(ring.max_batch_size)
        if follower is not None:
            follower.look()
        planes = Planes(ring, where)
        engine.bind(planes.inputs, planes.outputs)
        print(f"serving {model}: {tensors} on {options.get('gpu', where)}{text}", flush=True)
        try:
            with engine.current():
                run(ring, [FollowingLane(lane, follower) for lane in engine.lanes] if follower else engine.lanes, ended)
        finally:
            engine.bind([], [])
            if not isinstance(sys.exc_info()[1], Lost):
                engine.check()  # the device is done with the memory
                planes.close()

    with ended.on_ctrl_c():
        if load_version is not None:
            follower = open_follower(model, options.get("socket"), ended.is_set, wait, load_version)
        with contextlib.closing(follower) if follower else contextlib.nullcontext():
            keep_attached(lambda: Ring(model, tensors, policy), attached, ended, wait)


def serve_file(a: argparse.Namespace, settings: dict[str, Any]) -> int:
    """Runs ``ringbatch torch``."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.jit")  # the user asked for TorchScript
    how: dict[str, Any] = dict(
        half=a.half, bfloat16=a.bfloat16, channels_last=a.channels_last, cuda_graphs=a.cuda_graphs, freeze=a.freeze,
        compile=a.compile, depth=a.depth, device=a.device, args=a.args,
    )  # fmt: skip
    try:
        if a.alone and (a.packed or a.state):
            raise errors.Invalid("--alone runs rows of one size without state: leave out --packed and --state")
        if a.alone:
            answers = os.dup(1)
            os.dup2(2, 1)  # bytes on standard output count as batches
        module, told = loading.load(a.target, a.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        inputs = loading.inputs_of(a.target, told, a.input, a.state)
        if a.alone:
            alone(module, inputs, a.alone, lambda: os.read(0, 1) != b"", lambda: os.write(answers, b"."), **how)
            return 0
        stop = StopEvent()
        stop_on_signals(stop)
        name = a.name or os.environ.get("RINGBATCH_MODEL") or name_of(a.target)
        settings.setdefault("version", a.join or program.of_target(
            a.target, [a.half, a.bfloat16, a.lengths, a.mask, a.pad, a.packed, a.state, a.input, a.args, a.weights]))
        sizes: dict[str, Any] = dict(lengths=a.lengths, mask=a.mask, pad=a.pad, pad_sizes=a.buckets, packed=a.packed, **settings)
        inspect.unwrap(serve)(module, name, inputs=inputs, outputs=a.output, state=a.state, check=a.check, tolerance=a.tolerance,
            memory=a.memory, weights=a.weights, stop=stop, socket=a.socket, **how, **sizes)
    except (errors.Error, Lost, OSError, RuntimeError, ValueError) as e:
        report("ringbatch torch", a.target, e, failure(e))
        return 1
    return 0
