# SPDX-License-Identifier: Apache-2.0
"""Batches in flight on a device.

A lane is room for one batch. While one batch computes, the inputs of the next are
copied on a second stream:

    copy stream      in A │ in B │        │ in C …
    compute stream        │ A, out A      │ B, out B …

How the rows lie in a lane's buffers is up to two kinds of lanes: padded.py (rows of one
size) and packed.py (one row behind the other).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import errors
from ..binding.casting import not_held, of_tensor
from ..binding.tensors import Declared, dims_text
from ..worker.axes import FIXED, UNKNOWN, Output, Point
from ..worker.lost_gpu import lost
from ..worker.ring import RingBatch, Rows
from .module_call import Compute
from .mover import Mover
from .planes import Plane

# Few runs of rows, and large ones, are copied one by one: the copy engine needs no
# multiprocessors. A kernel gathers the others, which is faster.
FEW_RUNS, LARGE_RUN = 8, 256 << 10


def copied(runs: int, size: int) -> bool:
    """Whether a number of runs, with a size in all, is copied and not gathered."""
    return runs <= FEW_RUNS or size >= runs * LARGE_RUN


# The least time between two looks at a batch on the device. A blocking wait in the
# driver wakes up later than that.
POLL_NS = 20_000

# The worker spins around the expected end of a batch: for a quarter of its time, at most
# this, before and after. A worker without a batch spins as long (spinFor in worker/batch.go).
MOST_SPIN_NS = 1_000_000

# If another batch is queued behind it, the device does not wait for the worker: spinning
# would be most of the worker's CPU time (docs/results/gpu.md).
MOST_SLEEP_NS = 1_000_000

MOST_TENSORS = 64  # of a model
MOST_GRAPHS = 128  # of a lane; the kernels of further shapes are launched one by one


def doublings(most: int) -> list[int]:
    """1, 2, 4 and so on, and the largest."""
    return [*(2**i for i in range(most.bit_length()) if 2**i < most), most]


def recorded_sizes(most: int) -> list[int]:
    """The batch sizes that graphs are recorded for, four in each doubling; others run in the next larger one."""
    found, size = [], 1
    while size < most:
        found.append(size)
        size += min(size, max(2, 1 << max(0, size.bit_length() - 3)))
    return [*found, most]


class Form(NamedTuple):
    """How a batch lies in the buffers of a lane."""

    rows: Rows
    amount: int  # rows, or the items of packed rows
    graph: int  # the amount that the graph to replay was recorded for; 0: there is none
    shapes: list[tuple[int, ...]]  # of a row, or of a packed item, in each buffer
    point: Point = ()  # the sizes of the axes that rows are padded to
    true: np.ndarray | None = None  # of each row, the true sizes of the axes


class Lane:
    """Buffers for one batch. On the CPU submit computes it."""

    def __init__(self, engine: Engine, sizes: torch.Tensor | None = None) -> None:
        """sizes: the true sizes of rows as the module takes them, on the host."""
        self.engine = engine
        device, most = engine.device, engine.max_rows
        self.inputs = [torch.zeros(most * math.prod(shape), dtype=dtype, device=device) for dtype, shape in engine.specs]
        self.whole = [x.view(most, *shape) for x, (_, shape) in zip(self.inputs, engine.specs)]  # rows of the largest shape
        self.inputs_at = [x.data_ptr() for x in self.inputs]
        self.began = 0  # the time of submit
        self.over = True  # the device is done with the batch
        self.fresh = False  # a row begins with a state of zeros
        self.keep: list[torch.Tensor] = []  # results, until the device has written them
        # A conversion that may change a value of the batch: its flag's place, the plane, the type. The device writes the flags.
        self.conversions: list[tuple[int, Plane, torch.dtype]] = []
        self.changed = torch.zeros(MOST_TENSORS, dtype=torch.bool, pin_memory=device.type == "cuda")
        self.batch: RingBatch | None = None
        if device.type == "cuda":
            # Slot numbers, which kernels read in place. Then the halves of a state that the rows read, and those that they write.
            self.slots = torch.zeros((3, most), dtype=torch.int32, pin_memory=True)
            # Kernels within device memory read a copy, since they would wait for the bus.
            self.near = torch.zeros((3, most), dtype=torch.int32, device=device)
            self.near_at = self.near.data_ptr()
            self.slots_at = self.slots.data_ptr()
            self.arrived, self.finished = torch.cuda.Event(), torch.cuda.Event()
        self.sizes = sizes.pin_memory() if sizes is not None and device.type == "cuda" else sizes
        self.module_sizes = None if self.sizes is None else self.sizes.to(device)  # on the CPU the same tensor
        self.graphs: dict[tuple[int, Point], tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]] = {}

    # -- for the two kinds of lanes

    def form(self, rows: Rows) -> Form:
        """Writes the true sizes of the rows into `sizes`."""
        raise NotImplementedError

    def arguments(self, form: Form) -> list[torch.Tensor]:
        """The module's arguments, views of the buffers."""
        raise NotImplementedError

    def example(self, amount: int, point: Point) -> list[torch.Tensor]:
        """The module's arguments for a graph that is recorded."""
        raise NotImplementedError

    def exact_example(self, amount: int, point: Point) -> list[torch.Tensor]:
        """The same, without padding."""
        return self.example(amount, point)

    def lines(self, form: Form, plane: Plane, output: Output, y: torch.Tensor) -> torch.Tensor:
        """A result in the output's type, adjacent and without padding; raises Shape if it has other rows than declared."""
        raise NotImplementedError

    def fetch(self, form: Form, k: int, plane: Plane) -> None:
        """Queues the copying of an input into its buffer."""
        size = math.prod(form.shapes[k]) * plane.rows.element_size()
        if not size:
            return
        self._gather(form.rows, plane, self.inputs_at[k], size)
        if self.fresh and plane.is_state and plane.on_device and isinstance(form.rows, RingBatch):
            with torch.cuda.stream(self.engine.copies):
                form.rows.clear_fresh(self.view(k, form.rows.rows, form.shapes[k]))

    def take(self, form: Form) -> list[torch.Tensor]:
        """The module's arguments on the CPU, in memory of their own: it may change them and keep them."""
        return [self.copy(form.rows, plane, shape) for plane, shape in zip(self.engine.inputs, form.shapes)]

    def copy(self, rows: Rows, plane: Plane, shape: tuple[int, ...]) -> torch.Tensor:
        runs = rows.runs
        if len(runs) == 1 and not plane.is_state:
            return plane.copy(runs[0][0], rows.rows, shape)
        return plane.bits[:, : math.prod(shape)].index_select(0, _places(rows, plane)).view(plane.dtype).view(rows.rows, *shape)

    def write(self, form: Form, k: int, plane: Plane, lines: torch.Tensor) -> None:
        """Copies an output into its slots; on a GPU it queues that."""
        rows, e, total = form.rows, self.engine, lines.nbytes
        size, runs = total // rows.rows, rows.runs
        at = plane.base + runs[0][0] * size if size == plane.stride and len(runs) == 1 and not plane.is_state else 0
        if not size:
            return
        if e.on_gpu and at:
            e.mover.copy(e.computing_at, at, lines.data_ptr(), total)
        elif e.on_gpu:
            e.mover.scatter(e.computing_at, plane.base, plane.stride, lines.data_ptr(), self.numbers(plane, True), size, rows.rows,
                plane.on_device)
        elif at:
            ctypes.memmove(at, lines.data_ptr(), total)  # torch needs longer than the copy
        else:
            lines = lines.view(rows.rows, -1)
            plane.bits[:, : lines.shape[1]].index_copy_(0, _places(rows, plane, 1), lines.view(plane.bits.dtype))

    # -- a batch

    def submit(self, batch: RingBatch) -> None:
        """Queues the copies and the computation of a batch. The compute stream is the current one."""
        self.batch = batch
        dims = self.start(batch)
        if dims is not None:
            batch.set_rows_dims(dims)

    def start(self, rows: Rows) -> np.ndarray | None:
        """Queues some rows; returns each row's sizes of the outputs' variable dimensions."""
        e = self.engine
        self.began, self.over, e.newest = time.monotonic_ns(), False, self
        form = self.form(rows)
        ys = self._on_gpu(form) if e.on_gpu else e.compute(self.take(form))
        if len(ys) != len(e.outputs):
            raise errors.Invalid(f"the module gives {len(ys)} tensors, and {len(e.outputs)} are declared")
        for k, (plane, output, y) in enumerate(zip(e.outputs, e.shapes, ys)):
            lines = self.lines(form, plane, output, y)
            self.keep.append(lines)
            self.write(form, k, plane, lines)
        if e.on_gpu:
            self.finished.record(e.computing)
        return self._dims(ys, form) if e.varying else None

    def _on_gpu(self, form: Form) -> list[torch.Tensor]:
        e = self.engine
        self._number(form.rows)
        for k, plane in enumerate(e.inputs):
            self.fetch(form, k, plane)
        self.arrived.record(e.copies)
        e.computing.wait_event(self.arrived)
        recorded = self.graphs.get((form.graph, form.point))
        if recorded is None:
            return e.computes(form.rows.rows)(self.arguments(form))
        graph, outputs = recorded
        graph.replay()
        return outputs

    def _number(self, rows: Rows) -> None:
        """Hands the device the slots of the rows, and their true sizes."""
        e = self.engine
        ctypes.memmove(self.slots_at, rows.slots_at, 4 * rows.rows)
        if e.states:
            assert isinstance(rows, RingBatch)
            read = rows.halves()
            self.slots.numpy()[1:, : rows.rows] = read, read ^ 1
            self.fresh = bool(rows.fresh().any())
        if e.near and (len(rows.runs) > 1 or e.states or e.packed):
            e.mover.copy(e.copies_at, self.near_at, self.slots_at, 4 * (self.slots.numel() if e.states else rows.rows))
        if self.sizes is not None and self.module_sizes is not None:
            e.mover.copy(e.copies_at, self.module_sizes.data_ptr(), self.sizes.data_ptr(), self.sizes.nbytes)

    def converted(self, plane: Plane, output: Output, y: torch.Tensor, lines: int, point: Point = ()) -> torch.Tensor:
        """An output in its type. release looks whether a value changed, when the device is done."""
        if y.shape != (lines, *plane.shape) and (y.shape[:1] != (lines,) or not output.holds(y.shape[1:], point)):
            raise errors.Shape(f"output {plane.name!r}: expected {lines} rows of [{dims_text(plane.shape, plane.variable)}], and the "
                f"module gave {list(y.shape)}")
        if y.dtype == plane.dtype:
            return y.contiguous()
        kept, wrong = of_tensor(y, plane.dtype)
        if wrong is not None:
            k = len(self.conversions)
            self.changed[k].copy_(wrong, non_blocking=True)
            self.conversions.append((k, plane, y.dtype))
        return kept.contiguous()

    def _fail_changed(self) -> None:
        """Fails the batch if an output does not hold a value of the module."""
        for k, plane, source in self.conversions:
            if self.over and self.batch is not None and self.changed[k]:
                self.batch.fail_all(not_held(f"output {plane.name!r}", source, plane.dtype))
        self.conversions = []

    def _dims(self, outputs: list[torch.Tensor], form: Form) -> np.ndarray:
        """Each row's sizes of the outputs' variable dimensions."""
        true = form.true
        columns = [
            true[:, follows] if true is not None and follows != UNKNOWN else np.full(form.rows.rows, outputs[k].shape[1 + d])
            for k, d, follows in self.engine.varying
        ]
        return np.stack(columns, axis=1)

    def _gather(self, rows: Rows, plane: Plane, to: int, size: int) -> None:
        """Queues the copying of the first bytes of each row."""
        e = self.engine
        in_runs = copied(len(rows.runs), rows.rows * size) and size == plane.stride and not plane.is_state
        if in_runs and not (plane.on_device and len(rows.runs) > 1):
            for slot, row, n in rows.runs:
                e.mover.copy(e.copies_at, to + row * size, plane.base + slot * size, n * size)
        else:
            e.mover.gather(e.copies_at, to, plane.base, plane.stride, self.numbers(plane), size, rows.rows, plane.on_device)

    def numbers(self, plane: Plane, write: bool = False) -> int:
        """The address of the slot numbers, for kernels that move rows of a plane."""
        return (self.near_at if plane.on_device else self.slots_at) + 4 * self.engine.max_rows * ((1 + write) * plane.is_state)

    def view(self, k: int, rows: int, shape: tuple[int, ...]) -> torch.Tensor:
        """The first rows of a buffer, if each has this shape."""
        if shape == self.engine.specs[k][1]:
            return self.whole[k][:rows]
        return self.inputs[k][: rows * math.prod(shape)].view(rows, *shape)

    # -- its end

    def done(self) -> bool:
        try:
            self.over = not self.engine.on_gpu or self.finished.query()
        except RuntimeError as e:
            raise lost(e) from e
        return self.over

    def wait(self) -> None:
        while not self.done():
            patience = self.patience()
            if patience:
                time.sleep(patience / 1e9)
            else:
                os.sched_yield()

    def patience(self) -> int:
        """Nanoseconds until the next look; 0 around the expected end of the batch."""
        e = self.engine
        left = max(self.began, e.last) + e.took - time.monotonic_ns()
        if e.newest is not self:
            return max(POLL_NS, min(max(left // 2, e.took // 32), MOST_SLEEP_NS))
        spin = min(e.took // 4, MOST_SPIN_NS)
        return 0 if -spin < left < spin else max(POLL_NS, min((left - spin) // 8, MOST_SLEEP_NS))

    def release(self) -> None:
        """Drops the results. After an error or Ctrl-C it waits for the device, which may still write into the batch's slots."""
        if not self.over:
            self.engine.check()
        if self.conversions:
            self._fail_changed()
        self.keep, self.batch = [], None
        if self.engine.on_gpu:
            self.engine.ended(self)

    def capture(self, sizes: list[int], pool: Any) -> None:
        """Records the model once per batch size and bucket, over this lane's buffers."""
        e = self.engine
        for point, size in itertools.islice(itertools.product(e.points, sizes), MOST_GRAPHS):
            graph = torch.cuda.CUDAGraph()
            xs = self.example(size, point)
            compute = e.computes(size)
            if self is e.lanes[0]:
                compute(xs)  # allocations of the first run cannot be recorded
            # Not torch.cuda.graph, which empties the allocator's cache each time.
            graph.capture_begin(pool=pool)
            try:
                outputs = compute(xs)
            finally:
                graph.capture_end()
            self.graphs[size, point] = (graph, outputs)


class Engine:
    """A module with its lanes, warmed up before there is a ring."""

    packed = False
    points: Sequence[Point] = ((),)  # the sizes that batches are padded to

    def __init__(
        self, compute: Compute, specs: list[tuple[torch.dtype, tuple[int, ...]]], max_rows: int, device: torch.device, graphs: bool | None,
        shapes: list[Output] | None,
    ) -> None:  # fmt: skip
        """specs: of the inputs. shapes: of the outputs; None: bind tells them."""
        self.compute, self.specs, self.max_rows, self.device = compute, specs, max_rows, device
        self.shapes, self._graphs, self.on_gpu = shapes or [], graphs, device.type == "cuda"
        self.inputs: list[Plane] = []
        self.outputs: list[Plane] = []
        self.states: list[tuple[int, ...]] = []  # the shapes of the states, the last of the inputs and of the outputs
        self.near = False  # a plane is in device memory
        self.graph_sizes: list[int] = []
        self.took = self.last = 0  # the last batch's duration and end
        self.newest: Lane | None = None  # with the last batch
        if device.type == "cuda":
            torch.cuda.set_device(device)  # for streams, events and our kernels
            # The copy stream has the higher priority.
            self.copies, self.computing = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device)
            self.copies_at, self.computing_at = self.copies.cuda_stream, self.computing.cuda_stream

    def get_ready(self, lanes: Sequence[Lane]) -> None:
        """graphs: None records them if that works and the results agree."""
        self.lanes = list(lanes)
        with self.current():
            self._warm_up()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                self.mover = Mover()
                if self._graphs is not False:
                    self._record(self.sizes_to_record(), optional=self._graphs is None)

    # -- for the two kinds of engines

    def warm_sizes(self) -> list[int]:
        raise NotImplementedError

    def sizes_to_record(self) -> list[int]:
        raise NotImplementedError

    def compared(self, size: int) -> int:
        """The amount with which a graph of this size is compared with the module."""
        return size

    def computes(self, rows: int) -> Compute:
        """The function for a batch of this size."""
        return self.compute

    def worth_it(self, sizes: list[int]) -> list[int]:
        """The sizes whose graphs are used."""
        return sizes

    # -- all of them

    def current(self) -> Any:
        """Makes the compute stream the current one, as submit needs it."""
        return torch.cuda.stream(self.computing) if self.device.type == "cuda" else contextlib.nullcontext()

    def bind(self, inputs: list[Plane], outputs: list[Plane]) -> None:
        """Sets the memory of the batches' rows."""
        self.inputs, self.outputs = inputs, outputs
        self.states = [p.shape for p in inputs if p.is_state]
        self.near = any(p.on_device for p in inputs + outputs)
        if outputs and not self.shapes:
            self.shapes = [Output(p.shape, tuple(UNKNOWN if d in p.variable else FIXED for d in range(len(p.shape)))) for p in outputs]
        self.varying = [(k, d, s.follows[d]) for k, s in enumerate(self.shapes) for d in s.variable]
        if not all(s.known for s in self.shapes):
            self.graph_sizes = []  # a recorded graph has outputs of one size

    def graph_for(self, amount: int) -> int:
        """The amount that the next larger graph was recorded for; 0: there is none."""
        return next((s for s in self.graph_sizes if s >= amount), 0) if self.graph_sizes else 0

    def check(self) -> None:
        """Waits for the device; raises Lost if that fails."""
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as e:
                raise lost(e) from e

    def ended(self, lane: Lane) -> None:
        now = time.monotonic_ns()
        self.took, self.last = now - max(lane.began, self.last), now

    def _warm_up(self) -> None:
        """Runs all batch sizes, so that the first requests are not slow."""
        # TorchScript specialises on its first input and compiles on the second run: the
        # full batch comes first, and each size several times.
        for point in self.points:
            for size in [s for s in reversed(self.warm_sizes()) for _ in range(3)]:
                xs = self.lanes[0].exact_example(size, point)
                self.computes(size)(xs if self.on_gpu else [x.clone() for x in xs])  # on the CPU it may change and keep them

    def _record(self, sizes: list[int], optional: bool) -> None:
        try:
            pool = torch.cuda.graph_pool_handle()
            gc.collect()  # not while graphs are recorded: it may free device memory
            torch.cuda.synchronize(self.device)
            for lane in self.lanes:
                lane.capture(list(reversed(sizes)), pool)
            torch.cuda.synchronize(self.device)
            if optional:
                self._compare(sizes)
            self.graph_sizes = self.worth_it(sizes)
        except (RuntimeError, ValueError) as e:
            if not optional:
                raise
            torch.cuda.synchronize(self.device)
            for lane in self.lanes:
                lane.graphs.clear()
            print(f"serving without CUDA graphs: {str(e).strip().splitlines()[0]}", file=sys.stderr)

    def _compare(self, sizes: list[int]) -> None:
        """Compares the smallest and the largest graph with the module, on random numbers."""
        lane = self.lanes[0]
        for size in (sizes[0], sizes[-1]):
            xs = lane.exact_example(self.compared(size), self.points[0])
            for x in lane.inputs:
                if x.is_floating_point() or self.packed:  # a random mask may hide whole rows, which makes NaNs
                    x.copy_(torch.rand_like(x) if x.is_floating_point() else torch.randint(0, 2, x.shape, device=x.device))
            graph, replayed = lane.graphs[size, self.points[0]]
            graph.replay()
            want = self.computes(size)(xs)
            if not agree([y[: len(z)] for y, z in zip(replayed, want)], want):
                raise ValueError(f"the recorded graph gives other results than the module{' on padding' * self.packed}")


class Plan(NamedTuple):
    """A module that was tried."""

    outputs: Sequence[Declared]
    engine: Callable[[int], Engine]  # makes one for batches of at most some rows
    text: str  # how batches are made, as the end of a log line
    policy: dict[str, Any]


def _places(rows: Rows, plane: Plane, write: int = 0) -> torch.Tensor:
    """The row of a plane for each row of a batch. write: of a state, the half that is written."""
    if plane.is_state and isinstance(rows, RingBatch):
        return torch.from_numpy(rows.halves() ^ write)
    return torch.from_numpy(rows.slots())


def failure(e: BaseException) -> str:
    """The error in one line. TorchScript puts its cause into the last line, behind a traceback."""
    lines = str(e).strip().splitlines() or ["no message"]
    return lines[-1] if "TorchScript interpreter" in lines[0] else f"{type(e).__name__}: {lines[0]}"


def agree(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    """Whether results agree within 2 % of the largest number: coarse for f32, just enough for f16."""
    return all(
        y.shape == z.shape and torch.allclose(y.double(), z.double(), rtol=0.02, atol=0.02 * z.double().abs().max().item(), equal_nan=True)
        for y, z in zip(got, want)
    )
