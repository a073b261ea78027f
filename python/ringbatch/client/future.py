# SPDX-License-Identifier: Apache-2.0
"""The futures of ``submit``.

If a signal's handler raises inside ``future.result()``, CPython may leave the
future's condition locked: ``Condition.__enter__`` is a function of Python, and
the handler may run between its acquire and its return. The same holds for the
event that ``concurrent.futures.wait`` sleeps on. One thread delivers the answers
of all requests, and must not wait for such a lock.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from typing import Any, Callable

_PATIENCE_S = 0.01  # others hold these locks for microseconds


class Future(concurrent.futures.Future):
    """A future that sets its result without waiting for a leaked lock: a new thread waits for it instead."""

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
        self._done_callbacks, self._waiters = [], []  # set by hand below: callbacks run without the lock
        try:
            setter(value)
            for waiter in waiters:
                _tell(waiter, getattr(waiter, telling), self)
        finally:
            self._done_callbacks, self._waiters = callbacks, waiters
            self._condition.release()
        self._invoke_callbacks()  # type: ignore[attr-defined]


def _tell(waiter: Any, add: Callable[[Any], None], future: Future) -> None:
    """Wakes a concurrent.futures.wait. A handler may have leaked the lock of its event."""
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
