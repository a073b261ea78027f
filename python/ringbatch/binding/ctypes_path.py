# SPDX-License-Identifier: Apache-2.0
"""The ctypes path of a request: the classes of ``quick/*.c`` in Python, if the extension was not built.

A signal handler may raise between any two steps here. So the library writes the
number of a claimed request into a struct that an object and :attr:`Client.owed`
know already. The object's destructor releases it, or :meth:`Client.sweep` does.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from ctypes import addressof, c_uint32, c_uint64, c_void_p
from typing import Any, ClassVar

import numpy as np

from .. import errors
from . import structs as c
from .library import FOREVER_NS, SLICE_NS, Duration, Process, load, nanoseconds
from .views import committed, end_view, parents, released

_FULL = errors.Full.status
_TIMEOUT = errors.Timeout.status


class Scratch:
    """Room for the arguments of a call."""

    __slots__ = ("call", "call_at", "inputs", "outputs")

    def __init__(self, handle: int, inputs: int, outputs: int) -> None:
        self.inputs = (c_void_p * inputs)()
        self.outputs = (c_void_p * outputs)()
        self.call = c.Inference(handle, addressof(self.inputs), addressof(self.outputs), 0, SLICE_NS)
        self.call_at = addressof(self.call)


class _Reaped(threading.local):
    """The numbers of ended requests, as the library writes them.

    One for each thread, since several event loops collect at once. The numbers
    stay until they are appended: a handler may raise before.
    """

    def __init__(self) -> None:
        self.ids, self.count = (c_uint64 * 64)(), c_uint32()


class _Owner:
    """Lives as long as a call; see Client.owed."""

    __slots__ = ("__weakref__",)


class Client:
    """A connection: its handle, and whole requests."""

    handle = 0
    closed = False
    _pool: list[Scratch]
    _opened: ClassVar[dict[int, tuple[weakref.ref, c_uint64]]] = {}  # like owed, for connections

    def __init__(self) -> None:
        self._lib = load()
        self._out = c_uint64()
        #: Claimed requests, by the address of the struct with their number. See sweep.
        self.owed: dict[int, tuple[weakref.ref, Any]] = {}
        self._on_device = False
        self._reaped = _Reaped()

    def dial(self, model: bytes, socket: bytes | None, name: bytes | None, window: int, timeout_ns: int) -> int:
        for at, (owner, out) in list(self._opened.items()):
            if owner() is None:
                self._lib.rb_close(out.value)
                self._opened.pop(at, None)
        self._opened[addressof(self._out)] = weakref.ref(self), self._out
        o = c.ConnectOptions(ctypes.sizeof(c.ConnectOptions), window, socket, name, timeout_ns, device=1)
        status = self._lib.rb_connect(model, addressof(o), addressof(self._out))
        self.handle = self._out.value
        return status

    def learn(
        self, names: tuple[dict[str, int], dict[str, int]], fixed: tuple[bool, ...], plain: bool,
        inputs: tuple[tuple[Any, tuple[int, ...]], ...], outputs: tuple[tuple[tuple[int, ...], Any], ...], on_device: bool,
    ) -> None:  # fmt: skip
        """on_device: a tensor is on the device, and a stream orders commits and releases."""
        self.names, self.fixed, self.plain = names, fixed, plain
        self._on_device = on_device
        self.single = False  # no quick path for one item

    def error(self, status: int) -> errors.Error:
        raise NotImplementedError

    def stream(self, given: Any = None) -> int:
        raise NotImplementedError

    def _scratch(self) -> Scratch:
        raise NotImplementedError

    def undo(self, sequence: int, request: int | None) -> None:
        raise NotImplementedError

    def wait(self, request: int, timeout_ns: int) -> None:
        raise NotImplementedError

    def commit_one(self, request: int, timeout_ns: int, flags: int, stream: Any = None) -> int:
        """Commits a request; returns the status."""
        if not self._on_device:
            return self._lib.rb_commit(self.handle, request, timeout_ns, flags)
        at, number = self.stream(stream), c_uint64(request)  # the name keeps the number alive
        return self._lib.rb_commit_on_stream(self.handle, addressof(number), 1, at, timeout_ns, flags)

    def release_one(self, request: int, stream: Any = None) -> None:
        """Returns the request's slots; on the device after the stream's queued work."""
        try:
            at = self.stream(stream) if self._on_device else None
        except Exception:  # closed, or at the interpreter's end
            at = None
        if at is None:
            self._lib.rb_release(self.handle, request)
        else:
            self._lib.rb_release_on_stream(self.handle, request, at)

    def close(self) -> None:
        self.closed = True  # first: the waits of other threads end now, and look here for the reason
        if addressof(self._out) in self._opened:
            self._lib.rb_close(self._out.value)  # closing twice is harmless
            self._opened.pop(addressof(self._out), None)

    def __del__(self) -> None:
        if hasattr(self, "_out"):
            self.close()

    def sweep(self) -> None:
        """Releases requests whose owner is gone: a handler raised while it released them."""
        for at, owes in list(self.owed.items()):
            owner, r = owes
            # The same entry: another thread may have reused the struct for its own call.
            if owner() is None and self.owed.get(at) is owes:
                self.release_one(r.id if isinstance(r, c.Request) else r.request)
                self.owed.pop(at, None)

    def submit_into(
        self, waiters: dict[int, Any], waiter: Any, arrays: tuple[np.ndarray, ...], rows: int, timeout_ns: int, hold: bool
    ) -> int:
        """Sends a request; lists waiters[request] = waiter before it is committed. hold: do not commit yet.
        Returns the request's number; 0 if there is no room."""
        s = self._scratch()
        for k, a in enumerate(arrays):
            s.inputs[k] = a.__array_interface__["data"][0]
        call = s.call
        call.rows, call.timeout, call.flags, call.request = rows, 0, c.HOLD, 0
        owner = _Owner()
        self.owed[addressof(call)] = weakref.ref(owner), call
        try:
            status = self._lib.rb_submit_prepared(s.call_at)
            request = call.request  # before another thread takes the struct from the pool
            if not status:
                self._list_and_commit(request, waiters, waiter, timeout_ns, hold)
        except BaseException:  # of a signal handler, whose traceback keeps the owner alive
            self.release_one(call.request)
            raise
        self.owed.pop(addressof(call), None)
        if status and status not in (_FULL, _TIMEOUT):
            raise self.error(status)
        self._pool.append(s)
        if status:  # no slot yet, or not attached yet
            self.sweep()
            return 0
        return request

    def _list_and_commit(self, request: int, waiters: dict[int, Any], waiter: Any, timeout_ns: int, hold: bool) -> None:
        try:
            waiters[request] = waiter
            status = 0 if hold else self.commit_one(request, timeout_ns, c.NOTIFY)
            if status:
                raise self.error(status)
        except BaseException:  # perhaps a signal's handler raised it
            waiters.pop(request, None)
            self.release_one(request)
            raise

    def hold_one(self, x: Any, waiters: dict[int, Any], waiter: Any) -> int | None:
        """None: only the extension has a quick path for one item."""
        return None

    def collect_one(self, request: int) -> np.ndarray:
        raise NotImplementedError

    def commit_held(self, requests: list[int], waiters: dict[int, Any], timeout_ns: int) -> None:
        """Commits the requests that are still in waiters; the others were canceled."""
        listed = [r for r in requests if r in waiters]
        ids = (c_uint64 * len(listed))(*listed)
        status = self._lib.rb_commit_all(self.handle, addressof(ids), len(listed), timeout_ns, c.NOTIFY) if listed else 0
        if status:
            raise self.error(status)

    def drain(self, ended: list[int], waiters: dict[int, Any], loop: Any, deliver: Callable[[int, Any, Any, Any], None]) -> None:
        """Calls deliver for each ended request. If that raises, the request stays in ended and in waiters."""
        if not self._reap_into(ended):
            return
        while ended:
            request = ended[-1]
            waiter = waiters.get(request)
            if waiter is not None:
                deliver(request, waiter, loop, None)
                waiters.pop(request, None)
            ended.pop()

    def _reap_into(self, ended: list[int]) -> bool:
        """Appends the numbers of ended requests; False once the client is closed."""
        ids, count = self._reaped.ids, self._reaped.count
        while True:
            if not count.value:  # otherwise a handler raised before the last ones were appended
                status = self._lib.rb_reap(self.handle, addressof(ids), len(ids), addressof(count))
                if status == errors.Closed.status:
                    return False
                if status:
                    raise self.error(status)
            n = count.value
            ended += ids[:n]
            count.value = 0
            if n < len(ids):
                return True


