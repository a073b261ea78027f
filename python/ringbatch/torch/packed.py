# SPDX-License-Identifier: Apache-2.0
"""Packed batches: rows of different sizes follow one another without padding.

    rows of 3, 5 and 2 tokens      tokens |a a a|b b b b b|c c|      offsets 0 3 8 10

On a GPU the module is recorded for several numbers of tokens. A batch runs in the next
larger graph: zeros follow its tokens, and empty rows follow its rows.
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from .. import errors
from ..binding.tensors import Declared, parse
from ..worker import trials
from ..worker.axes import FIXED, Axes, Input, Output
from ..worker.ring import Rows
from . import checks
from .lanes import Engine, Lane, agree, recorded_sizes
from .module_call import Compute, _tensor, numpy_types, torch_types
from .planes import output_kind
from .preparing import prepare

Row = list[torch.Tensor]  # one item of each input, or of each output


class PackedLane(Lane):
    """Room for one packed batch, also if all its rows have the largest size."""

    engine: PackedEngine

    def __init__(self, engine: PackedEngine) -> None:
        super().__init__(engine)
        self.offsets = torch.zeros(engine.max_rows + 1, dtype=torch.int32, pin_memory=engine.device.type == "cuda")
        self.module_offsets = self.offsets.to(engine.device)

    def set_offsets(self, sizes: np.ndarray) -> int:
        """Writes the offsets of rows, and of empty rows behind them; returns the number of tokens."""
        offsets = self.offsets.numpy()
        offsets[1 : len(sizes) + 1] = np.cumsum(sizes)
        offsets[len(sizes) + 1 :] = offsets[len(sizes)]
        return int(offsets[-1])

    def set_example(self, total: int) -> int:
        """Sets the offsets to rows of the largest size, and a smaller last one; returns the number of rows."""
        most = self.engine.most
        sizes = [most] * (total // most) + [total % most] * (total % most > 0)
        self.set_offsets(np.array(sizes))
        self.module_offsets.copy_(self.offsets)
        return len(sizes)

    def arguments(self, total: int, rows: int) -> list[torch.Tensor]:
        """The module's arguments: the inputs, and the offsets."""
        views = []
        for x, (_, shape), varies in zip(self.inputs, self.engine.specs, self.engine.varies):
            n, item = (total, shape[1:]) if varies else (rows, shape)
            views.append(x[: n * math.prod(item)].view(n, *item))
        return [*views, self.module_offsets[: rows + 1]]

    def example(self, size: int, point: tuple[int, ...] = ()) -> list[torch.Tensor]:
        self.set_example(size)
        return self.arguments(size, self.engine.max_rows)

    def start(self, rows: Rows) -> np.ndarray | None:
        """Queues some rows; returns each row's sizes of the outputs' variable dimensions."""
        self.began, self.over = time.monotonic_ns(), False
        e = self.engine
        e.newest = self
        columns = rows.sizes
        assert columns is not None
        sizes = columns[:, 0].astype(np.int64)
        if (columns != columns[:, :1]).any():
            raise errors.Shape("the variable inputs of a request differ in size: rows are packed by one size")
        total = self.set_offsets(sizes)
        if e.device.type == "cuda":
            ys = self._on_gpu(rows, total, int(sizes.max()))
            self._write(ys, rows, sizes)
            self.finished.record(e.computing)
        else:
            self._on_cpu(rows, sizes)
        varying = sum(len(shape.variable) for shape in e.shapes)
        return np.repeat(sizes[:, None], varying, axis=1) if varying else None

    def _on_gpu(self, rows: Rows, total: int, longest: int) -> list[torch.Tensor]:
        """Queues the gathering and the module."""
        e = self.engine
        size = next((s for s in e.graph_sizes if s >= total), 0)
        ctypes.memmove(self.slots_at, rows.slots_at, 4 * rows.rows)
        if e.near:
            e.mover.copy(e.copies_at, self.near_at, self.slots_at, 4 * rows.rows)
        e.mover.copy(e.copies_at, self.module_offsets.data_ptr(), self.offsets.data_ptr(), 4 * len(self.offsets))
        for plane, to, varies in zip(e.inputs, self.inputs_at, e.varies):
            item = math.prod(plane.shape[varies:]) * plane.rows.element_size()
            where = e.copies_at, to, plane.base, plane.stride, self._numbers(plane)
            if varies:
                e.mover.gather_packed(*where, self.module_offsets.data_ptr(), item, rows.rows, longest * item, size or total,
                    plane.on_device)
            else:
                e.mover.gather(*where, item, rows.rows, plane.on_device)
        self.arrived.record(e.copies)
        e.computing.wait_event(self.arrived)
        if not size:
            return e.compute(self.arguments(total, rows.rows))
        graph, outputs = self.graphs[size, ()]
        graph.replay()
        return outputs

    def _lines(self, outputs: list[torch.Tensor], rows: Rows, sizes: np.ndarray) -> list[torch.Tensor]:
        """The outputs without padding, a line for each row, or for each token."""
        lines = []
        for plane, shape, y in zip(self.engine.outputs, self.engine.shapes, outputs):
            n = int(sizes.sum()) if shape.variable else rows.rows
            lines.append(self._converted(plane, y[:n]).reshape(n, math.prod(y.shape[1:])).contiguous())
        return lines

    def _write(self, outputs: list[torch.Tensor], rows: Rows, sizes: np.ndarray | None) -> None:
        assert sizes is not None
        e = self.engine
        for plane, shape, lines in zip(e.outputs, e.shapes, self._lines(outputs, rows, sizes)):
            self.keep.append(lines)
            at, item = lines.data_ptr(), lines.shape[1] * lines.element_size()
            if not shape.variable:
                e.mover.scatter(e.computing_at, plane.base, plane.stride, at, self._numbers(plane), item, rows.rows, plane.on_device)
                continue
            for slot, n in zip(_slots(rows), sizes.tolist()):
                if n:
                    e.mover.copy(e.computing_at, plane.base + slot * plane.stride, at, n * item)
                at += n * item

    def _on_cpu(self, rows: Rows, sizes: np.ndarray | None) -> None:
        assert sizes is not None
        e = self.engine
        slots, lengths = _slots(rows), sizes.tolist()
        index = torch.tensor(slots)
        xs = self.arguments(int(self.offsets[-1]), rows.rows)
        for plane, x, varies in zip(e.inputs, xs, e.varies):
            if varies:
                for slot, part in zip(slots, x.split(lengths)):
                    part.view(-1).copy_(plane.rows[slot, : part.numel()])
            else:
                torch.index_select(plane.rows, 0, index, out=x.view(rows.rows, plane.rows.shape[1]))
        for plane, shape, lines in zip(e.outputs, e.shapes, self._lines(e.compute(xs), rows, sizes)):
            if shape.variable:
                for slot, part in zip(slots, lines.split(lengths)):
                    plane.rows[slot, : part.numel()] = part.reshape(-1)
            else:
                plane.rows[:, : lines.shape[1]].index_copy_(0, index, lines)


