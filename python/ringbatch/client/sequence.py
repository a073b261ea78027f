# SPDX-License-Identifier: Apache-2.0
"""``Sequence``: steps of a model with state.

The state stays in the sequence's slots. A step that fails, expires or is canceled, or
whose worker dies, leaves the state as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from ctypes import addressof, c_uint64
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import errors
from ..binding.library import Duration, nanoseconds, whole
from ..binding.paths import Stepper
from .completions import LEAVE
from .request import Request, chosen, claim, copy_rows
from .split import Arrays
from .stream import Stream


class Sequence(Stepper):
    """Steps of a model with state: each one reads the state that the last one has written.

    Use it as a context manager, or close it: it keeps its slots until then. One thread at
    a time uses a sequence. The state advances if, and only if, ``step`` returns. After an
    error the same step may be sent again. After :class:`StateLost` call :meth:`reset`.
    """

    if TYPE_CHECKING:  # the base has it, without a name for each argument

        def step(
            self, *inputs: Any, timeout: Duration | None = None, priority: int | None = None, cost: int | None = None,
            version: bool = False, **named: Any,
        ) -> Any:
            """Runs one step. Inputs, keywords and answer are those of a call of the model."""

    def __init__(self, model: Any, rows: int | None, timeout: Duration | None, source: int = 0) -> None:
        """source: the number of the sequence that it is a copy of."""
        self._out = c_uint64()  # its number, from the moment in which it is open
        self._model, self._core = model, model._core
        if rows is not None and not 0 < whole("rows", rows) < 1 << 32:  # C has 32 bits
            raise errors.Rows(f"a sequence has 1..{model.window} rows (this client's window), got {rows}")
        self._single, self._rows = rows is None, 1 if rows is None else rows
        core = self._core
        begin = core.lib.rb_sequence_copy if source else core.lib.rb_sequence_open
        core.in_slices(lambda ns: begin(core.handle, source or self._rows, ns, addressof(self._out)), nanoseconds(timeout))
        self._id = self._out.value

    @property
    def rows(self) -> int:
        """The number of sequences in step."""
        return self._rows

    # -- steps

    def _call(
        self, *inputs: Any, timeout: Duration | None = None, priority: int | None = None, cost: int | None = None, version: bool = False,
        **named: Any,
    ) -> Any:
        arrays, rows = self._arrays(inputs, named)
        choice = chosen(self._core, priority, cost)
        self._sent = 0
        try:
            return self._model._run(arrays, rows, timeout, choice, version, self)
        except BaseException:  # a signal handler may raise after the answer has come
            self._core.undo(self._id, self._sent)
            raise

    async def astep(
        self, *inputs: Any, timeout: Duration | None = None, priority: int | None = None, cost: int | None = None, version: bool = False,
        **named: Any,
    ) -> Any:
        """A step in asyncio. If the task is canceled, the step is, and the state stays."""
        import asyncio  # takes long to load

        arrays, rows = self._arrays(inputs, named)
        loop, model = asyncio.get_running_loop(), self._model
        completions = model._ready()
        completions.watch_by_loop(loop)
        future = loop.create_future()
        sent: int | None = None
        try:
            self._busy = True
            # The task reads the answer itself: a task that is canceled before must leave the state.
            choice = chosen(self._core, priority, cost)
            sent, _ = await model._asend(future, loop, LEAVE, arrays, rows, timeout, choice, False, self._id)
            await future
            answer = self._core.collect(sent, rows)
            return answer if version else answer[0]
        except BaseException:
            completions.abandon(future, sent)
            if sent:  # the answer may have come
                self._core.release_one(sent)
            self._core.undo(self._id, sent)
            raise
        finally:
            self._busy = False

    def stream(
        self, *inputs: Any, timeout: Duration | None = None, priority: int | None = None, cost: int | None = None,
        from_start: bool = True, **named: Any,
    ) -> Stream:
        """A step whose answer comes in parts, as :meth:`Model.stream`. The state advances if, and only if, the stream ends well."""
        arrays, rows = self._arrays(inputs, named)
        return Stream(self._model, arrays, rows, timeout, chosen(self._core, priority, cost), from_start, self)

    def undo(self) -> None:
        """Keeps the state from before the last step: if its answer could not be used. To be called before the next step."""
        self._check()
        self._core.check(self._core.lib.rb_sequence_undo(self._core.handle, self._id, 0))

    def request(self, *, shapes: Mapping[str, tuple[int, ...]] | None = None, timeout: Duration | None = None) -> Request:
        """The next step without copies, as ``model.request()``. Its release cancels a step under way and keeps the slots."""
        self._check()
        return claim(self._core, None if self._single else self._rows, shapes, nanoseconds(timeout), self._id)

    def _arrays(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Arrays, int]:
        self._check()
        arrays, rows = self._model._arrays(inputs, named)
        if abs(rows) != self._rows:
            raise errors.Rows(f"the sequence has {self._rows} rows, the inputs have {abs(rows)}")
        return arrays, rows

    def _check(self) -> None:
        self._model._check()
        if not self._id:
            raise errors.Closed("the sequence was closed")
        if self._busy:
            raise errors.NotDone("a step of this sequence is under way: await it first, or close its stream")

    # -- the state

    def reset(self, rows: Any = None) -> None:
        """Sets the state to zero: of all rows, of some (numbers), or by a mask (one bool for each row).

        After :class:`StateLost` it must be all rows.
        """
        self._check()
        chosen = np.arange(self._rows) if rows is None else np.asarray(rows)
        if rows is not None and chosen.shape == (self._rows,) and chosen.dtype.kind in "iu" and np.isin(chosen, (0, 1)).all():
            raise errors.Rows(f"the sequence has {self._rows} rows; {rows!r} may be numbers of rows or a mask: a mask has bools, as "
                              "done.astype(bool), and reset() is for all rows")  # fmt: skip
        chosen = np.atleast_1d(chosen)
        if chosen.dtype == bool and chosen.shape == (self._rows,):
            chosen = np.flatnonzero(chosen)
        if chosen.size and (chosen.dtype.kind not in "iu" or not 0 <= chosen.min() <= chosen.max() < self._rows):
            raise errors.Rows(f"the sequence has {self._rows} rows; got {rows!r}: want their numbers, or a bool for each")
        if not chosen.size:
            return
        numbers, core = np.ascontiguousarray(chosen, np.uint32), self._core
        whole = numbers.size >= self._rows and np.unique(numbers).size == self._rows
        some = (0, 0) if whole else (numbers.ctypes.data, numbers.size)
        core.check(core.lib.rb_sequence_reset(core.handle, self._id, *some))

    def state(self, name: str) -> Any:
        """A copy of the present state: of one item, or of all rows if the sequence was opened with ``rows``."""
        copied = copy_rows(self._in_place(name, np.empty(self._rows, bool)))
        if not isinstance(copied, np.ndarray):
            self._core.device.synchronize()
        return copied[0] if self._single else copied

    def set_state(self, state: Mapping[str, Any] | None = None, **named: Any) -> None:
        """Replaces the state, or some tensors of it; types and shapes are checked as those of inputs."""
        self._check()
        arrays = {}
        for name, value in {**(state or {}), **named}.items():
            t = self._core.signature.state[self._find(name)]
            try:
                array = self._model._convert(t, value)
                rows = abs(t.rows_of(array.shape))
            except errors.Error as e:
                raise type(e)(str(e).replace(f"input {name!r}", f"state {name!r}")) from None
            if rows != self._rows:
                raise errors.Rows(f"state {name!r}: the sequence has {self._rows} rows; got shape {tuple(array.shape)}")
            arrays[name] = array
        for name, array in arrays.items():  # after all checks: all or nothing
            _write(self._in_place(name), array, self._core)

    def copy(self, *, timeout: Duration | None = 10.0) -> Sequence:
        """Another sequence with the same state, at the same model. timeout: for room in the window."""
        self._check()
        return Sequence(self._model, None if self._single else self._rows, timeout, self._id)

    def _find(self, name: str) -> int:
        k = self._core.signature.state_index.get(name)
        if k is None:
            raise errors.Invalid(f"no state {name!r}; there are {', '.join(self._core.signature.state_index)}")
        return k

    def _in_place(self, name: str, fresh: np.ndarray | None = None) -> Any:
        """The present state, to be written. With fresh, which then says which rows begin their sequence, only to be read."""
        self._check()
        k = self._find(name)
        try:
            return self._core.state_rows(self._id, k, fresh)
        except errors.NotDone:  # a worker still has the last step, which has expired or was canceled
            claim(self._core, None if self._single else self._rows, None, 0, self._id).release()
            return self._core.state_rows(self._id, k, fresh)

    # -- the end

    def __reduce__(self) -> Any:
        raise TypeError("a sequence cannot be pickled: take its state(); seq.copy() copies it")

    def close(self) -> None:
        """Returns the slots. A step under way is canceled; NotDone if another thread waits for it."""
        number = self._out.value
        if not number:
            return
        status = self._core.lib.rb_sequence_close(self._core.handle, number)
        if status == errors.NotDone.status:  # another thread is in a step: the slots stay
            raise self._core.error(status)
        self._out.value = self._id = 0

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_core"):
            with contextlib.suppress(errors.NotDone):
                self.close()


def _write(rows: Any, value: Any, core: Any) -> None:
    if isinstance(rows, np.ndarray):
        rows[...] = value
    else:
        rows.copy_(value)
        core.device.synchronize()
