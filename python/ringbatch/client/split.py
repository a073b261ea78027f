# SPDX-License-Identifier: Apache-2.0
"""More rows than a request may have: several requests, and one result."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterator
from typing import Any, Protocol

import numpy as np

from .. import errors
from ..binding.device import concatenate
from ..binding.library import Duration, seconds
from .connection import Rows
from .future import Future
from .request import Request

Piece = list[np.ndarray]


class Sender(Protocol):
    """The parts of Model that are used here."""

    def _filled(self, arrays: Piece, rows: int, timeout: Duration | None) -> Request: ...

    def _submit(self, arrays: Piece, rows: int, timeout: Duration | None, priority: int | None) -> concurrent.futures.Future: ...

    def ainfer(self, *inputs: Any, timeout: Duration | None, priority: int | None, split: bool) -> Coroutine[Any, Any, Any]: ...

    def _as_list(self, given: Any) -> list[Rows]: ...

    def _give(self, outs: list[Rows], single: bool) -> Any: ...


def pieces(arrays: list[np.ndarray], rows: int, most: int) -> list[Piece]:
    return [[a[i : i + most] for a in arrays] for i in range(0, rows, most)]


def join(parts: list[list[Rows]]) -> list[Rows]:
    """The outputs of all pieces, in order; a list if rows differ in size."""
    joined: list[Rows] = []
    for column in zip(*parts):
        if all(isinstance(rows, np.ndarray) and rows.shape[1:] == column[0].shape[1:] for rows in column):
            joined.append(np.concatenate(column))
        elif not isinstance(column[0], (np.ndarray, list)):  # on the device
            joined.append(concatenate(column))
        else:
            joined.append([row for rows in column for row in rows])
    return joined


def run_split(model: Sender, todo: list[Piece], timeout: Duration | None, priority: int | None) -> list[Rows]:
    """Runs the pieces, as many at once as the window allows."""
    left = _countdown(timeout)
    under_way: deque[Request] = deque()
    parts: list[list[Rows]] = []
    try:
        for piece in todo:
            req = None
            while req is None:
                # Waits for other threads to make room only if none of our own requests is in flight.
                budget = 1e-9 if under_way else next(left)
                try:
                    req = model._filled(piece, len(piece[0]), budget)
                except (errors.Full, errors.Timeout):  # no slot, or not attached again yet
                    if not under_way:
                        raise
                    _finish(under_way, parts)
            under_way.append(req)
            req.commit(next(left), priority=priority)
        while under_way:
            _finish(under_way, parts)
    finally:
        for req in under_way:
            req.release()
    return join(parts)


def _finish(under_way: deque[Request], parts: list[list[Rows]]) -> None:
    parts.append(under_way[0].wait()._copies())
    under_way.popleft().release()


def submit_split(model: Sender, todo: list[Piece], timeout: Duration | None, priority: int | None) -> concurrent.futures.Future:
    whole = Future()
    whole.set_running_or_notify_cancel()
    left = _countdown(timeout)
    parts: list[Any] = [None] * len(todo)
    missing, lock = [len(todo)], threading.Lock()  # 0: the whole has its result, or its error

    def arrived(i: int, part: concurrent.futures.Future) -> None:
        error = part.exception()
        with lock:
            if not missing[0]:
                return
            if error is None:
                parts[i] = model._as_list(part.result())
            missing[0] = missing[0] - 1 if error is None else 0
            if missing[0]:
                return
        if error is not None:
            whole.set_exception(error)
        else:
            whole.set_result(model._give(join(parts), False))

    for i, piece in enumerate(todo):
        if not missing[0]:  # a piece has failed
            break
        model._submit(piece, len(piece[0]), next(left), priority).add_done_callback(functools.partial(arrived, i))
    return whole


async def gather_split(model: Sender, todo: list[Piece], timeout: Duration | None, priority: int | None) -> Any:
    import asyncio

    tasks = [asyncio.ensure_future(model.ainfer(*piece, timeout=timeout, priority=priority, split=False)) for piece in todo]
    try:
        parts = [model._as_list(part) for part in await asyncio.gather(*tasks)]
    finally:
        for task in tasks:
            task.cancel()
    return model._give(join(parts), False)


def _countdown(timeout: Duration | None) -> Iterator[float | None]:
    """Yields the time left; at least 1 ns, since 0 is no timeout."""
    end = None if timeout is None else time.monotonic() + seconds(timeout)
    while True:
        yield None if end is None else max(1e-9, end - time.monotonic())
