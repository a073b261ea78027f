# SPDX-License-Identifier: Apache-2.0
"""Requests in flight: futures for threads and for asyncio.

What is sent is listed here with its future first, and committed then. Who
watches (an event loop by the descriptor of the C library, or the thread that
serves ``submit``) collects all that have ended and delivers each to its future.
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

if TYPE_CHECKING:  # it takes long to load, and most programs do without
    import asyncio

    # A future, the loop it belongs to (None: it is not asyncio's), and the function
    # that makes its result of an ended request, which it also releases (None: collect_one).
    Waiter = tuple[Any, Optional[asyncio.AbstractEventLoop], Optional[Callable[[int], Any]]]

log = logging.getLogger("ringbatch")

_REAP = 256  # at most so many in one go
_HOLD = 16  # at most so many; then the worker has something to do while the loop sends the rest
_ROOM_RETRY_S = 0.005  # slots may come back without anybody telling
_WATCH_NS = 1_000_000_000  # so often the thread looks whether its client was forgotten


class Completions:
    def __init__(self, core: Core) -> None:
        self._core = core
        self.generation = Process.generation
        # A signal's handler, or the garbage collector, may close the client in the midst of what holds it.
        self._lock = threading.RLock()
        self.waiters: dict[int, Waiter] = {}
        self._threads: list[int] = []  # collected by the thread, and not delivered yet
        # By loop: its own duplicate of the descriptor, closed by a finalizer.
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[int, weakref.finalize]] = weakref.WeakKeyDictionary()
        self._held: dict[tuple[asyncio.AbstractEventLoop, int], list[int]] = {}
        self._room: dict[asyncio.Future, asyncio.AbstractEventLoop] = {}  # who waits for slots, the oldest first
        self._last_loop: Callable[[], Any] = lambda: None
        self._thread: threading.Thread | None = None
        self._closed = False
        core.completions = weakref.ref(self)

    # -- who watches

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
        ended: list[int] = []  # collected by this loop, and not delivered yet
        loop.add_reader(fd, _drain_weakly, weakref.ref(self), weakref.ref(loop), ended)
        self._loops[loop] = fd, closing  # last: a handler may raise before, and then it is not watched

    def _watched(self) -> list[tuple[asyncio.AbstractEventLoop, int, weakref.finalize]]:
        """The loops; other threads may add theirs meanwhile, which iterating over the dictionary itself does not survive."""
        known = [(loop, self._loops.get(loop)) for loop in (ref() for ref in self._loops.keyrefs()) if loop is not None]
        return [(loop, *entry) for loop, entry in known if entry is not None]

    def watch_by_thread(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                # From here on requests may be committed that are told.
                self._core.check(_collect(self._core.handle, 0, self._threads))
                thread = threading.Thread(target=_watch, args=(weakref.ref(self), self._core.handle), name="ringbatch", daemon=True)
                thread.start()  # a signal's handler may raise in there
                self._thread = thread

    def drain_if_ours(self) -> None:
        """Collects what has ended if this is the thread that should."""
        if threading.current_thread() is self._thread:
            _collect(self._core.handle, 0, self._threads)
            self.deliver()

    # -- sending

    def commit_soon(self, loop: asyncio.AbstractEventLoop, request: int, timeout_ns: int) -> None:
        """Commits at the end of this turn of the loop, or sooner, together with what else it sends."""
        held = self._held.get((loop, timeout_ns))
        if held is None:
            loop.call_soon(self._commit, loop, timeout_ns)  # first: what is held is committed, whatever strikes here
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
                self._core.commit_held(requests, self.waiters, timeout_ns)
        except errors.Error as e:
            for request in requests:
                waiter = self.waiters.pop(request, None)
                if waiter is not None:
                    self._core.release(request)
                    _resolve(waiter[0], None, e)
        except BaseException:  # a signal's handler raised it; what is committed already is left alone
            requests = self._held.pop((loop, timeout_ns), requests)
            for request in [r for r in requests if r in self.waiters]:
                self._core.lib.rb_commit(self._core.handle, request, timeout_ns, c.NOTIFY)
            raise

    # -- delivery

    def abandon(self, future: Any, sent: int | None = None) -> None:
        """The caller has stopped waiting: cancels its request. sent: the request's number, 0 if there is none, None if a handler
        raised before the number was known."""
        if sent is None:
            sent = next((request for request, waiter in self.waiters.copy().items() if waiter[0] is future), 0)
        if sent in self.waiters:
            self._core.release(sent)
            self.waiters.pop(sent, None)
            self.room()

    def sweep(self) -> None:
        """Cancels the requests of loops that were closed: their tasks cannot go on, and the loops collect nothing."""
        over = [(loop, closing) for loop, _, closing in self._watched() if loop.is_closed()]
        if not over:
            return
        for key in [key for key in self._held.copy() if key[0].is_closed()]:
            self._held.pop(key, None)
        for request, (_, its_loop, _) in self.waiters.copy().items():
            if its_loop is not None and its_loop.is_closed():
                self._core.release(request)
                self.waiters.pop(request, None)
        for loop, closing in over:
            closing()
            self._loops.pop(loop, None)
        self.room()

    def drain(self, loop: asyncio.AbstractEventLoop, ended: list[int]) -> None:
        """The loop's: delivers everything that has ended."""
        # A signal's handler may raise anywhere: what was not delivered is still
        # listed then, and delivered next time.
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
        """The thread's: no handler runs in it, but callbacks of futures do, which may submit and deliver in turn."""
        while self._threads:
            try:
                request = self._threads.pop()
            except IndexError:  # a second thread's, where a handler raised when the first had just begun
                break
            waiter = self.waiters.pop(request, None)
            if waiter is not None:
                self._deliver(request, waiter, None)
        if self._room:
            self.room()

    def _deliver(self, request: int, waiter: Waiter, here: asyncio.AbstractEventLoop | None, error: BaseException | None = None) -> None:
        """error: what reading it has raised already."""
        future, loop, read = waiter
        result: Any = None
        try:
            if error is None:
                result = (read or self._core.collect_one)(request)
        except Exception as e:
            error = e
        if error is not None:
            self._core.release(request)  # a signal's handler may have raised it, before it was
        if loop is None or loop is here:
            _resolve(future, result, error)
        else:
            with contextlib.suppress(RuntimeError):  # that loop was closed
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
        """Slots came back: let those who wait for some try again."""
        for future in list(self._room):
            loop = self._room.pop(future, None)
            if loop is not None:  # otherwise another thread was quicker
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(_resolve, future, None, None)

    # -- the end

    def close(self) -> None:
        """Before the connection is closed: nothing is delivered any more."""
        with self._lock:
            self._closed = True
        for loop, fd, closing in self._watched():
            if loop is _running_loop():
                _unwatch(loop, fd, closing)
            else:
                with contextlib.suppress(RuntimeError):  # closed already
                    loop.call_soon_threadsafe(_unwatch, loop, fd, closing)

    def end(self) -> None:
        """After it was closed: what was in flight ends."""
        # While the interpreter ends, daemon threads stand still: from Python
        # 3.13 on joining one would be for ever.
        if self._thread is not None and self._thread is not threading.current_thread() and not sys.is_finalizing():
            self._thread.join()
        error = errors.Closed("the client was closed")
        while self.waiters:
            _, (future, its_loop, _) = self.waiters.popitem()
            if its_loop is None:
                _resolve(future, None, error)
            else:
                with contextlib.suppress(RuntimeError):
                    its_loop.call_soon_threadsafe(_resolve, future, None, error)
        self.room()


def _collect(handle: int, timeout_ns: int, ended: list[int]) -> int:
    """Appends what has ended, once there is something; the library's status."""
    ids, count = (c_uint64 * _REAP)(), c_uint32()
    status = load().rb_reap_wait(handle, timeout_ns, addressof(ids), _REAP, addressof(count))
    ended += ids[: count.value]
    return status


def _watch(completions: weakref.ref, handle: int) -> None:
    """The thread that serves submit. It keeps a client that was forgotten neither alive nor open."""
    ended: list[int] = []
    wait_ns = 0  # first what was collected before there was this thread
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
            except BaseException:  # a callback may raise SystemExit; the other futures have done nothing
                log.exception("a callback of a future raised")
        del alive


def _resolve(future: Any, result: Any, error: BaseException | None) -> None:
    """Unless somebody canceled it meanwhile."""
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
    """The loop's callback: it keeps neither a forgotten client nor the loop alive."""
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
