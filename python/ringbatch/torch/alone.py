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
from .lanes import Engine
from .module_call import torch_types
from .planes import DTYPES, NAMES, Plane
from .preparing import device_of, example_rows, output_texts, prepare, settle_memory, short_sleeps


def alone(module: Callable[..., Any], inputs: Sequence[str], rows: int, go_on: Callable[[], bool], done: Callable[[], Any],
        **o: Any) -> None:
    """Runs full batches from this process's pinned memory, as many in flight as a worker has.

    go_on is called before each wait for a batch, and ends the run by returning False;
    done is called after each batch.
    """
    device = device_of(o.pop("device", None))
    depth, graphs = o.pop("depth", 2), o.pop("cuda_graphs", None)
    short_sleeps()
    tensors = list(map(parse, inputs))
    axes = Axes(list(map(Input.of, tensors)), None)
    compute, _, full = prepare(module, axes, device, rows=rows, graphs=graphs, args=listed(o.pop("args", None)), **o)
    slots = depth * rows
    numbers = torch.arange(slots, dtype=torch.int32)

    def plane(t: Declared) -> Plane:
        host = torch.rand((slots, int(torch.Size(t.shape).numel()))).to(DTYPES[NAMES.index(t.kind)])
        return Plane(t.shape, t.variable, host.pin_memory() if device.type == "cuda" else host)

    specs = [(dtype, i.shape) for i, dtype in zip(axes.inputs, torch_types(axes.inputs))]
    engine = Engine(compute, specs, rows, device, depth, graphs, full=full)
    largest = [Output(tuple(y.shape[1:]), (FIXED,) * (y.dim() - 1)) for y in compute(example_rows(axes, False, device))]
    outputs = output_texts(compute, largest, axes.inputs, axes, False, device)
    engine.bind(list(map(plane, tensors)), [plane(parse(text)) for text in outputs])
    settle_memory()
    shapes = [shape for _, shape in specs]
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