class Caller:
    """A model, which is called."""

    _core: Any
    _unwarned = False

    def _call(self, *inputs: Any, **named: Any) -> Any:
        raise NotImplementedError

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self._call(*inputs, **named)


class Stepper(Caller):
    """A sequence, which is stepped."""

    _id = 0
    _rows = 1
    _busy = False  # a coroutine waits for a step

    def step(self, *inputs: Any, **named: Any) -> Any:
        return self._call(*inputs, **named)


class ByName(Mapping[str, Any]):
    """Arrays by name. A look whether a name exists makes no array: a worker's output would count as touched."""

    __slots__ = ()

    def __contains__(self, name: object) -> bool:
        return any(name == own for own in self)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401


class Columns(ByName):
    """The tensors of one side by name; arrays are made when asked for.

    It refers to its request or batch, but not the other way round. So a forgotten
    request goes at once, without the garbage collector.
    """

    __slots__ = ("_made", "_make", "_names")

    def __init__(self, names: Mapping[str, int], make: Callable[[int], np.ndarray], made: dict[str, np.ndarray]) -> None:
        self._names, self._make, self._made = names, make, made

    def __getitem__(self, name: str) -> np.ndarray:
        made = self._made.get(name)
        if made is None:
            k = self._names.get(name)
            if k is None:
                raise errors.Invalid(f"no tensor {name!r}; there are {', '.join(self._names)}")
            made = self._made[name] = self._make(k)
        return made

    def of(self, made: dict[str, np.ndarray]) -> bool:
        """Whether made holds the arrays of these columns."""
        return self._made is made

    def __setitem__(self, name: str, value: Any) -> None:
        raise TypeError(f"arrays cannot be replaced: write into them, [{name!r}][...] = value")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Held:
    """A claimed request and the arrays over it."""

    __slots__ = ("_committed", "_core", "_generation", "_made", "_ok", "_r", "_released", "_sequence", "_single", "rows")

    def __init__(
        self, core: Client, rows: int = 1, dims: tuple[int, ...] = (), timeout_ns: int = 0, single: bool = True,
        sequence: int = 0,
    ) -> None:
        self._released = self._committed = self._ok = False
        self._core, self._single, self.rows, self._sequence = core, single, rows, sequence
        self._generation = Process.generation
        self._made: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        self._r = r = c.Request()
        core.owed[addressof(r)] = weakref.ref(self), r
        try:
            self._claim(dims, timeout_ns, sequence)
        except BaseException:  # of a signal handler, whose traceback keeps this object alive
            self.release()
            raise

    def _claim(self, dims: tuple[int, ...], timeout_ns: int, sequence: int) -> None:
        core = self._core
        claim = core._lib.rb_sequence_request if sequence else core._lib.rb_claim
        sizes = (c_uint32 * len(dims))(*dims)
        left = timeout_ns or FOREVER_NS
        deadline = time.monotonic_ns() + left
        while True:
            status = claim(core.handle, sequence or self.rows, addressof(sizes), len(dims), min(left, SLICE_NS), addressof(self._r))
            if status == 0:
                return
            error = core.error(status)
            if status not in (_FULL, _TIMEOUT):
                raise error
            core.sweep()  # also when the time is over: the caller may try again
            left = deadline - time.monotonic_ns()
            if left <= 0:
                raise error

    @property
    def _id(self) -> int:
        return self._r.id

    @property
    def _slot(self) -> int:
        return self._r.slot

    @property
    def _attachment(self) -> int:
        return self._r.attachment

    def _fresh(self, k: int) -> Any:
        raise NotImplementedError

    def _choose(self, priority: int | None, cost: int | None) -> None:
        raise NotImplementedError

    @property
    def inputs(self) -> Mapping[str, np.ndarray]:
        """The arrays to write, by name, until the request is committed."""
        return Columns(self._core.names[0], self._input, self._made[0])

    @property
    def outputs(self) -> Mapping[str, np.ndarray]:
        """The arrays to read, by name, once the request has ended; a list of arrays if rows differ in size."""
        return Columns(self._core.names[1], self._output, self._made[1])

    def _input(self, k: int) -> Any:
        self._check()
        if self._committed:
            raise committed()
        return self._fresh(k)

    def _output(self, k: int) -> Any:
        self._check()
        if not self._ok:
            status = self._core._lib.rb_poll(self._core.handle, self._id)
            if status:
                raise self._core.error(status)
            self._ok = True
        return self._fresh(k)

    def _check(self) -> None:
        if self._generation != Process.generation:
            raise parents()
        if self._released:
            raise released()

    def commit_in(self, timeout_ns: int, flags: int, stream: Any = None) -> None:
        self._check()
        status = self._core.commit_one(self._id, timeout_ns, flags, stream)
        if status:
            raise self._core.error(status)
        self.was_committed()

    def was_committed(self) -> None:
        """Ends the input arrays: they belong to the worker now."""
        self._committed = True
        self._end(0, committed)

    def _end(self, side: int, error: Callable[[], errors.Error]) -> None:
        made = self._made[side]
        for view in made.values():
            end_view(view, error)
        made.clear()

    def wait_in(self, timeout_ns: int) -> None:
        self._check()
        try:
            self._core.wait(self._id, timeout_ns)
        except BaseException:  # perhaps of a signal handler, after the wait
            self._core.undo(self._sequence, self._id)
            raise
        self._ok = True

    def run(
        self, timeout: Duration | None = None, *, priority: int | None = None, cost: int | None = None, stream: Any = None
    ) -> Any:
        """Commits and waits. stream: for a model on the device, the request follows its work; default torch's current one."""
        if priority is not None or cost is not None:
            self._check()
            self._choose(priority, cost)
        self.commit_in(nanoseconds(timeout), 0, stream)
        self.wait_in(0)
        return self

    def release(self, stream: Any = None) -> None:
        """Returns the slots and ends the views. stream: for a model on the device, the stream that still uses them."""
        if not self._released:
            try:
                self._released = True
                self._end_views()
            finally:  # a signal handler may raise at the start of any Python function
                core = self._core
                if not core._on_device:
                    core._lib.rb_release(core.handle, self._r.id)
                else:
                    core.release_one(self._r.id, stream)
                core.owed.pop(addressof(self._r), None)

    def _end_views(self) -> None:
        for side in (0, 1):
            self._end(side, released)

    def detach_into(self, waiters: dict[int, Any], waiter: Any, timeout_ns: int) -> int:
        """Ends the arrays, lists the waiter and commits, as submit_into does."""
        self._check()
        self._end_views()
        self._core._list_and_commit(self._r.id, waiters, waiter, timeout_ns, False)
        self._released = True  # last: release must work if a signal handler raises before
        self._core.owed.pop(addressof(self._r), None)
        return self._r.id

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if hasattr(self, "_r"):
            self.release()


# -- a worker's batches


def next_batch(worker: int, timeout_ns: int) -> tuple[int, int, int, int, int] | int | None:
    """(address, requests, rows, runs, pad_to), or None if no batch came, or the status of an error."""
    out = ctypes.c_size_t()
    status = load().rb_worker_next(worker, timeout_ns, addressof(out))
    if status:
        return None if status == _TIMEOUT else status
    b = c.Batch.from_address(out.value)
    return out.value, b.requests, b.rows, b.runs, b.pad_to


def complete_batch(at: int) -> int:
    return load().rb_batch_complete(at)
