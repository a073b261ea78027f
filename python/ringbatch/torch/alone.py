# SPDX-License-Identifier: Apache-2.0
"""A module without a broker: the upper bound that served batches are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import torch

from ..binding.tensors import Declared, parse
from ..worker.arguments import listed
from ..worker.axes import FIXED, Axes, Input, Output
from ..worker.ring import Rows
from .options import Options
from .padded import PaddedEngine
from .planes import DTYPES, NAMES, Plane
from .preparing import device_of, example_rows, output_texts, outputs_of, prepare, settle_memory, short_sleeps


def alone(
    module: Callable[..., Any], inputs: Sequence[str], rows: int, go_on: Callable[[], bool], done: Callable[[], Any], *,
    outputs: Sequence[str] | None, args: Sequence[str] | str | None, device: str | None, dtype: torch.dtype | None, options: Options,
) -> None:  # fmt: skip
    """Runs full batches from this process's pinned memory, as many in flight as a worker has.

    go_on is called before each wait for a batch, and ends the run by returning False;
    done is called after each batch.
    """
    where, depth = device_of(device), options.depth
    short_sleeps()
    tensors = list(map(parse, inputs))
    axes = Axes(list(map(Input.of, tensors)), None)
    taken = outputs_of(outputs)
    compute, _, full = prepare(module, axes, where, dtype, options, rows=rows, outputs=taken, args=listed(args))
    slots = depth * rows
    numbers = torch.arange(slots, dtype=torch.int32)

    def plane(t: Declared) -> Plane:
        host = torch.rand((slots, int(torch.Size(t.shape).numel()))).to(DTYPES[NAMES.index(t.kind)])
        return Plane(t.shape, t.variable, host.pin_memory() if where.type == "cuda" else host)

    engine = PaddedEngine(compute, axes.inputs, rows, where, depth, options.cuda_graphs, full=full)
    largest = [Output(tuple(y.shape[1:]), (FIXED,) * (y.dim() - 1)) for y in compute(example_rows(axes, False, where))]
    texts = output_texts(compute, largest, axes.inputs, axes, False, where, taken)
    engine.bind(list(map(plane, tensors)), [plane(parse(text)) for text in texts])
    settle_memory()
    shapes = [i.shape for i in axes.inputs]
    batches = [Rows(rows, numbers[n * rows :].data_ptr(), [(n * rows, 0, rows)], shapes) for n in range(depth)]
    with engine.current():
        for lane, batch in zip(engine.lanes, batches):
            lane.start(batch)
        while True:
            for lane, batch in zip(engine.lanes, batches):
                if not go_on():
                    return
                lane.wait()
                done()
                lane.release()
                lane.start(batch)
