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
from dataclasses import fields, replace
from typing import Any, Callable

import torch

from .. import errors
from ..binding.library import Duration
from ..binding.tensors import Specs, declared, numbers, signature
from ..weights.following import Follower
from ..weights.following import follower as open_follower
from ..weights.modules import ModuleLoad
from ..worker import program, trials
from ..worker.arguments import listed
from ..worker.axes import Input
from ..worker.import_path import name_of
from ..worker.lost_gpu import Lost
from ..worker.refusal import for_python, report
from ..worker.results import only_names
from ..worker.ring import Ring, keep_attached, run, worker_options
from ..worker.signals import StopEvent, stop_on_signals
from ..worker.worker import Ending
from . import checks, loading, padded
from . import lists as listing
from . import packed as packing
from .alone import alone
from .follow import FollowingLane
from .lanes import Engine, Plan, failure
from .options import Options
from .planes import Planes, placed
from .preparing import device_of, outputs_of, settle_memory, short_sleeps

DEFAULT_MAX_BATCH = 32  # the broker's default


@for_python
def serve(
    module: Callable[..., Any],
    model: str,
    *,
    inputs: Specs,
    outputs: Specs | None = None,
    args: Sequence[str] | str | None = None,
    state: Specs = (),
    packed: Sequence[str] = (),
    lists: bool = False,
    index: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    live_weights: bool = False,
    options: Options = Options(),  # noqa: B008 - it is frozen
    stop: threading.Event | None = None,
    wait: Duration = 10.0,
    **policy: Any,
) -> None:
    """Attaches to the broker as a worker and runs the module until stop is set.

    model: the model's name, which clients connect to. inputs, outputs: one row of
    each tensor, as in ringbatch.worker: ["x:f32[3,224,224]"] or
    {"x": ("float32", (3, 224, 224))}. The module takes its inputs by these names. If it has
    others, args says their order: args=["ids", "mask"]. Without outputs the module runs once to find them: tensors in
    dicts, dataclasses and tuples get names like logits and past.0. outputs=["logits"] serves some of them.
    dtype: compute in torch.float16 or torch.bfloat16, independent of the tensors' types.
    policy: the other arguments of ringbatch.worker (max_batch_size=32, wait_time=0.005, share=2),
    and socket. wait: how long to wait for a broker, 10 s by default. When the broker
    is restarted the worker attaches again. The first Ctrl-C lets running batches
    finish; the second does not.

    state: the tensors of a sequence (docs/state.md), {"h": ("float32", (512,))}. The module
    takes them by keyword, and returns its outputs and then the new state, in that order;
    or a dict by the names of outputs and state, if outputs are declared.

    packed: all inputs of variable size, ["tokens"] for tokens:i64[<=512]. Rows of all sizes share a batch without
    padding. The module gets all inputs by keyword, those as one tensor (total, ...), and
    offsets, int32 of rows + 1; with args by position, offsets among them. Set max_batch_cost, the
    tokens of a batch.

    lists: the module takes a list of tensors for each input, and returns a list with a result for each row, as detectors do.
    Outputs are declared, {"boxes": ("float32", ("<=100", 4))}: each row has its own number of them, up to that. It runs as
    it is, without graphs; images of different sizes share a batch.
    index: the module takes tensors as others do, and returns the boxes of all rows as one tensor. The result of this name
    (y0, y1 ... of a tuple) is the row of the batch that each belongs to. Outputs are declared as with lists.

    On the CPU the module may change and keep its inputs. On a GPU they are buffers of later batches: clone what it keeps.

    live_weights: follow the versions that a ringbatch.publisher of this model publishes: they
    are copied into the module in place. The worker waits for the first one.
    """
    o = options
    if wrong := sorted({f.name for f in fields(Options)} & policy.keys()):
        raise errors.Invalid(f"{wrong[0]} is an option: options=ringbatch.torch.Options({wrong[0]}=...)")
    if not packed and not lists and str(policy.get("ragged", False)).lower() == "true":
        raise errors.Invalid("a module is given one tensor of all rows, and ragged rows have none in common: pack them (--packed), "
            "or use @ringbatch.worker")
    if packed and state:
        raise errors.Invalid("--packed does not go with --state")
    trials.refuse_tolerance(o.tolerance)
    policy.setdefault("version", program.of_function(module))
    where = device_of(device)
    if o.cuda_graphs is None and not isinstance(module, torch.nn.Module):
        o = replace(o, cuda_graphs=False)  # a replay would leave out the side effects of a function
    tensors, states = numbers(inputs), declared(state)
    taken = outputs_of(outputs, states, index)
    wanted = None if outputs is None or only_names(outputs) else numbers(outputs)
    signature(inputs, [str(t) for t in wanted or ()], state=state)  # refuses a name that is used twice
    if lists or index is not None:
        plain = replace(o, check=True, tolerance=None, cuda_graphs=None, pad=o.pad or None) == Options()
        plain &= not any(key.partition(".")[0] == "buckets" for key in policy)
        plain &= lists or any(0 in t.variable for t in wanted or ())
        if wanted is None or packed or state or live_weights or dtype is not None or not plain or (lists and index):
            raise errors.Invalid(f"{'--lists' if lists else '--index'} wants all outputs declared, --output 'boxes:f32[<=100,4]', no "
                "buckets, and of the module's other flags only --args, --device, --no-check and --tolerance")
        if any(t.variable for t in tensors):
            policy.setdefault("ragged", lists)
        if isinstance(module, torch.nn.Module) and not loading.is_exported(module):
            module = module.eval().to(where)
        made = listing.Lists(module, tensors, wanted, index, listed(args), where, taken)
        made.try_rows(o.check, checks.tolerance(module, where.type == "cuda") if o.tolerance is None else o.tolerance)
        return listing.serve(made, model, inputs, [str(t) for t in wanted], policy, stop, wait)
    load = None
    if live_weights:
        if o.compile != "off" and where.type == "cuda":
            raise errors.Invalid("--live-weights: on a GPU, compiled code has the weights folded in (--compile); leave one of them out")
        load = ModuleLoad(module, in_order=True)
        o = replace(o, freeze=False)  # it would fold the weights
    rows = int(policy.get("max_batch_size") or DEFAULT_MAX_BATCH)
    if packed:
        plan = packing.plan(module, packed, tensors, wanted, args, where, dtype, o, rows, policy, taken)
    else:
        plan = padded.plan(module, tensors, wanted, states, args, where, dtype, o, rows, policy, taken)
    with checks.refused_inputs(list(map(Input.of, [*tensors, *states]))):  # before attaching: a worker that warms up would hold batches
        engine = plan.engine(rows)
    reads, writes, keeps = ([str(placed(t, o.memory, where)) for t in side] for side in (tensors, plan.outputs, states))
    _serve(model, signature(reads, writes, state=keeps), plan, engine, stop or threading.Event(), wait, load)


