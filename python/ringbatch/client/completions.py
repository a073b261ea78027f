# SPDX-License-Identifier: Apache-2.0
"""Requests in flight: futures for threads and for asyncio.

A request is listed here with its future, then committed. A watcher collects the
ended requests and delivers each to its future. The watcher is an event loop, by the
descriptor of the C library, or the thread that serves ``submit``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import sys
import threading
import weakref
from ctypes import addressof, c_int, c_uint32, c_uint64
from typing import TYPE_CHECKING, Any, Callable, Optional

from .. import errors
from ..binding import structs as c
from ..binding.library import Process, load
from .connection import Core

if TYPE_CHECKING:  # asyncio takes long to load
    import asyncio

    # A future, its loop (None: it is not asyncio's), the rows (-1: one item), and how it gets its answer.
    Waiter = tuple[Any, Optional[asyncio.AbstractEventLoop], int, int]

log = logging.getLogger("ringbatch")

PLAIN, WITH_VERSION, LEAVE = range(3)  # how a future gets its answer; LEAVE: the caller reads it. many.c has the same
_REAP = 256  # requests collected at once
_HOLD = 16  # requests held before a commit: then a worker can start while the loop sends the rest
_ROOM_RETRY_S = 0.005  # slots may return without a notice
_WATCH_NS = 1_000_000_000  # between looks whether the client was forgotten


class Completions:
    def __init__(self, core: Core) -> None:
        self._core = core
        self.generation = Process.generation
        # Reentrant: a signal handler or the garbage collector may close the client while the lock is held.
        self._lock = threading.RLock()
        self.waiters: dict[int, Waiter] = {}
        self._threads: list[int] = []  # collected by the thread, not delivered yet
        # Each loop's duplicate of the descriptor, closed by a finalizer.
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[int, weakref.finalize]] = weakref.WeakKeyDictionary()
        self._held: dict[tuple[asyncio.AbstractEventLoop, int], list[int]] = {}
        self._room: dict[asyncio.Future, asyncio.AbstractEventLoop] = {}  # waiters for slots, the oldest first
        self._last_loop: Callable[[], Any] = lambda: None
        self._thread: threading.Thread | None = None
        self._closed = False
        core.completions = weakref.ref(self)

    # -- watchers

    def watch_by_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._last_loop() is loop:
            return
        self.sweep()
        if loop not in self._loops:
            self._add_loop(loop)
        self._last_loop = weakref.ref(loop)

    def _add_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        out = c_int()
        self._core.check(self._core.lib.rb_client_fd(self._core.handle, addressof(out)))
        fd = os.dup(out.value)
        closing = weakref.finalize(loop, os.close, fd)
        closing.atexit = False
        ended: list[int] = []  # collected by this loop, not delivered yet
        loop.add_reader(fd, _drain_weakly, weakref.ref(self), weakref.ref(loop), ended)
        self._loops[loop] = fd, closing  # last: if a handler raises before, the loop is not watched

    def _watched(self) -> list[tuple[asyncio.AbstractEventLoop, int, weakref.finalize]]:
        """A copy of the loops: other threads may add theirs meanwhile."""
        known = [(loop, self._loops.get(loop)) for loop in (ref() for ref in self._loops.keyrefs()) if loop is not None]
        return [(loop, *entry) for loop, entry in known if entry is not None]

    def watch_by_thread(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                # The first call makes the library notify about ended requests.
                self._core.check(_collect(self._core.handle, 0, self._threads))
                thread = threading.Thread(target=_watch, args=(weakref.ref(self), self._core.handle), name="ringbatch", daemon=True)
                thread.start()  # a signal handler may raise in there
                self._thread = thread

    def drain_if_ours(self) -> None:
        """Collects ended requests if this is the watching thread."""
        if threading.current_thread() is self._thread:
            _collect(self._core.handle, 0, self._threads)
            self.deliver()

    # -- sending

    def commit_soon(self, loop: asyncio.AbstractEventLoop, request: int, timeout_ns: int) -> None:
        """Commits at the end of this turn of the loop, together with its other requests; sooner if there are many."""
        held = self._held.get((loop, timeout_ns))
        if held is None:
            loop.call_soon(self._commit, loop, timeout_ns)  # first: held requests are committed even if a handler raises
            held = self._held[(loop, timeout_ns)] = []
        held.append(request)
        if len(held) == _HOLD:
            self._commit(loop, timeout_ns)

    def _commit(self, loop: asyncio.AbstractEventLoop, timeout_ns: int) -> None:
        requests: list[int] = []
        try:
            requests = self._held.get((loop, timeout_ns), requests)
            self._held.pop((loop, timeout_ns), None)
            if requests:
                self._core.commit_all([r for r in requests if r in self.waiters], timeout_ns, c.NOTIFY)
        except errors.Error as e:
            for request in requests:
                waiter = self.waiters.pop(request, None)
                if waiter is not None:
                    self._core.release_one(request)
                    _resolve(waiter[0], None, e)
        except BaseException:  # of a signal handler: commit the rest
            requests = self._held.pop((loop, timeout_ns), requests)
            for request in [r for r in requests if r in self.waiters]:
                with contextlib.suppress(errors.Error):  # committed before
                    self._core.commit_all([request], timeout_ns, c.NOTIFY)
            raise

    # -- delivery

    def abandon(self, future: Any, sent: int | None = None) -> None:
        """Cancels the request of a caller that stopped waiting. sent: its number, 0 if there is none, None if a handler raised
        before the number was known."""
        if sent is None:
            sent = next((request for request, waiter in self.waiters.copy().items() if waiter[0] is future), 0)
        if sent in self.waiters:
            self._core.release_one(sent)
            self.waiters.pop(sent, None)
            self.room()

    def sweep(self) -> None:
        """Cancels the requests of closed loops, which collect nothing."""
        over = [(loop, closing) for loop, _, closing in self._watched() if loop.is_closed()]
        if not over:
            return
        for key in [key for key in self._held.copy() if key[0].is_closed()]:
            self._held.pop(key, None)
        for request, (_, its_loop, *_) in self.waiters.copy().items():
            if its_loop is not None and its_loop.is_closed():
                self._core.release_one(request)
                self.waiters.pop(request, None)
        for loop, closing in over:
            closing()
            self._loops.pop(loop, None)
        self.room()

    def drain(self, loop: asyncio.AbstractEventLoop, ended: list[int]) -> None:
        """Delivers all ended requests, in the loop's thread."""
        # If a signal handler raises, undelivered requests stay listed for the next time.
        try:
            if self._closed:
                return
            self._core.drain(ended, self.waiters, loop, self._deliver)
        except BaseException:
            loop.call_soon(_drain_weakly, weakref.ref(self), weakref.ref(loop), ended)
            raise
        if self._room:
            self.room()

    def deliver(self) -> None:
        """Delivers in the watching thread. Callbacks of futures run here, and may submit and deliver in turn."""
        while self._threads:
            try:
                request = self._threads.pop()
            except IndexError:  # a second watching thread was faster; a handler raised while the first one started
                break
            waiter = self.waiters.pop(request, None)
            if waiter is not None:
                self._deliver(request, waiter, None)
        if self._room:
            self.room()

    def _deliver(self, request: int, waiter: Waiter, here: asyncio.AbstractEventLoop | None, error: BaseException | None = None) -> None:
        """Resolves a future. error: raised by reading the request."""
        future, loop, rows, how = waiter
        result: Any = None
        try:
            if error is None and how != LEAVE:
                answer = self._core.collect(request, rows)
                result = answer if how == WITH_VERSION else answer[0]
                if loop is None:
                    future.version = answer[1]
        except Exception as e:
            error = e
        if error is not None:
            self._core.release_one(request)  # a signal handler may have raised before the release
        if loop is None or loop is here:
            _resolve(future, result, error)
        else:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(_resolve, future, result, error)

    # -- room in the window

    async def wait_for_room(self, loop: asyncio.AbstractEventLoop) -> None:
        future = loop.create_future()
        self._room[future] = loop
        timer = loop.call_later(_ROOM_RETRY_S, _resolve, future, None, None)
        try:
            await future
        finally:
            timer.cancel()
            self._room.pop(future, None)

    def room(self) -> None:
        """Slots have returned: wakes all waiters for slots."""
        for future in list(self._room):
            loop = self._room.pop(future, None)
            if loop is not None:  # otherwise another thread woke it
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(_resolve, future, None, None)

    # -- the end

    def close(self) -> None:
        """Stops delivery, before the connection is closed."""
        with self._lock:
            self._closed = True
        for loop, fd, closing in self._watched():
            if loop is _running_loop():
                _unwatch(loop, fd, closing)
            else:
                with contextlib.suppress(RuntimeError):  # the loop was closed
                    loop.call_soon_threadsafe(_unwatch, loop, fd, closing)

    def end(self) -> None:
        """Ends the requests in flight, after the connection was closed."""
        # At the interpreter's end daemon threads stand still; joining one would never return (Python 3.13).
        if self._thread is not None and self._thread is not threading.current_thread() and not sys.is_finalizing():
            self._thread.join()
        error = errors.Closed("the client was closed")
        while self.waiters:
            _, (future, its_loop, *_) = self.waiters.popitem()
            if its_loop is None:
                _resolve(future, None, error)
            else:
                with contextlib.suppress(RuntimeError):
                    its_loop.call_soon_threadsafe(_resolve, future, None, error)
        self.room()


