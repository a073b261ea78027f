# SPDX-License-Identifier: Apache-2.0
"""Batches in flight on a device.

A lane is room for one batch. While one batch computes, the inputs of the next are
copied on a second stream:

    copy stream      in A │ in B │        │ in C …
    compute stream        │ A, out A      │ B, out B …
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
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..binding.casting import not_held, of_tensor
from ..worker.axes import FIXED, UNKNOWN, Axes, Output, Point
from ..worker.lost_gpu import lost
from ..worker.ring import RingBatch, Rows
from .mover import Mover
from .planes import Plane

# Few runs of rows, and large ones, are copied one by one: the copy engine needs no
# multiprocessors. A kernel gathers the others, which is faster (docs/results/serve.md).
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


class Lane:
    """Buffers for one batch. On the CPU submit computes it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        device, most = engine.device, engine.max_rows
        self.inputs = [torch.zeros(most * math.prod(shape), dtype=dtype, device=device) for dtype, shape in engine.specs]
        self.whole = [x.view(most, *shape) for x, (_, shape) in zip(self.inputs, engine.specs)]  # rows of the largest shape
        self.inputs_at = [x.data_ptr() for x in self.inputs]
        self.began = 0  # the time of submit
        self.over = True  # the device is done with the batch
        self.keep: list[torch.Tensor] = []  # results, until the device has written them
        # A conversion that may change a value of the batch: its flag's place, the plane, the type. The device writes the flags.
        self.converted: list[tuple[int, Plane, torch.dtype]] = []
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
        # The true sizes of padded rows, which are copied into the last buffer.
        self.sizes = torch.zeros((most, len(engine.axes)), dtype=torch.int64, pin_memory=device.type == "cuda") if engine.sized else None
        self.graphs: dict[tuple[int, Point], tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]] = {}

    def view(self, k: int, rows: int, shape: tuple[int, ...]) -> torch.Tensor:
        if shape == self.engine.specs[k][1]:
            return self.whole[k][:rows]
        return self.inputs[k][: rows * math.prod(shape)].view(rows, *shape)

    def submit(self, batch: RingBatch) -> None:
        """Queues the copies and the computation of a batch. The compute stream is the current one."""
        self.batch = batch
        dims = self.start(batch)
        if dims is not None:
            batch.set_rows_dims(dims)

    def start(self, rows: Rows) -> np.ndarray | None:
        """Queues some rows; returns each row's sizes of the outputs' variable dimensions."""
        self.began, self.over = time.monotonic_ns(), False
        e = self.engine
        e.newest = self
        point, true = self._true_sizes(rows)
        if e.device.type != "cuda":
            return self._on_cpu(rows, true)
        ctypes.memmove(self.slots_at, rows.slots_at, 4 * rows.rows)
        fresh = self._number_states(rows) if e.states else []
        if e.near and (len(rows.runs) > 1 or e.states):
            e.mover.copy(e.copies_at, self.near_at, self.slots_at, 4 * (self.slots.numel() if e.states else rows.rows))
        for plane, to, shape in zip(e.inputs, self.inputs_at, self._shapes(rows)):
            size = math.prod(shape) * plane.rows.element_size()
            in_runs = copied(len(rows.runs), rows.rows * size) and size == plane.stride and not plane.is_state
            if in_runs and not (plane.on_device and len(rows.runs) > 1):
                for slot, row, n in rows.runs:
                    e.mover.copy(e.copies_at, to + row * size, plane.base + slot * size, n * size)
            else:
                e.mover.gather(e.copies_at, to, plane.base, plane.stride, self._numbers(plane), size, rows.rows, plane.on_device)
            for row in fresh if plane.is_state and plane.on_device else []:  # on the host the library has cleared them
                e.mover.clear(e.copies_at, to + row * size, size)
        if self.sizes is not None:
            e.mover.copy(e.copies_at, self.inputs_at[-1], self.sizes.data_ptr(), rows.rows * self.sizes.stride(0) * 8)
        self.arrived.record(e.copies)
        e.computing.wait_event(self.arrived)
        dims = self._write(self._compute(rows, point), rows, true)
        self.finished.record(e.computing)
        return dims

    def _number_states(self, rows: Rows) -> list[int]:
        """Sets the halves of the states that a batch reads and writes; returns its fresh rows."""
        assert isinstance(rows, RingBatch)
        read = rows.halves()
        self.slots.numpy()[1:, : rows.rows] = read, read ^ 1
        return np.flatnonzero(rows.steps() & 2).tolist()

    def _shapes(self, rows: Rows) -> list[tuple[int, ...]]:
        return rows.shapes + self.engine.states

    def _true_sizes(self, rows: Rows) -> tuple[Point, np.ndarray | None]:
        """The common sizes of the rows, and the true size of each, which also go into the lane's buffer."""
        e = self.engine
        if not e.axes:
            return (), None
        point = e.axes.point(rows.shapes)
        true = np.broadcast_to(point, (rows.rows, len(point))) if rows.sizes is None else e.axes.of_rows(rows.sizes)
        if self.sizes is not None:
            self.sizes.numpy()[: rows.rows] = true
        return point, true

    def _compute(self, rows: Rows, point: Point) -> list[torch.Tensor]:
        e = self.engine
        size = next((s for s in e.graph_sizes if s >= rows.rows), 0)
        recorded = self.graphs.get((size, point))
        if recorded is None:
            return e.computes(rows.rows)(self._views(rows))
        graph, outputs = recorded
        graph.replay()
        return outputs

    def _views(self, rows: Rows) -> list[torch.Tensor]:
        """The module's arguments: the inputs, and the true sizes if it takes them."""
        views = [self.view(k, rows.rows, shape) for k, shape in enumerate(self._shapes(rows))]
        return [*views, self.view(-1, rows.rows, (len(self.engine.axes),))] if self.sizes is not None else views

    def _write(self, outputs: list[torch.Tensor], rows: Rows, true: np.ndarray | None) -> np.ndarray | None:
        e = self.engine
        for plane, flat in zip(e.outputs, self._flat(outputs, rows, true)):
            self.keep.append(flat)
            size = flat.shape[1] * flat.element_size()
            if len(rows.runs) == 1 and size == plane.stride and not plane.is_state:
                e.mover.copy(e.computing_at, plane.base + rows.runs[0][0] * size, flat.data_ptr(), size * rows.rows)
            else:
                e.mover.scatter(e.computing_at, plane.base, plane.stride, flat.data_ptr(), self._numbers(plane, True), size, rows.rows,
                    plane.on_device)
        return self._dims(outputs, rows, true)

    def _numbers(self, plane: Plane, write: bool = False) -> int:
        """The address of the slot numbers, for kernels that move rows of a plane."""
        return (self.near_at if plane.on_device else self.slots_at) + 4 * self.engine.max_rows * ((1 + write) * plane.is_state)

    def _flat(self, outputs: list[torch.Tensor], rows: Rows, true: np.ndarray | None) -> list[torch.Tensor]:
        """The outputs with one line per row, without padding inside."""
        flat = []
        for plane, shape, y in zip(self.engine.outputs, self.engine.shapes, outputs):
            y = self._converted(plane, y if len(y) == rows.rows else y[: rows.rows])
            lines = y.reshape(rows.rows, -1).contiguous()
            if true is not None and shape.known and not shape.prefix:
                lines = torch.empty_like(lines)
                for i, sizes in enumerate(true.tolist()):
                    own = shape.shape(tuple(sizes))
                    lines[i, : math.prod(own)] = y[i][tuple(map(slice, own))].reshape(-1)
            flat.append(lines)
        return flat

    def _converted(self, plane: Plane, y: torch.Tensor) -> torch.Tensor:
        """An output in its type. release looks whether a value changed, when the device is done."""
        kept, wrong = of_tensor(y, plane.rows.dtype)
        if wrong is not None:
            k = len(self.converted)
            self.changed[k].copy_(wrong, non_blocking=True)
            self.converted.append((k, plane, y.dtype))
        return kept

    def _fail_changed(self) -> None:
        """Fails the batch if an output does not hold a value of the module."""
        for k, plane, source in self.converted:
            if self.over and self.batch is not None and self.changed[k]:
                self.batch.fail_all(not_held(f"output {plane.name!r}", source, plane.rows.dtype))
        self.converted, self.batch = [], None

    def _dims(self, outputs: list[torch.Tensor], rows: Rows, true: np.ndarray | None) -> np.ndarray | None:
        """Each row's sizes of the outputs' variable dimensions."""
        columns = []
        for shape, y in zip(self.engine.shapes, outputs):
            for d in shape.variable:
                follows = shape.follows[d]
                columns.append(true[:, follows] if true is not None and follows != UNKNOWN else np.full(rows.rows, y.shape[1 + d]))
        return np.stack(columns, axis=1) if columns else None

    def _on_cpu(self, rows: Rows, true: np.ndarray | None) -> np.ndarray | None:
        e = self.engine
        xs = self._views(rows)
        for plane, to, x, shape in zip(e.inputs, self.inputs_at, xs, self._shapes(rows)):
            if len(rows.runs) == 1 and not plane.is_state and math.prod(shape) == plane.rows.shape[1]:  # torch needs longer than the copy
                ctypes.memmove(to, plane.base + rows.runs[0][0] * plane.stride, rows.rows * plane.stride)
            else:
                flat = x.view(rows.rows, -1)
                torch.index_select(plane.rows[:, : flat.shape[1]], 0, _places(rows, plane), out=flat)
        if self.sizes is not None:
            xs[-1].copy_(self.sizes[: rows.rows])
        ys = e.compute(xs)
        for plane, flat in zip(e.outputs, self._flat(ys, rows, true)):
            if len(rows.runs) == 1 and not plane.is_state and flat.shape[1] == plane.rows.shape[1]:
                ctypes.memmove(plane.base + rows.runs[0][0] * plane.stride, flat.data_ptr(), rows.rows * plane.stride)
            else:
                plane.rows[:, : flat.shape[1]].index_copy_(0, _places(rows, plane, 1), flat)
        return self._dims(ys, rows, true)

    def done(self) -> bool:
        try:
            self.over = self.engine.device.type != "cuda" or self.finished.query()
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
        self._fail_changed()
        self.keep = []
        self.engine.ended(self)

    def example(self, size: int, point: Point) -> list[torch.Tensor]:
        """The buffers of size rows, if the axes have these sizes."""
        shapes = [shape for _, shape in self.engine.specs]
        if self.engine.axes:
            shapes[: len(self.engine.axes.inputs)] = self.engine.axes.shapes(point)
        xs = [self.view(k, size, shape) for k, shape in enumerate(shapes)]
        if self.sizes is not None:
            xs[-1].copy_(torch.tensor(point).expand(size, -1))
        return xs

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

    lane_type: type[Lane] = Lane

    def __init__(
        self, compute: Callable[[list[torch.Tensor]], list[torch.Tensor]], specs: list[tuple[torch.dtype, tuple[int, ...]]],
        max_rows: int, device: torch.device, lanes: int, graphs: bool | None,
        axes: Axes | None = None, shapes: list[Output] | None = None, sized: bool = False,
        full: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None,
    ) -> None:  # fmt: skip
        """graphs: None records them if that works and the results agree. full: computes full batches only.

        axes, shapes: the sizes that vary, and the outputs that follow them.
        sized: compute takes the true sizes of the rows as one more input.
        """
        self.axes, self.shapes, self.sized = axes or Axes([], None), shapes or [], sized
        self.points = self.axes.points()  # the sizes of batches
        specs = [*specs, (torch.int64, (len(self.axes),))] if sized else specs
        self.compute, self.specs, self.max_rows, self.device, self.full = compute, specs, max_rows, device, full
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
        self.lanes = [self.lane_type(self) for _ in range(lanes)]
        with self.current():
            self._warm_up(self.warm_sizes())
            if device.type == "cuda":
                self.mover = Mover()
                if graphs is not False:
                    self._record(self.sizes_to_record(), optional=graphs is None)

    def warm_sizes(self) -> list[int]:
        return doublings(self.max_rows)

    def sizes_to_record(self) -> list[int]:
        return recorded_sizes(self.max_rows)

    def current(self) -> Any:
        """Makes the compute stream the current one, as submit needs it."""
        return torch.cuda.stream(self.computing) if self.device.type == "cuda" else contextlib.nullcontext()

    def computes(self, rows: int) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        """The function for a batch of this size."""
        return self.full if self.full is not None and rows == self.max_rows else self.compute

    def bind(self, inputs: list[Plane], outputs: list[Plane]) -> None:
        """Sets the memory of the batches' rows."""
        self.inputs, self.outputs = inputs, outputs
        self.states = [p.shape for p in inputs if p.is_state]
        self.near = any(p.on_device for p in inputs + outputs)
        if outputs and not self.shapes:
            self.shapes = [Output(p.shape, tuple(UNKNOWN if d in p.variable else FIXED for d in range(len(p.shape)))) for p in outputs]
        if not all(s.known for s in self.shapes):
            self.graph_sizes = []  # a recorded graph has outputs of one size

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

    def _warm_up(self, sizes: list[int]) -> None:
        """Runs all batch sizes, so that the first requests are not slow."""
        # TorchScript specialises on its first input and compiles on the second run: the
        # full batch comes first, and each size several times.
        for point in self.points:
            for size in [s for s in reversed(sizes) for _ in range(3)]:
                self.computes(size)(self.lanes[0].example(size, point))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

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
            self.graph_sizes = sizes if self.full is None else self._worth_it(sizes)
        except (RuntimeError, ValueError) as e:
            if not optional:
                raise
            torch.cuda.synchronize(self.device)
            for lane in self.lanes:
                lane.graphs.clear()
            print(f"serving without CUDA graphs: {str(e).strip().splitlines()[0]}", file=sys.stderr)

    def _compare(self, sizes: list[int]) -> None:
        """Compares the smallest and the largest graph with the module, on random numbers."""
        for size in (sizes[0], sizes[-1]):
            xs = self.lanes[0].example(size, self.points[0])
            for x in xs:
                if x.is_floating_point():
                    x.copy_(torch.rand_like(x))
            graph, replayed = self.lanes[0].graphs[size, self.points[0]]
            graph.replay()
            if not agree(replayed, self.computes(size)(xs)):
                raise ValueError("the recorded graph gives other results than the module")

    def _worth_it(self, sizes: list[int]) -> list[int]:
        """The sizes whose graph is faster than the full batch's."""
        took = {size: _time_of(self.lanes[0].graphs[size, self.points[0]][0]) for size in sizes}
        return [size for size in sizes if size == sizes[-1] or took[size] < took[sizes[-1]]]


def _places(rows: Rows, plane: Plane, write: int = 0) -> torch.Tensor:
    """The row of a plane for each row of a batch. write: of a state, the half that is written."""
    if plane.is_state and isinstance(rows, RingBatch):
        return torch.from_numpy(rows.halves() ^ write)
    return torch.tensor((ctypes.c_uint32 * rows.rows).from_address(rows.slots_at), dtype=torch.int64)


def _time_of(graph: torch.cuda.CUDAGraph) -> float:
    """The best time of some replays, in milliseconds."""
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
    for end in ends:
        graph.replay()
        end.record()
    ends[-1].synchronize()
    return min(a.elapsed_time(b) for a, b in zip(ends, ends[1:]))


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
