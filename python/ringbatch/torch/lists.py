# SPDX-License-Identifier: Apache-2.0
"""Modules that take and return lists, with an element for each row: detectors, whose rows differ in what they find."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Callable

import numpy as np
import torch

from .. import errors
from ..binding.device import over_array
from ..binding.library import Duration
from ..binding.tensors import Declared, Specs, signature
from ..worker import trials
from ..worker.arguments import passing, taken_by
from ..worker.axes import Axes, Input
from ..worker.batch import Batch
from ..worker.results import Outputs
from ..worker.worker import Ending, worker
from . import checks
from .module_call import numpy_types
from .planes import is_small


class Lists:
    """Calls a module with a list of tensors for each input."""

    def __init__(self, module: Callable[..., Any], tensors: Sequence[Declared], args: Sequence[str] | None, device: torch.device,
            taken: Outputs) -> None:
        self._tensors, self._device, self._taken, names = tensors, device, taken, [t.name for t in tensors]
        self._call = passing(taken_by(module), names, args).caller(module, names)

    @torch.inference_mode()
    def run(self, columns: Sequence[Any]) -> list[list[np.ndarray]]:
        """The outputs of each row."""
        given = [[over_array(np.array(x), t.kind).to(self._device) for x in column] for t, column in zip(self._tensors, columns)]
        results, rows = self._call(given), len(columns[0])
        if not isinstance(results, (list, tuple)) or len(results) != rows:
            many = f" of {len(results)}" if isinstance(results, (list, tuple)) else ""
            raise errors.Invalid(f"{rows} rows went in, and a {type(results).__name__}{many} came out: with --lists a module returns a "
                "list with a result for each row")
        return [[(y.float() if is_small(y) else y).cpu().numpy() for y in self._taken(result)] for result in results]

    def __call__(self, batch: Batch) -> dict[str, list[np.ndarray]]:
        rows = self.run([batch.inputs[t.name][: batch.rows] for t in self._tensors])
        return dict(zip(self._taken.names, map(list, zip(*rows))))

    def try_rows(self, check: bool, tolerance: float) -> None:
        """Refuses a module whose rows give other results in a batch than alone."""
        axes = Axes(list(map(Input.of, self._tensors)), None)
        types, most = numpy_types(axes.inputs), axes.largest()
        shapes = [axes.shapes(tuple(max(1, n // part) for n in most)) for part in (1, 1, 2)]
        rows = [trials.example(axes.inputs, shape, types, 1, seed) for seed, shape in enumerate(shapes)]
        with checks.refused_inputs(axes.inputs):
            together = self.run([[x[0] for x in column] for column in zip(*rows)])
            alone = [self.run(row)[0] for row in rows]
        if check and not all(trials.agree(a, b, tolerance) for a, b in zip(together, alone)):
            raise errors.Invalid(f"a row gives other results in a batch of {len(rows)} than alone, by more than {tolerance:g} of the "
                "largest: rows of this model depend on one another. Allow more (--tolerance), anything (--no-check), or batches of one "
                "(--max-batch-size=1)")


def serve(
    lists: Lists, model: str, inputs: Specs, outputs: Specs, policy: Mapping[str, Any], stop: threading.Event | None, wait: Duration
) -> None:
    """Serves a module that was tried."""
    settings = dict(policy)
    socket, ended = settings.pop("socket", None), Ending(stop or threading.Event())
    made = worker(model, inputs=inputs, outputs=outputs, **settings)(lists)
    said = f"serving {model}: {signature(inputs, outputs)} on {lists._device}; rows are in lists"
    with ended.on_ctrl_c():
        made._serve(socket, ended, wait, lambda: print(said, flush=True))