def _slots(rows: Rows) -> list[int]:
    return list((ctypes.c_uint32 * rows.rows).from_address(rows.slots_at))


class PackedEngine(Engine):
    """A module of packed batches, with its lanes."""

    lane_type = PackedLane
    lanes: list[PackedLane]  # type: ignore[assignment]

    def __init__(
        self, compute: Compute, inputs: Sequence[Input], max_rows: int, budget: int, device: torch.device, lanes: int, graphs: bool | None,
        shapes: list[Output],
    ) -> None:  # fmt: skip
        """budget: the largest number of tokens in a batch, except for single rows; 0: as many as its rows may have."""
        self.most, self.varies = _most(inputs), [bool(i.variable) for i in inputs]
        self.budget = min(budget or sys.maxsize, max_rows * self.most)
        specs = [(dtype, i.shape) for i, dtype in zip(inputs, torch_types(inputs))]
        super().__init__(compute, specs, max_rows, device, lanes, graphs, shapes=shapes)

    def warm_sizes(self) -> list[int]:
        return [min(self.most, self.budget), *([self.budget] if self.device.type == "cuda" else [])]

    def sizes_to_record(self) -> list[int]:
        return sorted({-(-self.budget * part // 64) for part in recorded_sizes(64)})

    def _warm_up(self, sizes: list[int]) -> None:
        for size in sizes * 2:
            self.compute(self.lanes[0].arguments(size, self.lanes[0].set_example(size)))

    def _compare(self, sizes: list[int]) -> None:
        """Compares graphs that are not quite full with the module without padding, on random numbers."""
        lane = self.lanes[0]
        for size in (sizes[0], sizes[-1]):
            total = max(1, size * 7 // 8)
            rows = lane.set_example(total)
            for x in lane.inputs:
                x.copy_(torch.rand_like(x) if x.is_floating_point() else torch.randint(0, 2, x.shape, device=x.device))
            graph, replayed = lane.graphs[size, ()]
            graph.replay()
            cut = [y[: total if shape.variable else rows] for y, shape in zip(replayed, self.shapes)]
            if not agree(cut, self.compute(lane.arguments(total, rows))):
                raise ValueError("the module gives other results behind padding tokens and empty rows")


# -- before serving


def plan(
    module: Callable[..., Any], packed: str, tensors: Sequence[Declared], outputs: Sequence[Declared] | None, device: torch.device,
    options: dict[str, Any], *, half: bool, bfloat16: bool, graphs: bool | None, check: bool, tolerance: float | None, depth: int,
) -> tuple[list[Declared], Callable[[int], PackedEngine]]:  # fmt: skip
    """The outputs of a module after trials, and a function that makes an engine for batches of some rows.

    Adds to options that requests of different sizes share a batch.
    """
    inputs = list(map(Input.of, tensors))
    exact = tolerance is None and not checks.is_quantized(module)
    if tolerance is None:
        tolerance = checks.tolerance(module, half or bfloat16 or device.type == "cuda")
    compute, _, _ = prepare(module, Axes(inputs, None), device, half, bfloat16, False, False, keywords=keywords(packed, inputs))
    trial = Trial(compute, inputs, device)
    with checks.refused_inputs(inputs):
        shapes, kinds = trial.outputs()
        if check:
            trial.refuse_mixed_rows(tolerance, exact)
    if outputs is None:
        outputs = [parse(s.dims(kind, "y" if len(shapes) == 1 else f"y{k}")) for k, (s, kind) in enumerate(zip(shapes, kinds))]
    else:
        shapes = checks.fit(outputs, shapes)
        if not all(s.known for s in shapes):
            raise errors.Invalid("a packed module has outputs of one size for each row, or of the row's own size: declare fixed ones so")
    options["ragged"] = True
    budget = int(options.get("max_batch_cost") or 0)

    def engine(rows: int) -> PackedEngine:
        return PackedEngine(compute, inputs, rows, budget, device, depth, graphs, shapes)

    return list(outputs), engine


def keywords(packed: str, inputs: Sequence[Input]) -> list[str]:
    """The module's keyword for each input and for the offsets. packed: "tokens", or "tokens=ids,offsets=cu"."""
    given = dict(text.strip().partition("=")[::2] for text in packed.split(","))
    names = [i.name for i in inputs]
    for name in given:
        if name not in (*names, "offsets"):
            raise errors.Invalid(f"--packed {name}: there is no input {name!r}; there are {', '.join(names)}, and offsets")
    varying = [i for i in inputs if i.variable]
    if not any(i.name in given for i in varying) or any(i.variable != (0,) for i in varying):
        raise errors.Invalid(
            f"--packed {packed}: want the name of an input whose first dimension varies, and no other does, like tokens:i64[<=512]; "
            f"there are {', '.join(map(str, inputs))}"
        )
    return [given.get(name) or name for name in (*names, "offsets")]


def _most(inputs: Sequence[Input]) -> int:
    """The largest size of a row."""
    return min(i.shape[0] for i in inputs if i.variable)


class Trial:
    """Runs the module on rows of random numbers that differ in size."""

    def __init__(self, compute: Compute, inputs: Sequence[Input], device: torch.device) -> None:
        self.compute, self.inputs, self.device = compute, inputs, device
        most = _most(inputs)
        self.sizes = [max(1, most // 3), most, max(1, most // 2)]

    def rows(self, seed: int) -> list[Row]:
        return [self._row(size, seed + k) for k, size in enumerate(self.sizes)]

    def _row(self, size: int, seed: int) -> Row:
        shapes = [(size, *i.shape[1:]) if i.variable else i.shape for i in self.inputs]
        made = trials.example(self.inputs, shapes, numpy_types(self.inputs), 1, seed)
        return [_tensor(x, i.kind) for x, i in zip(made, self.inputs)]

    def run(self, rows: list[Row]) -> tuple[list[Row], list[torch.Tensor]]:
        """The results of each row, and the module's outputs."""
        sizes = [next(x.shape[1] for x, i in zip(row, self.inputs) if i.variable) for row in rows]
        columns = [torch.cat([x[0] if i.variable else x for x in column]) for i, column in zip(self.inputs, zip(*rows))]
        offsets = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32)
        ys = self.compute([x.to(self.device) for x in (*columns, offsets)])
        parts = []
        for y in ys:
            if y.dim() == 0 or len(y) not in (len(rows), sum(sizes)):
                raise errors.Invalid(f"{len(rows)} rows of {sum(sizes)} tokens went in, and a tensor of shape {list(y.shape)} came out: a "
                    "packed module returns a line for each row, or for each token")
            parts.append(y.split(sizes if len(y) == sum(sizes) else 1))
        return [list(row) for row in zip(*parts)], ys

    def outputs(self) -> tuple[list[Output], list[str]]:
        """The outputs of one row, and their types. An output with as many lines as tokens has the row's size."""
        _, ys = self.run(self.rows(0))
        first = torch_types(self.inputs)[0]
        found, kinds = [], []
        for y in ys:
            packed = len(y) == sum(self.sizes) != len(self.sizes)
            largest = (_most(self.inputs), *y.shape[1:]) if packed else tuple(y.shape[1:])
            found.append(Output(largest, (0 if packed else FIXED, *[FIXED] * (y.dim() - 1))[: len(largest)]))
            kinds.append(output_kind(y, first))
        return found, kinds

    def refuse_mixed_rows(self, tolerance: float, exact: bool) -> None:
        """Refuses a module whose rows give other results in a batch than alone. exact: or change by a bit with their neighbours."""
        rows, others = self.rows(0), self.rows(7)

        def row(i: int, among: list[Row]) -> list[np.ndarray]:
            return _numbers(self.run([*among[:i], rows[i], *among[i + 1 :]])[0][i])

        together = self.run(rows)[0]
        for i in range(len(rows)):
            if exact and not trials.equal_results(partial(row, i, rows), partial(row, i, others)):
                raise errors.Invalid("in a packed batch a row gives other results beside other rows: does the module use the offsets? "
                    f"{self._advice(rows, together)}")
            if not trials.agree(_numbers(together[i]), _numbers(self.run([rows[i]])[0][0]), tolerance):
                raise errors.Invalid(f"in a packed batch rows give other results than alone, by more than {tolerance:g} of the largest: "
                    f"does the module use the offsets? {self._advice(rows, together)}")

    def _advice(self, rows: list[Row], together: list[Row]) -> str:
        near = all(trials.agree(_numbers(y), _numbers(self.run([row])[0][0]), trials.MORE) for row, y in zip(rows, together))
        return f"Allow {f'more (--tolerance {trials.MORE:g}), or ' * near}anything (--no-check)"


def _numbers(row: Row) -> list[np.ndarray]:
    return [(y.float() if y.is_floating_point() else y).cpu().numpy() for y in row]