def _collect(handle: int, timeout_ns: int, ended: list[int]) -> int:
    """Waits for ended requests and appends them; returns the library's status."""
    ids, count = (c_uint64 * _REAP)(), c_uint32()
    status = load().rb_reap_wait(handle, timeout_ns, addressof(ids), _REAP, addressof(count))
    ended += ids[: count.value]
    return status


def _watch(completions: weakref.ref, handle: int) -> None:
    """The thread that serves submit. It does not keep a forgotten client alive or open."""
    ended: list[int] = []
    wait_ns = 0  # at first: requests may be collected already
    while True:
        status = _collect(handle, wait_ns, ended)
        alive = completions()
        if alive is None or status:
            return  # forgotten, or closed
        wait_ns = _WATCH_NS
        alive._threads += ended
        ended.clear()
        while alive._threads:
            try:
                alive.deliver()
            except BaseException:  # a callback may raise SystemExit; the other futures still get their results
                log.exception("a callback of a future raised")
        del alive


def _resolve(future: Any, result: Any, error: BaseException | None) -> None:
    """Sets the result, unless the future was canceled."""
    try:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
    except concurrent.futures.InvalidStateError:
        pass
    except Exception as e:
        import asyncio

        if not isinstance(e, asyncio.InvalidStateError):
            raise


def _drain_weakly(completions: weakref.ref, loop: weakref.ref, ended: list[int]) -> None:
    """The loop's callback. It does not keep a forgotten client or the loop alive."""
    alive, its = completions(), loop()
    if alive is not None and its is not None:
        alive.drain(its, ended)


def _unwatch(loop: asyncio.AbstractEventLoop, fd: int, closing: weakref.finalize) -> None:
    loop.remove_reader(fd)
    closing()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    if "asyncio" not in sys.modules:
        return None
    import asyncio

    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
