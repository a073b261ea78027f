"""Batches in flight on a device.

A lane is room for one batch. While one computes, the inputs of the next are
copied on a stream of their own:

    copy stream      in A │ in B │        │ in C …
    compute stream        │ A, out A      │ B, out B …
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from ._torch_move import Mover
from ._torch_ring import Plane, Rows

# While nothing else is to do, the device is looked at this often. A blocking
# wait in the driver wakes up later than that.
POLL_S = 20e-6


class Lane:
    """Buffers for one batch. On the CPU everything happens at once."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        device, most = engine.device, engine.max_rows
        self.inputs = [torch.zeros(most * math.prod(shape), dtype=dtype, device=device) for dtype, shape in engine.specs]
        self.rows: Rows | None = None
        self.keep: list[torch.Tensor] = []  # results must live until the device has written them
        if device.type == "cuda":
            self.slots = torch.zeros(most, dtype=torch.int32, pin_memory=True)  # the kernels read it in place
            self.arrived, self.finished = torch.cuda.Event(), torch.cuda.Event()
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]] = {}

    def view(self, k: int, rows: int, shape: tuple[int, ...]) -> torch.Tensor:
        return self.inputs[k][: rows * math.prod(shape)].view(rows, *shape)

    def submit(self, rows: Rows) -> None:
        """Queues everything of a batch."""
        self.rows = rows
        e = self.engine
        if e.device.type != "cuda":
            self._copy(rows)
            self._write(e.compute(self._views(rows)), rows)
            return
        if len(rows.runs) > 1:
            self.slots[: rows.rows] = rows.slots
            for k, plane in enumerate(e.inputs):
                size = math.prod(rows.shapes[k]) * plane.host.element_size()
                stride = plane.host.stride(0) * plane.host.element_size()
                e.mover.gather(e.copies, self.inputs[k].data_ptr(), plane.host.data_ptr(), stride, self.slots.data_ptr(), size, rows.rows)
        else:
            with torch.cuda.stream(e.copies):
                self._copy(rows)
        self.arrived.record(e.copies)
        with torch.cuda.stream(e.computing):
            e.computing.wait_event(self.arrived)
            self._write(self._compute(rows), rows)
            self.finished.record(e.computing)

    def _views(self, rows: Rows) -> list[torch.Tensor]:
        return [self.view(k, rows.rows, shape) for k, shape in enumerate(rows.shapes)]

    def _copy(self, rows: Rows) -> None:
        """Brings the inputs over, run by run."""
        for k, plane in enumerate(self.engine.inputs):
            to = self.view(k, rows.rows, rows.shapes[k]).view(rows.rows, -1)
            for slot, row, n in rows.runs:
                to[row : row + n].copy_(plane.host[slot : slot + n, : to.shape[1]], non_blocking=True)

    def _compute(self, rows: Rows) -> list[torch.Tensor]:
        e = self.engine
        size = next((s for s in e.graph_sizes if s >= rows.rows), 0)
        if not size:
            return e.compute(self._views(rows))
        graph, outputs = self.graphs[size]
        graph.replay()
        return outputs

    def _write(self, outputs: list[torch.Tensor], rows: Rows) -> None:
        e = self.engine
        dims: list[int] = []
        for plane, y in zip(e.outputs, outputs):
            dims += [y.shape[1 + i] for i in plane.variable]
            flat = y[: rows.rows].to(plane.host.dtype).reshape(rows.rows, -1).contiguous()
            self.keep.append(flat)
            width, bytes_each = flat.shape[1], flat.element_size()
            if len(rows.runs) > 1 and e.device.type == "cuda":
                stride = plane.host.stride(0) * bytes_each
                e.mover.scatter(e.computing, plane.host.data_ptr(), stride, flat.data_ptr(), self.slots.data_ptr(), width * bytes_each, rows.rows)
                continue
            for slot, row, n in rows.runs:
                plane.host[slot : slot + n, :width].copy_(flat[row : row + n], non_blocking=True)
        rows.output_dims = dims

    def done(self) -> bool:
        return self.engine.device.type != "cuda" or self.finished.query()

    def wait(self) -> None:
        while not self.done():
            time.sleep(POLL_S)

    def release(self) -> Rows:
        rows, self.rows, self.keep = self.rows, None, []
        assert rows is not None
        return rows

    def capture(self, sizes: list[int], pool: Any) -> None:
        """Records the model once per batch size, over this lane's buffers."""
        e = self.engine
        for size in sizes:
            graph = torch.cuda.CUDAGraph()
            xs = [self.view(k, size, shape) for k, (_, shape) in enumerate(e.specs)]
            with torch.cuda.graph(graph, pool=pool, stream=e.computing):
                outputs = e.compute(xs)
            self.graphs[size] = (graph, outputs)


class Engine:
    """A module with its lanes, warmed up. It needs no ring yet: what attaches is ready to run."""

    def __init__(
        self, compute: Callable[[list[torch.Tensor]], list[torch.Tensor]], specs: list[tuple[torch.dtype, tuple[int, ...]]],
        max_rows: int, device: torch.device, lanes: int, graphs: bool,
    ) -> None:  # fmt: skip
        self.compute, self.specs, self.max_rows, self.device = compute, specs, max_rows, device
        self.inputs: list[Plane] = []
        self.outputs: list[Plane] = []
        self.graph_sizes: list[int] = []
        if device.type == "cuda":
            torch.cuda.set_device(device)  # streams, events and our kernels go by the current one
            # The copy stream goes first where both want the device.
            self.copies, self.computing = torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device)
        self.lanes = [Lane(self) for _ in range(lanes)]
        self._warm_up(graphs)
        if device.type == "cuda":
            self.mover = Mover()

    def bind(self, inputs: list[Plane], outputs: list[Plane]) -> None:
        """Says where the rows of batches lie."""
        self.inputs, self.outputs = inputs, outputs
        if any(p.variable for p in inputs + outputs):
            self.graph_sizes = []  # recorded for the largest shape only

    def _warm_up(self, graphs: bool) -> None:
        """Runs the sizes that will come, so that the first requests don't pay for it."""
        sizes = sorted({1, self.max_rows} | {2**i for i in range(self.max_rows.bit_length()) if 2**i <= self.max_rows})
        lane = self.lanes[0]
        # TorchScript specialises on what it sees first, and compiles on the
        # second run: the full batch comes first, and each size several times.
        for size in [s for s in reversed(sizes) for _ in range(3)]:
            xs = [lane.view(k, size, shape) for k, (_, shape) in enumerate(self.specs)]
            if self.device.type == "cuda":
                with torch.cuda.stream(self.computing):
                    self.compute(xs)
            else:
                self.compute(xs)
        if self.device.type != "cuda":
            return
        torch.cuda.synchronize(self.device)
        if graphs:
            pool = torch.cuda.graph_pool_handle()
            for lane in self.lanes:
                lane.capture(list(reversed(sizes)), pool)
            self.graph_sizes = sizes
            torch.cuda.synchronize(self.device)
