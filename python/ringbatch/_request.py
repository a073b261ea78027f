"""One request, step by step and without copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ctypes import addressof
from typing import Any, Callable, NamedTuple

import numpy as np

from . import _structs as c
from . import errors
from ._core import Core, nanoseconds
from ._library import Process
from ._tensors import Tensor
from ._views import Life, View, _committed, _parents, _released


class Timing(NamedTuple):
    """Where a request's time went, in seconds."""

    claim: float
    write: float
    queue: float
    dispatch: float
    compute: float
    wake: float


class Columns(Mapping[str, np.ndarray]):
    """The tensors of one side by name; arrays are made when asked for.

    It refers to its request or batch but is not referred to by it: what is
    forgotten goes at once, without the help of the garbage collector.
    """

    __slots__ = ("_made", "_make", "_names")

    def __init__(self, names: list[str], make: Callable[[int], np.ndarray], made: dict[str, np.ndarray]) -> None:
        self._names, self._make, self._made = names, make, made

    def __getitem__(self, name: str) -> np.ndarray:
        made = self._made.get(name)
        if made is None:
            try:
                k = self._names.index(name)
            except ValueError:
                raise errors.Invalid(f"no tensor {name!r}; there are {', '.join(self._names)}") from None
            made = self._made[name] = self._make(k)
        return made

    def __setitem__(self, name: str, value: Any) -> None:
        raise TypeError(f"the arrays are where they are: write into them, [{name!r}][...] = value")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Request:
    """Slots of shared memory: write the inputs, run, read the outputs.

    Use it as a context manager: its end gives the slots back. One thread at a
    time uses a request.
    """

    __slots__ = (
        "__weakref__", "_committed", "_core", "_generation", "_id", "_in", "_made_in", "_made_out", "_mapping", "_ok", "_out",
        "_released", "_rows", "_single", "_slot",
    )  # fmt: skip

    def __init__(self, core: Core, rows: int | None, shapes: Mapping[str, tuple[int, ...]] | None, timeout: float | None) -> None:
        self._released = True
        self._core = core
        self._single = rows is None
        if rows is None and timeout is None and core.plain and not shapes:
            self._id, self._slot, attachment = core.claim_one()
            self._rows = 1
        else:
            r = core.claim(1 if rows is None else rows, _dims(core, shapes or {}), nanoseconds(timeout))
            self._id, self._slot, self._rows, attachment = r.id, r.slot, r.rows, r.attachment
        self._released = self._committed = self._ok = False
        self._generation = Process.generation
        # Made when somebody asks for an array.
        self._in: Life | None = None
        self._out: Life | None = None
        self._made_in: dict[str, Any] | None = None
        self._made_out: dict[str, Any] | None = None
        self._mapping = core.mapping(self._id, attachment)

    @property
    def inputs(self) -> Mapping[str, np.ndarray]:
        """Where to write, by name; until the request is committed."""
        if self._made_in is None:
            self._made_in = {}
        return Columns(self._core.signature.input_names, self._input, self._made_in)

    @property
    def outputs(self) -> Mapping[str, np.ndarray]:
        """Where to read, by name; once the request has ended.

        Of rows that differ in size it is a list of arrays.
        """
        if self._made_out is None:
            self._made_out = {}
        return Columns(self._core.signature.output_names, self._output, self._made_out)

    @property
    def rows(self) -> int:
        return self._rows

    def _input(self, k: int) -> View:
        self._check()
        if self._committed:
            raise _committed()
        t = self._core.signature.inputs[k]
        if self._in is None:
            self._in = Life(self._mapping.memory)
        shape = self._core.input_shapes(self._id)[k] if t.variable else t.shape
        return self._view(self._in, self._core.lib.rb_input, k, t, shape)

    def _output(self, k: int) -> Any:
        self._check()
        if not self._ok:
            self._core.check(self._core.lib.rb_poll(self._core.handle, self._id))
            self._ok = True
        t = self._core.signature.outputs[k]
        if self._out is None:
            self._out = Life(self._mapping.memory)
        shape = self._core.output_shapes(self._id, k, self._rows) if t.variable else t.shape
        if isinstance(shape, list):  # rows that differ in size have no array in common
            self._locate(self._first_row, k, t)
            return [self._out.view(self._mapping.rows(t, self._slot + row, 1, own)[0]) for row, own in enumerate(shape)]
        return self._view(self._out, self._first_row, k, t, shape)

    def _first_row(self, handle: int, request: int, k: int, view: int) -> int:
        return self._core.lib.rb_output_row(handle, request, k, 0, view)

    def _view(self, life: Life, where: Any, k: int, t: Tensor, shape: tuple[int, ...]) -> View:
        mapping = self._mapping
        if t not in mapping.offsets:
            self._locate(where, k, t)
        if self._single and not t.variable:
            return life.view(mapping.row(t, self._slot))
        rows = mapping.rows(t, self._slot, self._rows, shape)
        return life.view(rows[0, ...] if self._single else rows)

    def _locate(self, where: Any, k: int, t: Tensor) -> None:
        """Has the mapping know where the tensor lies."""
        if t not in self._mapping.offsets:
            v = c.View()
            self._core.check(where(self._core.handle, self._id, k, addressof(v)))
            self._mapping.offsets[t] = v.data - self._mapping.base - self._slot * t.stride

    def _check(self) -> None:
        if self._generation != Process.generation:
            raise _parents()
        if self._released:
            raise errors.Released("the request was released")

    def commit(self, timeout: float | None = None, *, priority: int | None = None) -> Request:
        """Hands the request over. With a timeout it ends as Expired then, wherever it is."""
        return self._commit(timeout, priority, 0)

    def _commit(self, timeout: float | None, priority: int | None, flags: int) -> Request:
        self._check()
        self._set_priority(priority)
        self._core.check(self._core.lib.rb_commit(self._core.handle, self._id, nanoseconds(timeout), flags))
        self._end_inputs()
        return self

    def _set_priority(self, priority: int | None) -> None:
        if priority is not None:
            if not 0 <= priority < 1 << 32:  # C would see another number
                raise errors.NoLevel(f"{priority}, the model has 0..{self._core.info.levels - 1}")
            self._core.check(self._core.lib.rb_set_priority(self._core.handle, self._id, priority))

    def _end_inputs(self) -> None:
        """They belong to the worker now."""
        self._committed = True
        if self._in is not None:
            self._in.end(_committed)
        if self._made_in:
            self._made_in.clear()

    def wait(self, timeout: float | None = None) -> Request:
        """Waits for the request's end; raises what it ended with, or Timeout."""
        self._check()
        self._core.wait(self._id, nanoseconds(timeout))
        self._ok = True
        return self

    def run(self, timeout: float | None = None, *, priority: int | None = None) -> Request:
        """Commits and waits."""
        self._check()
        if self._committed:
            raise errors.Committed("the request was committed already")
        self._set_priority(priority)
        self._core.run_one(self._id, nanoseconds(timeout), self._end_inputs)
        self._ok = True
        return self

    def _copies(self) -> list[Any]:
        """The outputs, for those who keep them."""
        return [[np.array(row) for row in v] if isinstance(v, list) else np.array(v) for v in self.outputs.values()]

    def done(self) -> bool:
        """Whether the request has ended; raises if it ended badly."""
        self._check()
        status = self._core.lib.rb_poll(self._core.handle, self._id)
        if status == errors.NotDone.status:
            return False
        self._core.check(status)
        return True

    def cancel(self) -> None:
        """Asks for the request's end: wait then raises Canceled."""
        self._check()
        self._core.check(self._core.lib.rb_cancel(self._core.handle, self._id))

    @property
    def timing(self) -> Timing:
        """Where the time of an ended request went."""
        self._check()
        t = c.Timing()
        self._core.check(self._core.lib.rb_request_timing(self._core.handle, self._id, addressof(t)))
        return Timing(*(getattr(t, name) / 1e9 for name in Timing._fields))

    def release(self) -> None:
        """Gives the slots back; the views of this request are over."""
        if not self._released:
            try:
                self._detach()
            finally:  # a signal's handler may raise in the midst of it, or at the start of any function of Python
                core = self._core
                core.rb_release(core.handle, self._id)

    def _detach(self) -> int:
        """Ends the views and leaves the request itself to the caller."""
        self._released = True
        if self._in is not None:
            self._in.end(_released)
        if self._out is not None:
            self._out.end(_released)
        for made in (self._made_in, self._made_out):
            if made:
                made.clear()
        return self._id

    def __enter__(self) -> Request:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if getattr(self, "_released", True) is False:
            self.release()


def _dims(core: Core, shapes: Mapping[str, tuple[int, ...]]) -> list[int]:
    """The sizes of the inputs' variable dimensions, from the rows' shapes by name."""
    dims: list[int] = []
    unknown = shapes.keys() - core.signature.input_names
    if unknown:  # a typo would mean the largest size
        raise errors.Invalid(f"shapes: no input {', '.join(sorted(unknown))}; there are {', '.join(core.signature.input_names)}")
    for t in core.signature.inputs:
        shape = shapes.get(t.name, t.shape)
        if len(shape) != len(t.shape) or any(d != n for i, (d, n) in enumerate(zip(shape, t.shape)) if i not in t.variable):
            raise errors.Shape(f"input {t.name!r}: expected {t.expected}; got shape {tuple(shape)}")
        dims += [int(shape[i]) for i in t.variable]
    return dims
