# SPDX-License-Identifier: Apache-2.0
"""Modules whose rows differ in how many results they have, as those of detectors do: they take and return lists with an
element for each row, or return the results of all rows as one tensor, and an index."""

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
from ..worker.returned import by_index
from ..worker.worker import Ending, worker
from . import checks
from .module_call import numpy_types
from .planes import is_small


class Lists:
    """Calls a module with a list of tensors for each input; if it gives an index, with one tensor of all rows."""

    def __init__(self, module: Callable[..., Any], tensors: Sequence[Declared], outputs: Sequence[Declared], index: str | None,
            args: Sequence[str] | None, device: torch.device, taken: Outputs) -> None:  # fmt: skip
        self._tensors, self._outputs, self._index, self._device, self._taken = tensors, outputs, index, device, taken
        names = [t.name for t in tensors]
        self._call = passing(taken_by(module), names, args).caller(module, names)

    @torch.inference_mode()
    def run(self, columns: Sequence[Any]) -> list[list[np.ndarray]]:
        """The outputs of each row."""
        return self._run_lists(columns) if self._index is None else self._run_indexed(columns)

    def _run_indexed(self, columns: Sequence[Any]) -> list[list[np.ndarray]]:
        given = [over_array(np.array(column), t.kind).to(self._device) for t, column in zip(self._tensors, columns)]
        *results, index = map(_array, self._taken(self._call(given)))
        rows, found = len(given[0]), []
        for t, y in zip(self._outputs, results):
            if 0 not in t.variable and y.shape[:1] != (rows,):
                raise errors.Invalid(f"{rows} rows went in, and a tensor of shape {list(y.shape)} came out: {t} has a row for each row")
            found.append(by_index(y, index).rows(t.name, rows) if 0 in t.variable else list(y))
        return [list(row) for row in zip(*found)]

    def _run_lists(self, columns: Sequence[Any]) -> list[list[np.ndarray]]:
        given = [[over_array(np.array(x), t.kind).to(self._device) for x in column] for t, column in zip(self._tensors, columns)]
        results, rows = self._call(given), len(columns[0])
        if not isinstance(results, (list, tuple)) or len(results) != rows:
            many = f" of {len(results)}" if isinstance(results, (list, tuple)) else ""
            raise errors.Invalid(f"{rows} rows went in, and a {type(results).__name__}{many} came out: with lists a module returns a "
                "list with a result for each row")
        return [list(map(_array, self._taken(result))) for result in results]

    def __call__(self, batch: Batch) -> dict[str, list[np.ndarray]]:
        rows = self.run([batch.inputs[t.name][: batch.rows] for t in self._tensors])
        return dict(zip(self._taken.names, map(list, zip(*rows))))

    def try_rows(self, check: bool, tolerance: float) -> None:
        """Refuses a module whose rows give other results in a batch than alone."""
        axes = Axes(list(map(Input.of, self._tensors)), None)
        types, most = numpy_types(axes.inputs), axes.largest()
        shapes = [axes.shapes(tuple(max(1, n // part) for n in most)) for part in (1, 1, 2 if self._index is None else 1)]
        rows = [trials.example(axes.inputs, shape, types, 1, seed) for seed, shape in enumerate(shapes)]
        with checks.refused_inputs(axes.inputs):
            together = self.run([[x[0] for x in column] for column in zip(*rows)])
            alone = [self.run(row)[0] for row in rows]
        names = [t.name for t in self._outputs]
        if self._taken.names != names:
            raise errors.Invalid(f"the module gives {', '.join(self._taken.names)}, and {', '.join(names)} are declared")
        if check and not all(trials.agree(a, b, tolerance) for a, b in zip(together, alone)):
            raise errors.Invalid(f"a row gives other results in a batch of {len(rows)} than alone, by more than {tolerance:g} of the "
                "largest: rows of this model depend on one another. Allow more (--tolerance), anything (--no-check), or batches of one "
                "(--max-batch-size=1)")


def _array(y: torch.Tensor) -> np.ndarray:
    return (y.float() if is_small(y) else y).cpu().numpy()


def serve(
    lists: Lists, model: str, inputs: Specs, outputs: Specs, policy: Mapping[str, Any], stop: threading.Event | None, wait: Duration
) -> None:
    """Serves a module that was tried."""
    settings = dict(policy)
    socket, ended = settings.pop("socket", None), Ending(stop or threading.Event())
    made = worker(model, inputs=inputs, outputs=outputs, **settings)(lists)
    how = "rows are in lists" if lists._index is None else f"rows by {lists._index}"
    said = f"serving {model}: {signature(inputs, outputs)} on {lists._device}; {how}"
    with ended.on_ctrl_c():
        made._serve(socket, ended, wait, lambda: print(said, flush=True))