def _serve(
    model: str, tensors: str, plan: Plan, engine: Engine, stop: threading.Event, wait: Duration, load: ModuleLoad | None
) -> None:
    """Serves a module that is warmed up."""
    where, policy = engine.device, plan.policy
    policy.setdefault("name", os.environ.get("RINGBATCH_WORKER_NAME", "torch"))
    if where.type == "cuda":
        policy.setdefault("gpu", f"{where.index} {torch.cuda.get_device_name(where)}")
    worker = worker_options(depth=len(engine.lanes), **policy)
    short_sleeps()
    ended = Ending(stop)
    settle_memory()
    follower: Follower | None = None

    def attached(ring: Ring) -> None:
        nonlocal engine
        if ring.max_batch_size > engine.max_rows:  # the broker's policy allows larger batches
            engine = plan.engine(ring.max_batch_size)
        if follower is not None:
            follower.look()
        planes = Planes(ring, where)
        engine.bind(planes.inputs, planes.outputs)
        print(f"serving {model}: {tensors} on {policy.get('gpu', where)}{plan.text}", flush=True)
        try:
            with engine.current():
                run(ring, [FollowingLane(lane, follower) for lane in engine.lanes] if follower else engine.lanes, ended)
        finally:
            engine.bind([], [])
            if not isinstance(sys.exc_info()[1], Lost):
                engine.check()  # the device is done with the memory
                planes.close()

    with ended.on_ctrl_c():
        if load is not None:
            follower = open_follower(model, policy.get("socket"), ended.is_set, wait, load)
        with contextlib.closing(follower) if follower else contextlib.nullcontext():
            keep_attached(lambda: Ring(model, tensors, worker), attached, ended, wait)


def serve_file(a: argparse.Namespace, policy: dict[str, Any]) -> int:
    """Runs ``ringbatch torch``."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.jit")  # the user asked for TorchScript
    options = Options(**{f.name: getattr(a, f.name) for f in fields(Options)})
    dtype = torch.float16 if a.half else torch.bfloat16 if a.bfloat16 else None
    how: dict[str, Any] = dict(args=a.args, device=a.device, dtype=dtype, options=options)
    try:
        if a.alone and (a.packed or a.state or a.lists or a.index):
            raise errors.Invalid("--alone runs rows of one size without state: leave out --packed, --state, --lists and --index")
        if a.alone:
            answers = os.dup(1)
            os.dup2(2, 1)  # bytes on standard output count as batches
        module, told = loading.load(a.target, a.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        inputs = loading.inputs_of(a.target, told, a.input, a.state)
        if a.alone:
            alone(module, inputs, a.alone, lambda: os.read(0, 1) != b"", lambda: os.write(answers, b"."), outputs=a.output, **how)
            return 0
        stop = StopEvent()
        stop_on_signals(stop)
        name = a.name or os.environ.get("RINGBATCH_MODEL") or name_of(a.target)
        policy.setdefault("version", a.join or program.of_target(
            a.target, [a.half, a.bfloat16, a.lengths, a.mask, a.pad, a.packed, a.state, a.input, a.args, a.live_weights, a.lists,
                a.index]))
        inspect.unwrap(serve)(module, name, inputs=inputs, outputs=a.output, state=a.state, packed=listed(a.packed) or (),
            live_weights=a.live_weights, lists=a.lists, index=a.index, stop=stop, socket=a.socket, **how, **policy)
    except (errors.Error, Lost, OSError, RuntimeError, ValueError) as e:
        report("ringbatch torch", a.target, e, failure(e))
        return 1
    return 0
