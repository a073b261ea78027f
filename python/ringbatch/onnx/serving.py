# SPDX-License-Identifier: Apache-2.0
"""``ringbatch.onnx.serve``: loads a model, tries it, and serves it until it is stopped."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import onnxruntime as ort

from .. import errors
from ..binding.library import Duration, cores
from ..binding.tensors import signature
from ..worker import program, trials
from ..worker.axes import Axes, Output, add_buckets, pad_values
from ..worker.lanes import run_in_turns
from ..worker.lost_gpu import Lost
from ..worker.refusal import for_python, note, report
from ..worker.ring import Ring, keep_attached, worker_options
from ..worker.signals import StopEvent, stop_on_signals
from ..worker.worker import Ending
from .graph import Graph, failure, first_line, refuse_states, session_of
from .session_lane import Runner, SessionLane

DEFAULT_MAX_BATCH = 32  # the broker's default
CHECKED_ROWS = 3


@for_python
def serve(
    file: str | Path | bytes,
    model: str,
    *,
    dims: Mapping[str, str] | None = None,
    outputs: Sequence[str] | None = None,
    state: Mapping[str, tuple[str, str]] | None = None,
    providers: Sequence[str] | None = None,
    threads: int = 0,
    spin: bool = True,
    lengths: str | None = None,
    mask: str | None = None,
    pad: Sequence[str] | str | float | None = None,
    pad_sizes: bool = True,
    check: bool = True,
    tolerance: float | None = None,
    depth: int = 2,
    stop: threading.Event | None = None,
    wait: Duration = 10.0,
    **options: Any,
) -> None:
    """Attaches to the broker as a worker and runs the file's graph until stop is set.

    file: the path of an ONNX file, or its bytes. model: the model's name, which clients
        connect to.
    dims: the largest size of each dimension that the graph leaves open, besides
        the batch: ``{"seq": "<=512"}``, or ``{"seq": 128}`` if it never changes.
        A dimension without a symbol is named by its place in a row: ``tokens.0``.
    outputs: the names of the graph's outputs to serve, in this order; default: all.
    state: of sequences (docs/state.md), ``{"h": ("h_in", "h_out")}``: the graph's input for
        the state, and its output for the next one.
    providers: of onnxruntime; the first that can run an operation does. threads: of
        one operation; 0 is one per core. spin: whether they spin between operations.
    lengths, mask: the graph's input for the true sizes of padded rows, or for their
        mask. Requests do not bring it.
    pad: the value that the graph ignores as padding, or ``["tokens=1"]`` for single inputs.
    pad_sizes: round sizes up to buckets (powers of two, or ``buckets=...``) if the graph
        ignores padding.
    check: refuse a graph whose rows give other results in a batch than alone.
    tolerance: of both, as a part of the largest number; default 0.001, or 0.02
        if an output is float16.
    options, wait, stop: those of ringbatch.worker and its run.
    """
    if str(options.get("ragged", False)).lower() == "true":
        raise errors.Invalid("a graph is given one tensor of all rows, and ragged rows have none in common: use @ringbatch.worker")
    options.setdefault("version", program.of_target(file, [dims, outputs, state, lengths, mask, pad]))
    max_batch = int(options.get("max_batch_size") or DEFAULT_MAX_BATCH)
    p = prepare(file, dims or {}, providers, threads, lengths, mask, pad, pad_sizes, options, check and max_batch > 1, tolerance, spin,
        state, outputs)
    options.setdefault("name", os.environ.get("RINGBATCH_WORKER_NAME", "onnx"))
    options.setdefault("gather_threads", min(8, max(1, cores() // 2)))  # another lane computes meanwhile
    add_buckets(options, p.axes)
    warm_up(p, max_batch)
    ended = Ending(stop or threading.Event())

    def attached(ring: Ring) -> None:
        print(f"serving {model}: {p.signature} with {p.session.get_providers()[0]}{p.axes.text()}", flush=True)
        lanes = [SessionLane(ring, p.session, p.graph, p.outputs, p.axes, p.pads) for _ in range(max(1, depth))]
        run_in_turns(ring, lanes, ended, at_once)

    # If sizes vary, batches are seldom full and leave cores idle: then all lanes may compute at once.
    at_once = depth if p.axes else 1
    policy = worker_options(depth=depth, lanes=at_once, **options)
    with ended.on_ctrl_c():
        keep_attached(lambda: Ring(model, p.signature, policy), attached, ended, wait)


class Prepared(NamedTuple):
    """A model after its trials."""

    session: ort.InferenceSession
    graph: Graph
    runner: Runner
    axes: Axes
    outputs: list[Output]
    pads: list[float | None]
    signature: str


def prepare(
    model: str | Path | bytes, dims: Mapping[str, str], providers: Sequence[str] | None = None, threads: int = 0,
    lengths: str | None = None,
    mask: str | None = None, pad: Sequence[str] | str | float | None = None, pad_sizes: bool = True,
    settings: Mapping[str, Any] | None = None, check: bool = True, tolerance: float | None = None, spin: bool = True,
    state: Mapping[str, tuple[str, str]] | None = None, outputs: Sequence[str] | None = None,
) -> Prepared:  # fmt: skip
    """Loads a model, finds its signature and tries whether it may be batched and padded."""
    trials.refuse_tolerance(tolerance)
    session = session_of(model, threads, providers, spin)
    graph = Graph(session, dims, lengths, mask, state, outputs)
    runner = Runner(session, graph)
    pads, exact = pad_values(pad, graph.inputs), tolerance is None
    if tolerance is None:
        tolerance = trials.HALF_TOLERANCE if any(o.kind == "f16" for o in graph.outputs) else trials.TOLERANCE
    try:
        axes, shapes, why = trials.settle(runner, graph.inputs, graph.dtypes(), settings or {}, pad_sizes, pads, tolerance,
            graph.extras)
    except errors.Error:
        raise
    except Exception as e:
        raise failure(e, session.get_providers(), "the model fails on rows of zeros and ones: ") from None
    refuse_states(graph.states, graph.inputs, shapes)
    if check:
        _check(session, runner, graph, axes, tolerance, exact)
    if why:
        note(why)
    reads, writes = [str(i) for i in graph.inputs], [o.dims(n.kind, n.public) for n, o in zip(graph.outputs, shapes)]
    ins, outs = len(reads) - len(graph.states), len(writes) - len(graph.states)
    return Prepared(session, graph, runner, axes, shapes, pads, signature(reads[:ins], writes[:outs], state=reads[ins:]))


def _check(session: ort.InferenceSession, runner: Runner, graph: Graph, axes: Axes, tolerance: float, exact: bool) -> None:
    xs = trials.example(graph.inputs, axes.shapes(axes.largest()), graph.dtypes(), CHECKED_ROWS)
    try:
        trials.refuse_mixed_rows(runner, xs, tolerance, exact=exact)
    except errors.Error:
        raise
    except Exception as e:
        raise failure(
            e,
            session.get_providers(),
            f"the model takes one row, and fails with {CHECKED_ROWS}: a batch of 1 is fixed inside the graph, for example in a Reshape. "
            "Export it with a free batch, or serve single rows (--max-batch-size=1). ",
        ) from None


def warm_up(p: Prepared, max_batch: int) -> None:
    """Runs all shapes, so that the first requests are not slow."""
    rows = sorted({max_batch} | {2**i for i in range(max_batch.bit_length())}, reverse=True)
    for point in p.axes.points():
        shapes = p.axes.shapes(point)
        xs = trials.example(p.graph.inputs, shapes, p.graph.dtypes(), max_batch)
        for n in rows:
            try:
                p.runner.run([x[:n] for x in xs], None)
            except Exception as e:
                what = f"the model fails with {n} row{'s' * (n > 1)} of {' and '.join(str(list(s)) for s in shapes)}: "
                ways = ["fewer at once (--max-batch-size)"] * (n > 1) + ["other sizes (--dim, --buckets.INPUT.DIMENSION)"] * bool(p.axes)
                advice = f"serve {', or '.join(ways)}. " if ways else ""
                raise failure(e, p.session.get_providers(), what + advice) from None


def _dim(text: str) -> tuple[str, str]:
    """seq=<=512, seq<=512 or seq=128."""
    m = re.fullmatch(r"([^=<]+)=?((?:<=)?.*)", text)
    if not m:
        raise errors.Invalid(f"--dim {text}: want NAME='<=SIZE', or NAME=SIZE")
    return m[1].strip(), m[2]


def _state(text: str) -> tuple[str, tuple[str, str]]:
    """h=h_in:h_out."""
    m = re.fullmatch(r"([^=:]+)=([^:]+):(.+)", text)
    if not m:
        raise errors.Invalid(f"--state {text}: want NAME=INPUT:OUTPUT, like h=h_in:h_out")
    return m[1], (m[2], m[3])


def serve_file(a: argparse.Namespace, settings: dict[str, str]) -> int:
    """Runs ``ringbatch onnx``."""
    stop = StopEvent()
    stop_on_signals(stop)
    try:
        how: dict[str, Any] = dict(dims=dict(map(_dim, a.dim)), outputs=a.output, state=dict(map(_state, a.state)), **settings)
        if a.join:
            how["version"] = a.join
        inspect.unwrap(serve)(
            a.file, a.name or os.environ.get("RINGBATCH_MODEL") or a.file.stem, providers=a.provider, threads=a.threads, spin=a.spin,
            lengths=a.lengths, mask=a.mask, pad=a.pad, pad_sizes=a.pad_sizes, check=a.check, tolerance=a.tolerance, depth=a.depth,
            stop=stop, socket=a.socket, **how,
        )  # fmt: skip
    except (errors.Error, Lost, OSError, RuntimeError, ValueError) as e:
        report("ringbatch onnx", a.file, e, first_line(e))
        return 1
    return 0
