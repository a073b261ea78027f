# SPDX-License-Identifier: Apache-2.0
"""Batches whose rows have one size, with padding where sizes vary."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..binding.tensors import Declared, parse
from ..worker import trials
from ..worker.arguments import listed
from ..worker.axes import Axes, Input, Output, Point, add_buckets, extra_inputs, pad_values
from ..worker.refusal import note
from ..worker.results import Outputs
from ..worker.ring import Rows
from . import checks
from .lanes import Engine, Form, Lane, Plan, doublings, recorded_sizes
from .module_call import Compute, Module, numpy_types, torch_types
from .options import Options
from .planes import Plane
from .preparing import output_texts, prepare


class PaddedLane(Lane):
    engine: PaddedEngine

    def __init__(self, engine: PaddedEngine) -> None:
        sizes = torch.zeros((engine.max_rows, len(engine.axes)), dtype=torch.int64) if engine.sized else None
        super().__init__(engine, sizes)

    def form(self, rows: Rows) -> Form:
        e = self.engine
        count, shapes = rows.rows, rows.shapes + e.states
        if not e.axes.axes:
            return Form(rows, count, e.graph_for(count), shapes)
        point = e.axes.point(shapes)
        true = np.broadcast_to(point, (count, len(point))) if rows.sizes is None else e.axes.of_rows(rows.sizes)
        if self.sizes is not None:
            self.sizes.numpy()[:count] = true
        return Form(rows, count, e.graph_for(count), shapes, point, true)

    def arguments(self, form: Form) -> list[torch.Tensor]:
        return self._views(form.rows.rows, form.shapes)

    def take(self, form: Form) -> list[torch.Tensor]:
        xs = super().take(form)
        return xs if self.sizes is None else [*xs, self.sizes[: form.rows.rows].clone()]

    def example(self, amount: int, point: Point) -> list[torch.Tensor]:
        e = self.engine
        shapes = [shape for _, shape in e.specs]
        if e.axes:
            shapes[: len(e.axes.inputs)] = e.axes.shapes(point)
        if self.module_sizes is not None:
            self.module_sizes[:amount].copy_(torch.tensor(point).expand(amount, -1))
        return self._views(amount, shapes)

    def _views(self, rows: int, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """The inputs, and the true sizes if the module takes them."""
        views = [self.view(k, rows, shape) for k, shape in enumerate(shapes)]
        return views if self.module_sizes is None else [*views, self.module_sizes[:rows]]

    def lines(self, form: Form, plane: Plane, output: Output, y: torch.Tensor) -> torch.Tensor:
        count = form.rows.rows
        lines = self.converted(plane, output, y[:count] if form.graph else y, count, form.point)
        if form.true is None or not output.known or output.prefix:
            return lines
        packed = lines.new_empty(count, math.prod(lines.shape[1:]))
        for i, sizes in enumerate(form.true.tolist()):
            own = output.shape(tuple(sizes))
            packed[i, : math.prod(own)] = lines[i][tuple(map(slice, own))].reshape(-1)
        return packed


class PaddedEngine(Engine):
    def __init__(
        self, compute: Compute, inputs: Sequence[Input], max_rows: int, device: torch.device, lanes: int, graphs: bool | None,
        axes: Axes | None = None, shapes: list[Output] | None = None, sized: bool = False, full: Compute | None = None,
    ) -> None:  # fmt: skip
        """axes, shapes: the sizes that vary, and the outputs that follow them. sized: compute takes the true sizes of the rows as
        one more input. full: computes full batches only.
        """
        self.axes, self.sized, self._full = axes or Axes([], None), sized, full
        self.points = self.axes.points()
        super().__init__(compute, [(dtype, i.shape) for i, dtype in zip(inputs, torch_types(inputs))], max_rows, device, graphs, shapes)
        self.get_ready([PaddedLane(self) for _ in range(lanes)])

    def warm_sizes(self) -> list[int]:
        return doublings(self.max_rows)

    def sizes_to_record(self) -> list[int]:
        return recorded_sizes(self.max_rows)

    def computes(self, rows: int) -> Compute:
        return self._full if self._full is not None and rows == self.max_rows else self.compute

    def worth_it(self, sizes: list[int]) -> list[int]:
        """If full batches have code of their own, a smaller graph may take longer than theirs."""
        if self._full is None:
            return sizes
        took = {size: _time_of(self.lanes[0].graphs[size, self.points[0]][0]) for size in sizes}
        return [size for size in sizes if size == sizes[-1] or took[size] < took[sizes[-1]]]


def _time_of(graph: torch.cuda.CUDAGraph) -> float:
    """The best time of some replays, in milliseconds."""
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
    for end in ends:
        graph.replay()
        end.record()
    ends[-1].synchronize()
    return min(a.elapsed_time(b) for a, b in zip(ends, ends[1:]))


def plan(
    module: Callable[..., Any], tensors: Sequence[Declared], outputs: Sequence[Declared] | None, states: Sequence[Declared],
    args: Sequence[str] | str | None, device: torch.device, dtype: torch.dtype | None, o: Options, rows: int, policy: Mapping[str, Any],
    taken: Outputs,
) -> Plan:  # fmt: skip
    brought = list(map(Input.of, [*tensors, *states]))
    plain = Axes(brought, None)
    extras, pads = extra_inputs(plain, o.lengths, o.mask), pad_values(o.pad, brought)
    compute, takes_sizes, full = prepare(module, plain, device, dtype, o, extras, pads, rows, states, taken, listed(args))
    exact = o.tolerance is None and not checks.is_quantized(module)
    tolerance = checks.tolerance(module, dtype is not None or device.type == "cuda") if o.tolerance is None else o.tolerance
    tried = Module(compute, plain, takes_sizes, device, taken)
    axes, why = plain, ""
    shapes: list[Output] = []
    if plain or outputs is None:
        with checks.refused_inputs(brought):
            axes, shapes, why = trials.settle(tried, brought, numpy_types(brought), policy, o.pad_sizes, pads, tolerance, extras)
    elif o.check:
        shapes = checks.outputs_of_one_row(tried, plain)
    if why:
        note(why)
    if any(not a.buckets for a in axes.axes):
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's attention takes 40 ms to plan each new size
    last = len(shapes) - len(states)  # the new state is behind the outputs
    if outputs is None:
        outputs = [parse(text) for text in output_texts(compute, shapes[:last], brought, plain, takes_sizes, device, taken)]
    elif shapes:
        shapes = checks.fit(outputs, shapes[:last], taken) + shapes[last:]
    if o.check and shapes and rows > 1:
        checks.refuse_mixed_rows(tried, plain, rows, tolerance, shapes, exact, taken)

    def engine(most: int) -> PaddedEngine:
        if full is not None and most != rows:
            note(f"the module is served as it is: it was compiled for {rows} rows, and the broker has batches of {most}; start with "
                f"--max-batch-size={most}")
        return PaddedEngine(compute, brought, most, device, o.depth, o.cuda_graphs, axes, shapes, takes_sizes,
            full if most == rows else None)  # fmt: skip

    policy = dict(policy)
    add_buckets(policy, axes)
    return Plan(outputs, engine, axes.text(), policy)
