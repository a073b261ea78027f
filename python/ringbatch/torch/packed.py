# SPDX-License-Identifier: Apache-2.0
"""Packed batches: rows of different sizes follow one another without padding.

    rows of 3, 5 and 2 tokens      tokens |a a a|b b b b b|c c|      offsets 0 3 8 10

On a GPU the module is recorded for several numbers of tokens. A batch runs in the next
larger graph: zeros follow its tokens, and empty rows follow its rows.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from .. import errors
from ..binding.device import over_array
from ..binding.tensors import Declared, parse
from ..worker import trials
from ..worker.arguments import listed
from ..worker.axes import FIXED, Axes, Input, Output, Point, check_packed
from ..worker.results import Outputs
from ..worker.ring import RingBatch, Rows
from . import checks
from .lanes import Engine, Form, Lane, Plan, recorded_sizes
from .module_call import Compute, numpy_types, torch_types
from .options import Options
from .planes import Plane, output_kind
from .preparing import prepare

Row = list[torch.Tensor]  # one item of each input, or of each output


class PackedLane(Lane):
    """Its `sizes` are the offsets of the rows, and of empty rows behind them."""

    engine: PackedEngine

    def __init__(self, engine: PackedEngine) -> None:
        super().__init__(engine, torch.zeros(engine.max_rows + 1, dtype=torch.int32))

    def _set_offsets(self, offsets: np.ndarray) -> None:
        assert self.sizes is not None
        kept = self.sizes.numpy()
        kept[: len(offsets)] = offsets
        kept[len(offsets) :] = offsets[-1]

    def form(self, rows: Rows) -> Form:
        assert isinstance(rows, RingBatch)
        offsets = rows.offsets()
        self._set_offsets(offsets)
        total = int(offsets[-1])
        return Form(rows, total, self.engine.graph_for(total), self.engine.items, true=np.diff(offsets)[:, None])

    def arguments(self, form: Form) -> list[torch.Tensor]:
        return self._views(form.amount, form.rows.rows)

    def example(self, amount: int, point: Point) -> list[torch.Tensor]:
        self._set_example(amount)
        return self._views(amount, self.engine.max_rows)

    def exact_example(self, amount: int, point: Point) -> list[torch.Tensor]:
        return self._views(amount, self._set_example(amount))

    def _set_example(self, total: int) -> int:
        """Sets the offsets to rows of the largest size, and a smaller last one; returns the number of rows."""
        most = self.engine.most
        offsets = [*range(0, total, most), total]
        self._set_offsets(np.array(offsets))
        if self.sizes is not None and self.module_sizes is not None:
            self.module_sizes.copy_(self.sizes)
        return len(offsets) - 1

    def _views(self, total: int, rows: int) -> list[torch.Tensor]:
        """The inputs, and the offsets."""
        assert self.module_sizes is not None
        views = []
        for x, item, varies in zip(self.inputs, self.engine.items, self.engine.varies):
            n = total if varies else rows
            views.append(x[: n * math.prod(item)].view(n, *item))
        return [*views, self.module_sizes[: rows + 1]]

    def fetch(self, form: Form, k: int, plane: Plane) -> None:
        e = self.engine
        if not e.varies[k]:
            return super().fetch(form, k, plane)
        assert self.module_sizes is not None and form.true is not None
        item = math.prod(form.shapes[k]) * plane.rows.element_size()
        e.mover.gather_packed(e.copies_at, self.inputs_at[k], plane.base, plane.stride, self.numbers(plane), self.module_sizes.data_ptr(),
            item, form.rows.rows, int(form.true.max()) * item, form.graph or form.amount, plane.on_device)

    def take(self, form: Form) -> list[torch.Tensor]:
        assert isinstance(form.rows, RingBatch) and self.sizes is not None
        xs = []
        for k, (plane, shape) in enumerate(zip(self.engine.inputs, form.shapes)):
            if not self.engine.varies[k]:
                xs.append(self.copy(form.rows, plane, shape))
                continue
            xs.append(torch.empty((form.amount, *shape), dtype=plane.dtype))
            if form.amount:
                form.rows.pack(k, xs[k].data_ptr(), xs[k].nbytes)
        return [*xs, self.sizes[: form.rows.rows + 1].clone()]

    def lines(self, form: Form, plane: Plane, output: Output, y: torch.Tensor) -> torch.Tensor:
        n = form.amount if output.variable else form.rows.rows
        row = Output(output.largest[1:], output.follows[1:]) if output.variable else output
        return self.converted(plane, row, y[:n] if form.graph else y, n)

    def write(self, form: Form, k: int, plane: Plane, lines: torch.Tensor) -> None:
        e, rows = self.engine, form.rows
        if not plane.variable:
            return super().write(form, k, plane, lines)
        assert isinstance(rows, RingBatch) and form.true is not None
        if e.device.type != "cuda":
            if form.amount:
                rows.unpack(k, lines.data_ptr(), lines.nbytes)
            return
        at, item = lines.data_ptr(), lines.nbytes // max(1, form.amount)
        for slot, n in zip(rows.slots().tolist(), form.true[:, 0].tolist()):
            if n:
                e.mover.copy(e.computing_at, plane.base + slot * plane.stride, at, n * item)
            at += n * item


class PackedEngine(Engine):
    packed = True

    def __init__(
        self, compute: Compute, inputs: Sequence[Input], max_rows: int, budget: int, device: torch.device, lanes: int, graphs: bool | None,
        shapes: list[Output],
    ) -> None:  # fmt: skip
        """budget: the largest number of tokens in a batch, except for single rows; 0: as many as its rows may have."""
        self.most, self.varies = _most(inputs), [bool(i.variable) for i in inputs]
        self.items = [i.shape[1:] if i.variable else i.shape for i in inputs]
        self._budget = min(budget or sys.maxsize, max_rows * self.most)
        super().__init__(compute, [(dtype, i.shape) for i, dtype in zip(inputs, torch_types(inputs))], max_rows, device, graphs, shapes)
        self.get_ready([PackedLane(self) for _ in range(lanes)])

    def warm_sizes(self) -> list[int]:
        return [min(self.most, self._budget), *([self._budget] if self.device.type == "cuda" else [])]

    def sizes_to_record(self) -> list[int]:
        return sorted({-(-self._budget * part // 64) for part in recorded_sizes(64)})

    def compared(self, size: int) -> int:
        return max(1, size * 7 // 8)  # the graph has padding then, and empty rows


# -- before serving


def plan(
    module: Callable[..., Any], packed: Sequence[str], tensors: Sequence[Declared], outputs: Sequence[Declared] | None,
    args: Sequence[str] | str | None, device: torch.device, dtype: torch.dtype | None, o: Options, rows: int, policy: Mapping[str, Any],
    taken: Outputs,
) -> Plan:  # fmt: skip
    check_packed(packed, tensors)
    if o.lengths or o.mask or o.pad or o.channels_last or o.compile != "off":
        raise errors.Invalid("--packed goes with none of --lengths, --mask, --pad, --channels-last and --compile: there is no padding, "
            "and the module runs as it is")
    inputs = list(map(Input.of, tensors))
    if len({i.symbols for i in inputs if i.variable}) > 1:
        raise errors.Invalid(f"--packed {','.join(packed)}: a module gets one array of offsets, and the lengths of "
            f"{' '.join(map(str, tensors))} differ: write a worker (rb.worker), which gets offsets for each dimension")
    exact = o.tolerance is None and not checks.is_quantized(module)
    tolerance = checks.tolerance(module, dtype is not None or device.type == "cuda") if o.tolerance is None else o.tolerance
    compute, _, _ = prepare(module, Axes(inputs, None), device, dtype, replace(o, freeze=False), outputs=taken, args=listed(args),
        packed=True)  # fmt: skip
    trial = Trial(compute, inputs, device, taken)
    with checks.refused_inputs(inputs):
        shapes, kinds = trial.outputs()
        if o.check:
            trial.refuse_mixed_rows(tolerance, exact)
    if outputs is None:
        outputs = [parse(s.dims(kind, name)) for name, s, kind in zip(taken.names, shapes, kinds)]
    else:
        shapes = checks.fit(outputs, shapes, taken)
        if not all(s.known for s in shapes):
            raise errors.Invalid("a packed module has outputs of one size for each row, or of the row's own size: declare fixed ones so")
    budget = int(policy.get("max_batch_cost") or 0)

    def engine(most: int) -> PackedEngine:
        return PackedEngine(compute, inputs, most, budget, device, o.depth, o.cuda_graphs, shapes)

    return Plan(outputs, engine, "; rows are packed", {**policy, "ragged": True})


def _most(inputs: Sequence[Input]) -> int:
    """The largest size of a row."""
    return min(i.shape[0] for i in inputs if i.variable)


class Trial:
    """Runs the module on rows of random numbers that differ in size."""

    def __init__(self, compute: Compute, inputs: Sequence[Input], device: torch.device, taken: Outputs) -> None:
        self.compute, self.inputs, self.device, self.taken = compute, inputs, device, taken
        most = _most(inputs)
        self.sizes = [max(1, most // 3), most, max(1, most // 2)]

    def rows(self, seed: int) -> list[Row]:
        return [self._row(size, seed + k) for k, size in enumerate(self.sizes)]

    def _row(self, size: int, seed: int) -> Row:
        shapes = [(size, *i.shape[1:]) if i.variable else i.shape for i in self.inputs]
        made = trials.example(self.inputs, shapes, numpy_types(self.inputs), 1, seed)
        return [over_array(x, i.kind) for x, i in zip(made, self.inputs)]

    def run(self, rows: list[Row]) -> tuple[list[Row], list[torch.Tensor]]:
        """The results of each row, and the module's outputs."""
        sizes = [next(x.shape[1] for x, i in zip(row, self.inputs) if i.variable) for row in rows]
        columns = [torch.cat([x[0] if i.variable else x for x in column]) for i, column in zip(self.inputs, zip(*rows))]
        offsets = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32)
        ys = self.compute([x.to(self.device) for x in (*columns, offsets)])
        parts = []
        wrong = [k for k, y in enumerate(ys) if y.dim() == 0 or len(y) not in (len(rows), sum(sizes))]
        for k, y in enumerate(ys):
            if k in wrong:
                raise errors.Invalid(f"{len(rows)} rows of {sum(sizes)} tokens went in, and a tensor of shape {list(y.shape)} came out: a "
                    f"packed module returns a line for each row, or for each token{self.taken.others(wrong)}")
            parts.append(y.split(sizes if len(y) == sum(sizes) else 1))
        return [list(row) for row in zip(*parts)], ys

    def outputs(self) -> tuple[list[Output], list[str]]:
        """The outputs of one row, and their types. An output with as many lines as tokens has the row's size."""
        _, ys = self.run(self.rows(0))
        first = torch_types(self.inputs)[0]
        found, kinds = [], []
        for y, name in zip(ys, self.taken.names):
            packed = len(y) == sum(self.sizes) != len(self.sizes)
            largest = (_most(self.inputs), *y.shape[1:]) if packed else tuple(y.shape[1:])
            found.append(Output(largest, (0 if packed else FIXED, *[FIXED] * (y.dim() - 1))[: len(largest)]))
            kinds.append(output_kind(y, first, name))
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
