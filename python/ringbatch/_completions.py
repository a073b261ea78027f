"""Requests in flight: futures for threads and for asyncio.

The C library makes one descriptor readable when requests have ended. Its
watcher (an event loop, or the thread that serves ``submit``) reaps all that
have ended and delivers each to the future that waits for it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import select
import sys
import threading
import weakref
from ctypes import addressof, c_int, c_uint32, c_uint64
from typing import Any, Callable, Optional

from . import errors
from ._core import Core
from ._library import Process

_REAP = 256  # at most so many in one go
_HOLD = 16  # at most so many; then the worker has something to do while the loop sends the rest
_ROOM_RETRY_S = 0.005  # slots may come back without anybody telling


# A future, the loop it belongs to (None: it is not asyncio's), and the function
# that makes its result of an ended request, which it also releases.
Waiter = tuple[Any, Optional[asyncio.AbstractEventLoop], Callable[[int], Any]]


class Completions:
    def __init__(self, core: Core) -> None:
        self._core = core
        self.generation = Process.generation
        # A signal's handler, or the garbage collector, may close the client in the midst of what holds it.
        self._lock = threading.RLock()
        self._waiters: dict[int, Waiter] = {}
        self._early: set[int] = set()  # ended before their waiter was listed
        self._undelivered: list[int] = []  # an exception from a signal's handler kept somebody from it
        # By loop: its own duplicate of the descriptor, closed by a finalizer.
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[int, weakref.finalize]] = weakref.WeakKeyDictionary()
        self._held: dict[tuple[asyncio.AbstractEventLoop, int], list[int]] = {}
        self._room: list[tuple[asyncio.AbstractEventLoop, asyncio.Future]] = []
        self._last_loop: Callable[[], Any] = lambda: None
        self._thread: threading.Thread | None = None
        # Not one for each thread: a future's callback, or a signal's handler, may drain in the midst of it.
        self._buffers: list[tuple[Any, c_uint32]] = []
        self._closed = False
        fd = c_int()
        core.check(core.lib.rb_client_fd(core.handle, addressof(fd)))
        self._fd = fd.value

    # -- who watches

    def watch_by_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._last_loop() is loop:
            return
        self._last_loop = weakref.ref(loop)
        if loop in self._loops:
            return
        fd = os.dup(self._fd)
        closing = weakref.finalize(loop, os.close, fd)
        closing.atexit = False
        self._loops[loop] = fd, closing
        loop.add_reader(fd, _drain_weakly, weakref.ref(self), weakref.ref(loop))

    def watch_by_thread(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, args=(os.dup(self._fd),), name="ringbatch", daemon=True)
                thread.start()  # a signal's handler may raise in there
                self._thread = thread

    def _run(self, fd: int) -> None:
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            while not self._closed:
                poll.poll()
                self._drain(None)
        finally:
            os.close(fd)

    def drain_if_ours(self) -> None:
        """Collects what has ended if this is the thread that should."""
        if threading.current_thread() is self._thread:
            self._drain(None)

    # -- sending

    def commit_soon(self, loop: asyncio.AbstractEventLoop, request: int, waiter: Waiter, timeout_ns: int) -> None:
        """Commits at the end of this turn of the loop, or sooner, together with what else it sends."""
        self._waiters[request] = waiter
        held = self._held.get((loop, timeout_ns))
        if held is None:
            held = self._held[(loop, timeout_ns)] = []
            loop.call_soon(self._commit, loop, timeout_ns)
        held.append(request)
        if len(held) == _HOLD:
            self._commit(loop, timeout_ns)

    def _commit(self, loop: asyncio.AbstractEventLoop, timeout_ns: int) -> None:
        requests = [r for r in self._held.pop((loop, timeout_ns), ()) if r in self._waiters]  # others were canceled
        try:
            if requests:
                self._core.commit_all(requests, timeout_ns)
        except errors.Error as e:
            for request in requests:
                waiter = self._waiters.pop(request, None)
                if waiter is not None:
                    self._core.release(request)
                    _resolve(waiter[0], None, e)

    # -- delivery

    def add(self, request: int, waiter: Waiter) -> None:
        with self._lock:
            if request not in self._early:
                self._waiters[request] = waiter
                return
            self._early.discard(request)
        self._deliver(request, waiter, None)

    def forget(self, request: int) -> None:
        """It was sent, but an exception kept its sender from waiting for it."""
        self._waiters.pop(request, None)
        self._core.release(request)
        self._early.discard(request)

    def abandon(self, request: int) -> None:
        """Nobody waits for this one any more: cancel it."""
        if self._waiters.pop(request, None) is not None:
            self._core.release(request)
            self.room()

    def _drain(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Delivers everything that has ended."""
        try:
            ids, count = self._buffers.pop()
        except IndexError:
            ids, count = (c_uint64 * _REAP)(), c_uint32()
        while not self._closed:
            count.value = 0
            ended: list[int] | None = None
            delivered = 0
            try:
                if self._core.lib.rb_reap(self._core.handle, addressof(ids), _REAP, addressof(count)):
                    return  # closed
                ended = ids[: count.value]
                if self._undelivered:
                    with self._lock:
                        ended += self._undelivered
                        self._undelivered = []
                for request in ended:
                    waiter = self._waiters.get(request) or self._too_early(request)
                    if waiter is not None:
                        self._deliver(request, waiter, loop)
                        self._waiters.pop(request, None)
                    delivered += 1
            except BaseException:  # a signal's handler raised it; the library tells each request once
                self._undelivered += ids[: count.value] if ended is None else ended[delivered:]
                with contextlib.suppress(OSError):
                    os.write(self._fd, (1).to_bytes(8, "little"))  # the watcher goes on with them
                raise
            if count.value < _REAP:
                break
        self._buffers.append((ids, count))
        if self._room:
            self.room()

    def _too_early(self, request: int) -> Waiter | None:
        with self._lock:
            waiter = self._waiters.get(request)
            if waiter is None:
                self._early.add(request)
            return waiter

    def _deliver(self, request: int, waiter: Waiter, here: asyncio.AbstractEventLoop | None) -> None:
        future, loop, read = waiter
        result: Any = None
        error: BaseException | None = None
        try:
            result = read(request)
        except Exception as e:
            error = e
            self._core.release(request)  # a signal's handler may have raised it, before it was
        if loop is None or loop is here:
            _resolve(future, result, error)
        else:
            with contextlib.suppress(RuntimeError):  # that loop was closed
                loop.call_soon_threadsafe(_resolve, future, result, error)

    # -- room in the window

    async def wait_for_room(self, loop: asyncio.AbstractEventLoop) -> None:
        future = loop.create_future()
        self._room.append((loop, future))
        timer = loop.call_later(_ROOM_RETRY_S, _resolve, future, None, None)
        try:
            await future
        finally:
            timer.cancel()
            with contextlib.suppress(ValueError):
                self._room.remove((loop, future))

    def room(self) -> None:
        """Slots came back: let those who wait for some try again."""
        while self._room:
            try:
                loop, future = self._room.pop(0)
            except IndexError:
                return
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_resolve, future, None, None)

    # -- the end

    def close(self) -> None:
        with self._lock:
            self._closed = True
            waiters, self._waiters = self._waiters, {}
        for loop, (fd, closing) in list(self._loops.items()):
            if loop is _running_loop():
                _unwatch(loop, fd, closing)
            else:
                with contextlib.suppress(RuntimeError):  # closed already
                    loop.call_soon_threadsafe(_unwatch, loop, fd, closing)
        if self._thread is not None:
            with contextlib.suppress(OSError):
                os.write(self._fd, (1).to_bytes(8, "little"))
            # While the interpreter ends, daemon threads stand still: from
            # Python 3.13 on joining one would be for ever.
            if self._thread is not threading.current_thread() and not sys.is_finalizing():
                self._thread.join()
        error = errors.Closed("the client was closed")
        for future, its_loop, _ in waiters.values():
            if its_loop is None:
                _resolve(future, None, error)
            else:
                with contextlib.suppress(RuntimeError):
                    its_loop.call_soon_threadsafe(_resolve, future, None, error)
        self.room()


def _resolve(future: Any, result: Any, error: BaseException | None) -> None:
    """Unless somebody canceled it meanwhile."""
    try:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
    except (asyncio.InvalidStateError, concurrent.futures.InvalidStateError):
        pass


def _drain_weakly(completions: weakref.ref, loop: weakref.ref) -> None:
    """The loop's callback: it keeps neither a forgotten client nor the loop alive."""
    alive = completions()
    if alive is not None:
        alive._drain(loop())


def _unwatch(loop: asyncio.AbstractEventLoop, fd: int, closing: weakref.finalize) -> None:
    loop.remove_reader(fd)
    closing()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
