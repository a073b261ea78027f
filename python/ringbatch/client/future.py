# SPDX-License-Identifier: Apache-2.0
"""The futures of ``submit``.

If a signal handler raises inside ``future.result()``, CPython may leave the
future's condition locked: the handler may run inside ``Condition.__enter__``.
The event of ``concurrent.futures.wait`` has the same flaw. One thread delivers
all answers, and must not wait for such a lock.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from typing import Any, Callable

_PATIENCE_S = 0.01  # others hold these locks for microseconds


class Future(concurrent.futures.Future):
    """A future that does not wait for a leaked lock: a new thread does."""

    #: The version of the live weights that answered it, the oldest one if its rows were split; 0 if the model has none.
    version = 0
    _done_callbacks: list[Any]
    _waiters: list[Any]

    def set_result(self, result: Any) -> None:
        self._set(super().set_result, result, "add_result")

    def set_exception(self, exception: BaseException | None) -> None:
        self._set(super().set_exception, exception, "add_exception")

    def _set(self, setter: Callable[[Any], None], value: Any, telling: str) -> None:
        if not self._condition.acquire(timeout=_PATIENCE_S):
            _in_thread(setter, value)
            return
        callbacks, waiters = self._done_callbacks, self._waiters
        self._done_callbacks, self._waiters = [], []  # so that callbacks run without the lock, below
        try:
            setter(value)
            for waiter in waiters:
                _tell(waiter, getattr(waiter, telling), self)
        finally:
            self._done_callbacks, self._waiters = callbacks, waiters
            self._condition.release()
        self._invoke_callbacks()  # type: ignore[attr-defined]


def _tell(waiter: Any, add: Callable[[Any], None], future: Future) -> None:
    """Wakes a concurrent.futures.wait, whose event may have a leaked lock."""
    lock = waiter.event._cond
    if lock.acquire(timeout=0 if hasattr(waiter, "was_left") else _PATIENCE_S):
        lock.release()
        add(future)
    else:
        waiter.was_left = True
        _in_thread(add, future)


def _in_thread(call: Callable[[Any], None], argument: Any) -> None:
    def wait_and_call() -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            call(argument)

    with contextlib.suppress(RuntimeError):  # the interpreter ends
        threading.Thread(target=wait_and_call, name="ringbatch future", daemon=True).start()
