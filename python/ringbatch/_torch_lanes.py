"""Batches in flight on a device.

A lane is room for one batch. While one computes, the inputs of the next are
copied on a stream of their own:

    copy stream      in A │ in B │        │ in C …
    compute stream        │ A, out A      │ B, out B …
"""

from __future__ import annotations

import math
import time
from typing import Any, Callable

import torch

from ._torch_ring import Plane, Rows

# Up to so many runs of neighbours are copied one by one; more are gathered by
# one kernel, straight from the ring: that is one call instead of one per run.
COPY_RUNS = 1

# While nothing else is to do, the device is looked at this often. A blocking
# wait in the driver wakes up later than that.
POLL_S = 10e-6


class Lane:
    """Buffers for one batch. On the CPU everything happens at once."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        device, most = engine.device, engine.max_rows
        self.inputs = [torch.zeros(most * math.prod(p.shape), dtype=p.host.dtype, device=device) for p in engine.inputs]
        self.rows: Rows | None = None
        self.keep: Any = None  # results must live until the device has written them
        if device.type == "cuda":
            self.slots_host = torch.zeros(most, dtype=torch.int64, pin_memory=True)
            self.slots = torch.zeros(most, dtype=torch.int64, device=device)
            self.arrived = torch.cuda.Event()
            self.finished = torch.cuda.Event()
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]] = {}

    def view(self, k: int, rows: int, shape: tuple[int, ...]) -> torch.Tensor:
        return self.inputs[k][: rows * math.prod(shape)].view(rows, *shape)

    def submit(self, rows: Rows) -> None:
        """Queues everything of a batch."""
        self.rows = rows
        e = self.engine
        if e.device.type != "cuda":
            self._gather_on_host(rows)
            self._write(e.compute([self.view(k, rows.rows, s) for k, s in enumerate(rows.shapes)]), rows)
            return
        with torch.cuda.stream(e.copies):
            self.slots_host[: rows.rows] = rows.slots
            self.slots[: rows.rows].copy_(self.slots_host[: rows.rows], non_blocking=True)
            for k, plane in enumerate(e.inputs):
                self._read(self.view(k, rows.rows, rows.shapes[k]).view(rows.rows, -1), plane, rows)
            self.arrived.record(e.copies)
        with torch.cuda.stream(e.computing):
            e.computing.wait_event(self.arrived)
            self._write(self._compute(rows), rows)
            self.finished.record(e.computing)

    def _read(self, to: torch.Tensor, plane: Plane, rows: Rows) -> None:
        width = to.shape[1]
        if plane.mapped is not None and len(rows.runs) > COPY_RUNS:
            torch.index_select(plane.mapped[:, :width], 0, self.slots[: rows.rows], out=to)
            return
        for slot, row, n in rows.runs:
            to[row : row + n].copy_(plane.host[slot : slot + n, :width], non_blocking=True)

    def _gather_on_host(self, rows: Rows) -> None:
        for k, plane in enumerate(self.engine.inputs):
            to = self.view(k, rows.rows, rows.shapes[k]).view(rows.rows, -1)
            for slot, row, n in rows.runs:
                to[row : row + n] = plane.host[slot : slot + n, : to.shape[1]]

    def _compute(self, rows: Rows) -> list[torch.Tensor]:
        e = self.engine
        size = next((s for s in e.graph_sizes if s >= rows.rows), 0)
        if not size:
            return e.compute([self.view(k, rows.rows, s) for k, s in enumerate(rows.shapes)])
        graph, outputs = self.graphs[size]
        graph.replay()
        return outputs

    def _write(self, outputs: list[torch.Tensor], rows: Rows) -> None:
        dims: list[int] = []
        for plane, y in zip(self.engine.outputs, outputs):
            dims += [y.shape[1 + i] for i in plane.variable]
            flat = y[: rows.rows].to(plane.host.dtype).reshape(rows.rows, -1)
            if plane.mapped is not None:
                plane.mapped[:, : flat.shape[1]].index_copy_(0, self.slots[: rows.rows], flat)
            else:
                for slot, row, n in rows.runs:
                    plane.host[slot : slot + n, : flat.shape[1]].copy_(flat[row : row + n], non_blocking=True)
            self.keep = (self.keep, flat)
        rows.output_dims = dims

    def done(self) -> bool:
        return self.engine.device.type != "cuda" or self.finished.query()

    def wait(self) -> None:
        while not self.done():
            time.sleep(POLL_S)

    def release(self) -> Rows:
        rows, self.rows, self.keep = self.rows, None, None
        assert rows is not None
        return rows

    def capture(self, sizes: list[int], pool: Any) -> None:
        """Records the model once per batch size, over this lane's buffers."""
        e = self.engine
        for size in sizes:
            graph = torch.cuda.CUDAGraph()
            xs = [self.view(k, size, p.shape) for k, p in enumerate(e.inputs)]
            with torch.cuda.graph(graph, pool=pool, stream=e.computing):
                outputs = e.compute(xs)
            self.graphs[size] = (graph, outputs)


class Engine:
    """A module with its lanes."""

    def __init__(
        self, compute: Callable[[list[torch.Tensor]], list[torch.Tensor]], inputs: list[Plane], outputs: list[Plane],
        max_rows: int, device: torch.device, lanes: int, graphs: bool,
    ) -> None:  # fmt: skip
        self.compute, self.inputs, self.outputs, self.max_rows, self.device = compute, inputs, outputs, max_rows, device
        self.graph_sizes: list[int] = []
        if device.type == "cuda":
            # The copy stream goes first where both want the device.
            self.copies, self.computing = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device)
        self.lanes = [Lane(self) for _ in range(lanes)]
        self._warm_up(graphs)

    def _warm_up(self, graphs: bool) -> None:
        """Runs the sizes that will come, so that the first requests don't pay for it."""
        sizes = sorted({1, self.max_rows} | {2**i for i in range(self.max_rows.bit_length()) if 2**i <= self.max_rows})
        lane = self.lanes[0]
        # TorchScript specialises on what it sees first, and compiles on the
        # second run: the full batch comes first, and each size several times.
        for size in [s for s in reversed(sizes) for _ in range(3)]:
            xs = [lane.view(k, size, p.shape) for k, p in enumerate(self.inputs)]
            if self.device.type == "cuda":
                with torch.cuda.stream(self.computing):
                    self.compute(xs)
            else:
                self.compute(xs)
        if self.device.type != "cuda":
            return
        torch.cuda.synchronize(self.device)
        if graphs and not any(p.variable for p in self.inputs + self.outputs):
            pool = torch.cuda.graph_pool_handle()
            for lane in self.lanes:
                lane.capture(list(reversed(sizes)), pool)
            self.graph_sizes = sizes
            torch.cuda.synchronize(self.device)
