# SPDX-License-Identifier: Apache-2.0
"""``Stream``: an answer in parts, while the worker appends to it."""

from __future__ import annotations

import time
from ctypes import addressof, c_uint32, c_uint64
from typing import Any, NamedTuple

import numpy as np

from .. import errors
from ..binding import structs as c
from ..binding.library import SLICE_NS, Duration, nanoseconds, seconds
from ..binding.tensors import growing
from .completions import LEAVE
from .request import Chosen, Request
from .split import Arrays

_ROOM = 64 << 10  # a part has at most that many bytes, or one step
_TIMEOUT = errors.Timeout.status


class Part(NamedTuple):
    """What a worker has added to the growing output. ``for values, restarted in model.stream(x)`` takes it apart."""

    values: np.ndarray
    #: The row began again, on another worker: the parts before this one do not count. ``values`` may be empty.
    restarted: bool


class Stream:
    """The parts of one answer; :meth:`Model.stream` makes it. Iterate over it, with ``for`` or ``async for``.

    The first step sends the request. Leaving early cancels it: ``with`` and ``close`` do so at
    once. One thread or task at a time uses a stream.
    """

    #: The whole answer, as a call returns it, once the stream has ended well.
    answer: Any = None

    def __init__(self, model: Any, arrays: Arrays, rows: int, timeout: Duration | None, choice: Chosen, from_start: bool,
                 sequence: Any = None) -> None:  # fmt: skip
        self._model, self._core, self._rows, self._choice, self._sequence = model, model._core, rows, choice, sequence
        self._arrays = tuple(a.copy() if isinstance(a, np.ndarray) else a for a in arrays)  # the caller may reuse its own
        self._req: Request | None = None
        self._over = self._ended = self._notifies = False
        self._deadline = None if timeout is None else time.monotonic() + seconds(timeout)
        t = growing(self._core.signature.outputs)
        if t is None:
            raise errors.Invalid(f"no output of {model.name} can grow: declare one whose first dimension alone varies, like ('<=64',)")
        if rows > 1:
            raise errors.Rows(f"a stream has one row, got {rows}")
        self._tensor, step = t, t.row_bytes // t.shape[0]
        self._buffer = np.empty((max(1, min(t.shape[0], _ROOM // step)), *t.shape[1:]), t.dtype)
        self._bytes, self._again = c_uint64(), c_uint32()
        self._again_at = addressof(self._again) if from_start else None

    def _begin(self, timeout_ns: int) -> Request:
        step = self._sequence
        if step:
            step._check()
        req = self._model._filled(self._arrays, self._rows, timeout_ns, step._id if step else 0)
        if step:
            step._busy = True
        return req

    def _left_ns(self) -> int:
        return 0 if self._deadline is None else nanoseconds(max(0.0, self._deadline - time.monotonic()))

    def _is_over(self) -> bool:
        """Whether the stream has ended well; raises Closed if it was left before."""
        if self._over and not self._ended:
            raise errors.Closed("the stream was closed, or has failed: its parts are not the whole answer")
        return self._over

    def _look(self, ns: int) -> int:
        """The status of rb_next_part."""
        assert self._req is not None
        buffer = self._buffer
        at = buffer.__array_interface__["data"][0]
        return self._core.lib.rb_next_part(self._core.handle, self._req._id, at, buffer.nbytes, ns, addressof(self._bytes), self._again_at)

    def _part(self, status: int) -> Part | None:
        """The part of a look that was no timeout; None at the end. Raises its error."""
        if status:
            try:
                raise self._core.error(status)
            finally:
                self.close()
                if self._sequence:
                    self._sequence._check()  # Closed says more than the error of a request that its sequence has ended
        again = bool(self._again.value)
        n = self._bytes.value // (self._tensor.row_bytes // self._tensor.shape[0])
        if n or again:
            return Part(self._buffer[:n].copy(), again)
        assert self._req is not None
        self.answer = self._core.give(self._req._copies())
        self._ended = True
        self.close()
        return None

    # -- in a thread

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Part:
        if self._is_over():
            raise StopIteration
        try:
            if self._req is None:
                self._req = self._begin(self._left_ns())
                self._req.choose(*self._choice)
                self._req.commit_in(self._left_ns(), c.PARTS)
            while (status := self._look(SLICE_NS)) == _TIMEOUT:
                self._core.sweep()
            part = self._part(status)
        except BaseException:  # also of a signal handler
            self.close()
            raise
        if part is None:
            raise StopIteration
        return part

    # -- in asyncio

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Part:
        import asyncio

        if self._is_over():
            raise StopAsyncIteration
        if self._req is not None and not self._notifies:
            raise errors.Invalid("this stream began with for: go on with that, not with async for")
        loop, completions = asyncio.get_running_loop(), self._model._ready()
        waiters, number = completions.waiters, 0
        try:
            completions.watch_by_loop(loop)
            while self._req is None:
                try:
                    req = self._begin(1)
                except (errors.Full, errors.Timeout):
                    if self._deadline is not None and time.monotonic() >= self._deadline:
                        raise
                    completions.sweep()
                    await completions.wait_for_room(loop)
                    self._model._check()
                    continue
                self._req = req
                req.choose(*self._choice)
                self._notifies = True
                req.commit_in(self._left_ns(), c.PARTS | c.NOTIFY)
            number = self._req._id
            while True:
                future = loop.create_future()
                # Before the look: from its timeout on, the library tells the loop of the next part.
                waiters[number] = future, loop, self._rows, LEAVE
                if (status := self._look(0)) != _TIMEOUT:
                    break
                await future
            waiters.pop(number, None)
            part = self._part(status)
        except BaseException:  # also a canceled task
            waiters.pop(number, None)
            self.close()
            raise
        if part is None:
            raise StopAsyncIteration
        return part

    # -- the end

    def close(self) -> None:
        """Ends the stream; a request under way is canceled."""
        if self._over:
            return
        self._over = True
        req, self._req = self._req, None
        if req is not None:
            if self._sequence:
                if not self._ended:
                    self._core.undo(self._sequence._id, req._id)
                self._sequence._busy = False
            req.release()
        completions = self._model._completions
        if completions is not None:
            completions.room()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def aclose(self) -> None:
        """The same as close, for ``contextlib.aclosing``."""
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_again_at"):
            self.close()
