# SPDX-License-Identifier: Apache-2.0
"""The ctypes path of a request: the classes of ``quick/*.c`` in Python, if the extension was not built.

It is plain rather than quick: every call takes a :class:`Held`, writes its arrays, runs it and copies the outputs.
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
from ctypes import addressof, c_uint32, c_uint64
from typing import Any, ClassVar

import numpy as np

from .. import errors
from . import structs as c
from .library import FOREVER_NS, SLICE_NS, Duration, Process, load, nanoseconds
from .views import committed, end_view, parents, released

_TIMEOUT = errors.Timeout.status


class _Reaped(threading.local):
    """The numbers of ended requests, as the library writes them.

    One for each thread, since several event loops collect at once. The numbers
    stay until they are appended: a handler may raise before.
    """

    def __init__(self) -> None:
        self.ids, self.count = (c_uint64 * 64)(), c_uint32()


class Client:
    """A connection: its handle, its waits and its tensors."""

    handle = 0
    closed = False
    in_c = False  # only the extension makes whole requests
    _opened: ClassVar[dict[int, tuple[weakref.ref, c_uint64]]] = {}  # like owed, for connections

    def __init__(self) -> None:
        self._lib = load()
        self._out = c_uint64()
        #: Claimed requests, by the address of the struct with their number. See sweep.
        self.owed: dict[int, tuple[weakref.ref, c.Request]] = {}
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

    def learn(self, names: tuple[dict[str, int], dict[str, int]], tensors: tuple[tuple[Any, int, int, Any], ...], on_host: bool) -> None:
        """tensors: the arguments of np.empty, the bytes of a number, the variable dimensions as bits, and what makes texts of rows."""
        self.names, self._on_device = names, not on_host
        self.plain = not any(variable for _, _, variable, _ in tensors[: len(names[0])])

    def error(self, status: int) -> errors.Error:
        raise NotImplementedError

    def stream(self, given: Any = None) -> int:
        raise NotImplementedError

    def undo(self, sequence: int, request: int | None) -> None:
        raise NotImplementedError

    def in_slices(self, call: Callable[[int], int], timeout_ns: int) -> None:
        """Calls for at most 50 ms at a time, between which handlers of signals run and sweep makes room. Raises the last
        error once the time is over."""
        left = timeout_ns or FOREVER_NS
        deadline = time.monotonic_ns() + left
        while status := call(min(left, SLICE_NS)):
            try:
                raise self.error(status)  # which no variable names, or it would keep its frames until a garbage collection
            except (errors.Full, errors.Timeout):
                self.sweep()  # also when the time is over: the caller may try again
                left = deadline - time.monotonic_ns()
                if left <= 0:
                    raise

    def wait(self, request: int, timeout_ns: int) -> None:
        """Waits for the request's end; raises Timeout."""
        self.in_slices(lambda ns: self._lib.rb_wait(self.handle, request, ns), timeout_ns)

    def commit_all(self, requests: list[int], timeout_ns: int, flags: int, stream: Any = None) -> None:
        ids = (c_uint64 * len(requests))(*requests)
        if self._on_device:
            at = self.stream(stream)
            status = self._lib.rb_commit_on_stream(self.handle, addressof(ids), len(ids), at, timeout_ns, flags)
        else:
            status = self._lib.rb_commit_all(self.handle, addressof(ids), len(ids), timeout_ns, flags)
        if status:
            raise self.error(status)

    def place(self, request: int, k: int, row: int) -> Any:
        """The address of the rows of the k-th tensor, the bytes from row to row, and their shape; of one row if row is not -1.
        None if the rows differ in size."""
        v, output = c.View(), k - len(self.names[0])
        if output < 0:
            status = self._lib.rb_input(self.handle, request, k, addressof(v))
        elif row < 0:
            status = self._lib.rb_output(self.handle, request, output, addressof(v))
        else:
            status = self._lib.rb_output_row(self.handle, request, output, row, addressof(v))
        if status == errors.Shape.status:
            return None
        if status:
            raise self.error(status)
        return v.data, v.stride, tuple(v.shape[: v.rank])

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
                self.release_one(r.id)
                self.owed.pop(at, None)

    def most_rows(self) -> int:
        """The most rows of a request."""
        m = c.Model()
        status = self._lib.rb_client_model(self.handle, addressof(m))
        if status:
            raise self.error(status)
        return min(m.max_batch_size, m.window)

    def rows_of(self, inputs: tuple[Any, ...]) -> int:
        """0: only the extension takes arrays as they are, and has infer and send."""
        return 0

    def infer(self, *_: Any) -> Any:
        raise NotImplementedError

    send = collect = infer

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
    _sent = 0  # the last step's request, 0 if it was not sent
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

    __slots__ = ("_made", "_make", "_names", "_set")

    def __init__(
        self, names: Mapping[str, int], make: Callable[[int], np.ndarray], made: dict[str, np.ndarray],
        set_text: Callable[[int, Any], None] | None = None,
    ) -> None:
        self._names, self._make, self._made, self._set = names, make, made, set_text

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
        if self._set is None or name not in self._names:
            raise TypeError(f"arrays cannot be replaced: write into them, [{name!r}][...] = value")
        self._set(self._names[name], value)

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
        core, at = self._core, addressof(self._r)
        claim = core._lib.rb_sequence_request if sequence else core._lib.rb_claim
        sizes = (c_uint32 * len(dims))(*dims)
        core.in_slices(lambda ns: claim(core.handle, sequence or self.rows, addressof(sizes), len(dims), ns, at), timeout_ns)

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
        return Columns(self._core.names[0], self._input, self._made[0], self._set_input)

    @property
    def outputs(self) -> Mapping[str, np.ndarray]:
        """The arrays to read, by name, once the request has ended; a list of arrays if rows differ in size."""
        return Columns(self._core.names[1], self._output, self._made[1])

    def _input(self, k: int) -> Any:
        self._check()
        if self._committed:
            raise committed()
        return self._fresh(k)

    def _set_input(self, k: int, value: Any) -> None:
        self._check()
        if self._committed:
            raise committed()
        self._set_text(k, value)

    def _set_text(self, k: int, value: Any) -> None:
        raise NotImplementedError

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
        self._core.commit_all([self._id], timeout_ns, flags, stream)
        self.was_committed()

    def choose(self, priority: int | None, cost: int | None) -> None:
        core, lib = self._core, self._core._lib
        status = 0 if priority is None else lib.rb_set_priority(core.handle, self._id, priority)
        if not status and cost is not None:
            status = lib.rb_set_cost(core.handle, self._id, cost)
        if status:
            raise core.error(status)

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
        """Ends the arrays, sets waiters[request] = waiter and commits."""
        self._check()
        self._end_views()
        number = self._r.id
        try:
            waiters[number] = waiter
            self._core.commit_all([number], timeout_ns, c.NOTIFY)
        except BaseException:  # perhaps a signal's handler raised it
            waiters.pop(number, None)
            raise
        self._released = True  # last: release must work if a signal handler raises before
        self._core.owed.pop(addressof(self._r), None)
        return number

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if hasattr(self, "_r"):
            self.release()


# -- a worker's batches

def next_batch(worker: int, timeout_ns: int) -> tuple[int, int, int, int, int, int] | int | None:
    """(address, requests, rows, runs, pad_to, first slot), or None if no batch came, or the status of an error."""
    out = ctypes.c_size_t()
    status = load().rb_worker_next(worker, timeout_ns, addressof(out))
    if status:
        return None if status == _TIMEOUT else status
    b = c.Batch.from_address(out.value)
    return out.value, b.requests, b.rows, b.runs, b.pad_to, b.slot[0]


def copy_inputs(*_: Any) -> dict[str, Any]:
    """Only the extension takes several inputs, and writes outputs, in one call."""
    return {}


def write_outputs(*_: Any) -> bool:
    return False


def complete_batch(at: int) -> int:
    return load().rb_batch_complete(at)
