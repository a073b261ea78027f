# SPDX-License-Identifier: Apache-2.0
"""More rows than a request may have: several requests, and one result."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import errors
from ..binding.device import concatenate
from ..binding.library import Duration, seconds
from .connection import Rows
from .future import Future
from .request import Chosen

Arrays = tuple[np.ndarray, ...]  # of the inputs, in order


def pieces(arrays: Arrays, rows: int, most: int) -> list[Arrays]:
    return [tuple(a[i : i + most] for a in arrays) for i in range(0, rows, most)]


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


def submit_split(model: Any, todo: list[Arrays], timeout: Duration | None, choice: Chosen) -> concurrent.futures.Future:
    whole = Future()
    whole.set_running_or_notify_cancel()
    left = _countdown(timeout)
    parts: list[Any] = [None] * len(todo)
    versions: list[int] = []
    missing, lock = [len(todo)], threading.Lock()  # 0: the whole has its result, or its error

    def arrived(i: int, part: Future) -> None:
        error = part.exception()
        with lock:
            if not missing[0]:
                return
            if error is None:
                parts[i] = model._as_list(part.result())
                versions.append(part.version)
                whole.version = min(versions)
            missing[0] = missing[0] - 1 if error is None else 0
            if missing[0]:
                return
        if error is not None:
            whole.set_exception(error)
        else:
            whole.set_result(model._core.give(join(parts)))

    for i, piece in enumerate(todo):
        if not missing[0]:  # a piece has failed
            break
        try:
            part = model._submit(piece, len(piece[0]), next(left), choice)
        except errors.Full:
            if not i:
                raise
            raise errors.Expired("the deadline passed before all rows were sent") from None
        part.add_done_callback(functools.partial(arrived, i))
    return whole


async def gather_split(model: Any, todo: list[Arrays], timeout: Duration | None, choice: Chosen) -> tuple[Any, int]:
    """The answer, and the oldest version among those of its pieces."""
    import asyncio

    how = {"timeout": timeout, "priority": choice[0], "cost": choice[1], "split": False, "version": True}
    tasks = [asyncio.ensure_future(model.ainfer(*piece, **how)) for piece in todo]
    try:
        found = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return model._core.give(join([model._as_list(part) for part, _ in found])), min(version for _, version in found)


def _countdown(timeout: Duration | None) -> Iterator[float | None]:
    """Yields the time left; at least 1 ns, since 0 is no timeout."""
    end = None if timeout is None else time.monotonic() + seconds(timeout)
    while True:
        yield None if end is None else max(1e-9, end - time.monotonic())
