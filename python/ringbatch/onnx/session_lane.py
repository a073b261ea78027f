# SPDX-License-Identifier: Apache-2.0
"""Batches of a ring on an ONNX Runtime session.

If the rows of a batch are adjacent in the ring, without gaps, the session reads and
writes them there. Otherwise they are gathered into a buffer, and written back row by row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnxruntime as ort

from ..binding.tensors import Tensor
from ..binding.views import strided
from ..worker.axes import Axes, Output, pad, write_rows
from ..worker.ring import Ring, RingBatch
from .graph import NUMPY, Graph


class Runner:
    """A session on NumPy arrays, for trials and benchmarks."""

    def __init__(self, session: ort.InferenceSession, graph: Graph) -> None:
        self._session, self._graph = session, graph
        self._axes = Axes(graph.inputs, None)
        self._names = [n.name for n in graph.outputs]

    def run(self, rows: Sequence[np.ndarray], true: Sequence[Sequence[int]] | None) -> list[np.ndarray]:
        point = self._axes.point([x.shape[1:] for x in rows])
        feed = {n.name: x for n, x in zip(self._graph.nodes, rows)}
        sizes = np.array([point] * len(rows[0]) if true is None else true)
        for e in self._graph.extras:
            feed[e.name] = self._graph.extra(e, sizes[:, e.axis], point[e.axis])
        return self._session.run(self._names, feed)


class SessionLane:
    """Room for one batch. Lanes of one session take turns (worker/lanes.py)."""

    def __init__(
        self, ring: Ring, session: ort.InferenceSession, graph: Graph, outputs: Sequence[Output], axes: Axes, pads: Sequence[float | None]
    ) -> None:
        self._ring, self._session, self._graph, self._outputs, self._axes, self._pads = ring, session, graph, outputs, axes, pads
        self._binding = session.io_binding()
        most = ring.max_batch_size
        sig = ring.signature
        self._in = [np.empty(most * math.prod(t.shape), t.dtype) for t in sig.inputs]
        self._out = [np.empty(most * math.prod(t.shape), t.dtype) for t in sig.outputs]
        self._planes = [_plane(ring, t) for t in sig.outputs]
        self._old, self._new = ([np.empty((most, *t.shape), t.dtype) for t in sig.state] for _ in range(2))
        columns = iter(range(axes.columns))
        self._columns = [[next(columns) for _ in t.variable] for t in sig.inputs]
        self._bound: _Bound | None = None
        self.in_place = 0  # batches whose inputs were read in the ring

    def gather(self, batch: RingBatch) -> None:
        shapes, sizes = batch.shapes, batch.sizes
        point = self._axes.point(shapes)
        by_axis = None if sizes is None else self._axes.of_rows(sizes)
        padded = by_axis is not None and bool((by_axis != point).any())
        self.in_place += self._bind_inputs(batch, shapes, sizes if padded else None)
        extras = self._bind_extras(point, by_axis)
        self._bound = _Bound(batch, self._bind_outputs(batch, point), extras, by_axis, padded)
        self._bind_states(batch)

    def compute(self) -> None:
        self._session.run_with_iobinding(self._binding)

    def write(self) -> np.ndarray | None:
        """Writes results that are not in the ring yet into their slots; returns their sizes."""
        bound, self._bound = self._bound, None
        assert bound is not None
        rows, by_axis = bound.batch.rows, bound.by_axis
        slots, dims = None, []
        for k, (ys, output) in enumerate(zip(bound.buffers, self._outputs)):
            if not output.known:
                ys = self._binding.get_outputs()[k].numpy()
                if len(ys) != rows or any(n > most for n, most in zip(ys.shape[1:], output.largest)):
                    raise ValueError(f"output {self._graph.outputs[k].name!r} has shape {ys.shape}, more than {(rows, *output.largest)}")
            if ys is not None:
                if slots is None:
                    slots = np.array(np.ctypeslib.as_array(bound.batch.c.slot, (rows,)), np.intp)
                write_rows(self._planes[k], slots, ys, output, by_axis if bound.padded else None)
            for d in output.variable:
                if output.known and by_axis is not None:
                    dims.append(by_axis[:, output.follows[d]])
                elif ys is not None:
                    dims.append(np.full(rows, ys.shape[1 + d]))
        for t, new in zip(self._ring.signature.state, self._new):
            self._ring.mapping.plane(t)[bound.batch.halves() ^ 1] = new[:rows]
        return np.stack(dims, axis=1) if dims else None

    def _bind_inputs(self, batch: RingBatch, shapes: Sequence[tuple[int, ...]], sizes: np.ndarray | None) -> bool:
        """sizes: the true ones, if rows are padded. Returns whether all inputs are read in place."""
        all_in_place = True
        for k, (t, node, shape) in enumerate(zip(self._ring.signature.inputs, self._graph.nodes, shapes)):
            count = batch.rows * math.prod(shape)
            value = self._pads[k] if sizes is not None and t.variable else None
            fill = bool(value)  # clients have written zeros
            if batch.pieces == 1 and not fill and count * t.dtype.itemsize == batch.rows * t.stride:
                at = self._ring.mapping.base + t.offset + batch.runs[0][0] * t.stride
            else:
                all_in_place = False
                array = self._in[k][:count]
                at = array.__array_interface__["data"][0]
                batch.gather(k, at, array.nbytes)
                if value and sizes is not None:
                    pad(array.reshape(batch.rows, *shape), sizes[:, self._columns[k]].tolist(), t.variable, value)
            self._binding.bind_input(node.name, "cpu", 0, NUMPY[node.kind], (batch.rows, *shape), at)
        return all_in_place

    def _bind_states(self, batch: RingBatch) -> None:
        for k, (s, old, new) in enumerate(zip(self._graph.states, self._old, self._new)):
            old, new, kind = old[: batch.rows], new[: batch.rows], NUMPY[s.read.kind]
            at, to = (array.__array_interface__["data"][0] for array in (old, new))
            batch.gather_state(k, at, old.nbytes)
            self._binding.bind_input(s.read.name, "cpu", 0, kind, old.shape, at)
            self._binding.bind_output(s.write.name, "cpu", 0, kind, new.shape, to)

    def _bind_extras(self, point: tuple[int, ...], by_axis: np.ndarray | None) -> list[np.ndarray]:
        made = []
        for e in self._graph.extras:
            assert by_axis is not None  # an extra belongs to a size that varies
            array = self._graph.extra(e, by_axis[:, e.axis], point[e.axis])
            self._binding.bind_input(e.name, "cpu", 0, array.dtype.type, array.shape, array.__array_interface__["data"][0])
            made.append(array)
        return made

    def _bind_outputs(self, batch: RingBatch, point: tuple[int, ...]) -> list[np.ndarray | None]:
        """The buffer of each output; None: the ring itself, or an output whose size only the run shows."""
        buffers: list[np.ndarray | None] = []
        for k, (t, node, output) in enumerate(zip(self._ring.signature.outputs, self._graph.outputs, self._outputs)):
            if not output.known:
                self._binding.bind_output(node.name, "cpu")
                buffers.append(None)
                continue
            shape = (batch.rows, *output.shape(point))
            count = math.prod(shape)
            whole = count * t.dtype.itemsize == batch.rows * t.stride
            if batch.pieces == 1 and whole and output.prefix:
                at = self._ring.mapping.base + t.offset + batch.runs[0][0] * t.stride
                buffers.append(None)
            else:
                array = self._out[k][:count].reshape(shape)
                at = array.__array_interface__["data"][0]
                buffers.append(array)
            self._binding.bind_output(node.name, "cpu", 0, NUMPY[node.kind], shape, at)
        return buffers


class _Bound(NamedTuple):
    """The batch that the session is bound to."""

    batch: RingBatch
    buffers: list[np.ndarray | None]  # of each output; None: in the ring
    extras: list[np.ndarray]  # lengths and masks, until they were read
    by_axis: np.ndarray | None  # true sizes of the rows
    padded: bool


def _plane(ring: Ring, t: Tensor) -> np.ndarray:
    return strided(ring.mapping.memory, t.dtype, t.offset, t.stride, (ring.slots, math.prod(t.shape)))
