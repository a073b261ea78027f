# SPDX-License-Identifier: Apache-2.0
"""One request, step by step and without copies."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import addressof
from typing import Any, NamedTuple, NoReturn, Optional

import numpy as np

from .. import errors
from ..binding import structs as c
from ..binding.library import Duration, nanoseconds, whole
from ..binding.paths import Held
from .connection import Core

Chosen = tuple[Optional[int], Optional[int]]  # priority and cost


class Timing(NamedTuple):
    """The times of a request's stages, in seconds."""

    claim: float
    write: float
    queue: float
    dispatch: float
    compute: float
    wake: float


class Request(Held):
    """Slots of shared memory: write the inputs, run, read the outputs.

    Use it as a context manager, which returns the slots at its end. One thread at a
    time uses a request.
    """

    __slots__ = ("__weakref__",)

    _core: Core

    @property
    def _mapping(self) -> Any:
        """The mapping of its slots."""
        return self._core.mapping(self._id, self._attachment)

    def _fresh(self, k: int) -> Any:
        """An array over the k-th tensor; outputs follow the inputs."""
        return self._core.view(k, self._id, self._slot, self.rows, self._attachment, self._single)

    def _set_text(self, k: int, value: Any) -> None:
        """Writes the k-th input, which is text."""
        self._core.set_text(k, self._id, self._single, value)

    def _no_tensor(self, side: int, name: object) -> NoReturn:
        names = self._core.signature.output_names if side else self._core.signature.input_names
        raise errors.Invalid(f"no tensor {name!r}; there are {', '.join(names)}")

    def commit(
        self, timeout: Duration | None = None, *, priority: int | None = None, cost: int | None = None, stream: Any = None
    ) -> Request:
        """Sends the request. With a timeout it ends as Expired at that time, wherever it is.

        stream: for a model with tensors on the device; the request follows the stream's
        work so far, without waiting here. Default: torch's current stream.
        """
        self._choose(priority, cost)
        self.commit_in(nanoseconds(timeout), 0, stream)
        return self

    def _choose(self, priority: int | None, cost: int | None) -> None:
        self.choose(*chosen(self._core, priority, cost))

    def wait(self, timeout: Duration | None = None) -> Request:
        """Waits for the request's end; raises its error, or Timeout."""
        self.wait_in(nanoseconds(timeout))
        return self

    def _copies(self) -> list[Any]:
        """Copies of the outputs."""
        return [copy_rows(v) for v in self.outputs.values()]

    def done(self) -> bool:
        """Whether the request has ended; raises its error."""
        status = self._core.lib.rb_poll(self._core.handle, self._id)
        if status == errors.NotDone.status:
            return False
        self._core.check(status)
        return True

    def cancel(self) -> None:
        """Asks for the request's end: wait then raises Canceled."""
        self._core.check(self._core.lib.rb_cancel(self._core.handle, self._id))

    @property
    def version(self) -> int:
        """The version of the live weights that answered an ended request; 0 if the model has none."""
        return self._core.version(self._id)

    @property
    def timing(self) -> Timing:
        """The times of an ended request."""
        t = c.Timing()
        self._core.check(self._core.lib.rb_request_timing(self._core.handle, self._id, addressof(t)))
        return Timing(*(getattr(t, name) / 1e9 for name in Timing._fields))


def chosen(core: Core, priority: int | None, cost: int | None) -> Chosen:
    """Checks a priority and a cost for C, which has 32 and 16 bits."""
    if priority is not None:
        priority = whole("priority", priority)
        if not 0 <= priority < 1 << 32:
            raise errors.NoLevel(f"{priority}, the model has 0..{core.info.levels - 1}")
    if cost is not None:
        cost = whole("cost", cost)
        if not 0 <= cost < 1 << 16:
            raise errors.Invalid(f"the cost of a row is 0..65535, got {cost}")
    return priority, cost


def copy_rows(rows: Any) -> Any:
    if isinstance(rows, str) or (isinstance(rows, list) and not isinstance(rows[0], np.ndarray)):
        return rows  # texts
    if isinstance(rows, list):
        return [np.array(row) for row in rows]
    return np.array(rows) if isinstance(rows, np.ndarray) else rows.clone()


def claim(
    core: Core, rows: int | None, shapes: Mapping[str, tuple[int, ...]] | None, timeout_ns: int = 0, sequence: int = 0
) -> Request:
    """A request of one item (rows is None) or of some rows. sequence: the request is its next step."""
    if rows is None and not (sequence or timeout_ns or shapes) and core.plain:
        return Request(core)
    rows = None if rows is None else whole("rows", rows)
    if rows is not None and not 0 <= rows < 1 << 32:  # C has 32 bits
        raise errors.Rows(f"a request has 1..{core.info.window} rows (this client's window), got {rows}")
    return Request(core, 1 if rows is None else rows, tuple(_dims(core, shapes or {})), timeout_ns, rows is None, sequence)


def _dims(core: Core, shapes: Mapping[str, tuple[int, ...]]) -> list[int]:
    """The sizes of the inputs' variable dimensions, from the shapes of rows by name."""
    dims: list[int] = []
    unknown = shapes.keys() - core.signature.input_names
    if unknown:  # a typo would mean the largest size
        raise errors.Invalid(f"shapes: no input {', '.join(sorted(unknown))}; there are {', '.join(core.signature.input_names)}")
    for t in core.signature.inputs:
        shape = shapes.get(t.name, t.shape)
        shape = tuple(whole(f"a size of input {t.name!r}", d) for d in shape)
        if not t.holds(shape):
            raise errors.Shape(f"input {t.name!r}: expected {t.expected}; got shape {shape}")
        dims += [shape[i] for i in t.variable]
    return dims

