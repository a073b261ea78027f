# SPDX-License-Identifier: Apache-2.0
"""Coroutines of batches: several batches in flight in one process.

One thread uses the ring and runs the coroutines. A second one only waits for
mail, since asyncio cannot wait for a futex:

    this thread     next ── task A ──────────── task B … complete A   next …
    "mail" thread        wait ────► there is one        wait ────►

If a batch's broker is gone, or all its requests were canceled or have expired,
its coroutine is canceled.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from .. import errors
from ..binding.library import SLICE_NS, Process
from .batch import Batch
from .buffers import Buffers
from .ring import Ring, RingBatch, Stop, fail

_LOOK_S = 0.05  # between looks whether batches are still wanted


@contextlib.contextmanager
def own_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The event loop of this thread. It outlives a restart of the broker, and so do the coroutines' connections."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield loop
    finally:
        try:
            left = asyncio.all_tasks(loop)  # started by coroutines
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()


class AsyncServing:
    """Serves one attachment, with some batches in flight at once."""

    def __init__(self, ring: Ring, function: Callable[[Batch], Awaitable[Any]], concurrency: int, debug: bool) -> None:
        self._ring, self._function, self._concurrency, self._debug = ring, function, concurrency, debug
        self._running: dict[asyncio.Task[None], RingBatch | None] = {}  # None: canceled
        self._look_at = 0.0
        self._gone = False  # the broker
        self._spare: list[Buffers] = []  # each batch in flight has its own
        self._generation = Process.generation

    def run(self, loop: asyncio.AbstractEventLoop, stop: Stop) -> None:
        """Serves until stop is set and running batches are done. Raises BrokerGone, and SystemExit and such of a coroutine."""
        self._mail = concurrent.futures.ThreadPoolExecutor(1, "ringbatch mail")
        main = loop.create_task(self._serve(loop, stop))
        try:
            loop.run_until_complete(main)
        except BaseException as e:  # BrokerGone, a second Ctrl-C, SystemExit in a coroutine
            main.cancel()
            if Process.generation == self._generation:
                self._give_up(loop, e)
            raise
        finally:
            self._mail.shutdown()

    async def _serve(self, loop: asyncio.AbstractEventLoop, stop: Stop) -> None:
        mail: asyncio.Future[bool] | None = None
        while self._running or not stop.is_set():
            if Process.generation != self._generation:
                raise errors.Forked("this worker is the parent process's: a forked child attaches its own")
            if mail is None or mail.done():
                there, mail = mail is None or mail.result(), None  # result raises BrokerGone
                room = len(self._running) < self._concurrency and not stop.is_set()
                batch = self._ring.next(0) if there and room else None
                if batch is not None:
                    self._start(loop, batch)
                    await asyncio.sleep(0)  # it runs up to its first wait before the next batch is taken
                    continue
                if room or not there or not self._running:
                    mail = loop.run_in_executor(self._mail, self._ring.wait, SLICE_NS)
            waited_for: set[asyncio.Future[Any]] = {*self._running} | ({mail} if mail is not None else set())
            await asyncio.wait(waited_for, timeout=_LOOK_S if self._running else None, return_when=asyncio.FIRST_COMPLETED)
            for task in [t for t in self._running if t.done()]:
                self._running.pop(task)
                task.result()  # raises SystemExit and such
            if loop.time() >= self._look_at:
                self._look_at = loop.time() + _LOOK_S
                self._cancel_unwanted()
        if mail is not None:
            mail.cancel()

    def _cancel_unwanted(self) -> None:
        for task, batch in self._running.items():
            if batch is not None and not batch.wanted():
                self._running[task] = None  # canceled only once
                task.cancel("nobody waits for this batch any more")

    def _start(self, loop: asyncio.AbstractEventLoop, batch: RingBatch) -> None:
        self._running[loop.create_task(self._one(batch))] = batch

    async def _one(self, raw: RingBatch) -> None:
        """Runs one batch and answers it."""
        buffers = self._spare.pop() if self._spare else Buffers()
        batch = Batch(self._ring, buffers, raw, self._debug)
        try:
            result = await self._function(batch)
            batch._take(result)
            batch._finish()
            batch._end()
        except asyncio.CancelledError as e:
            batch._end()
            if not self._gone:  # otherwise Ring.close tells the clients, which may send again
                raw.answer_failed(e)
            return
        except BaseException as e:
            fail(raw, e, batch._end)
            return
        finally:
            self._spare.append(buffers)
        raw.complete()

    def _give_up(self, loop: asyncio.AbstractEventLoop, why: BaseException) -> None:
        """Cancels the running coroutines; their batches fail."""
        running, self._running, self._gone = self._running, {}, isinstance(why, errors.BrokerGone)
        for task in running:
            task.cancel(f"the batch is gone: {why!r}")
        if running:
            loop.run_until_complete(asyncio.gather(*running, return_exceptions=True))
