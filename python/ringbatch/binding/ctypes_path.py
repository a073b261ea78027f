# SPDX-License-Identifier: Apache-2.0
"""The ctypes path of a request: does in Python what ``quick/*.c`` do, where the extension was not built.

A handler of a signal may raise between any two steps here. So whatever the
library claims it writes into a struct that somebody knows already: the object
whose destructor gives it back, and :attr:`Client.owed`, for destructors in the
midst of which a handler raises.
"""

from __future__ import annotations

import array
import ctypes
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from ctypes import addressof, c_uint32, c_uint64, c_void_p
from typing import Any, ClassVar

import numpy as np

from .. import errors
from . import structs as c
from .library import FOREVER_NS, SLICE_NS, Process, load, nanoseconds
from .views import committed, end_view, parents, released

_FULL = errors.Full.status
_TIMEOUT = errors.Timeout.status


class Scratch:
    """Room for the arguments of a call."""

    __slots__ = ("call", "call_at", "inputs", "one", "one_at", "outputs", "words")

    def __init__(self, handle: int, inputs: int, outputs: int) -> None:
        self.inputs = (c_void_p * inputs)()
        self.outputs = (c_void_p * outputs)()
        self.call = c.Inference(handle, addressof(self.inputs), addressof(self.outputs), 0, SLICE_NS)
        self.call_at = addressof(self.call)
        # For one item of a model with one input and one output: the words of
        # a struct, as assigning to its fields takes longer.
        self.words = array.array("Q", bytes(ctypes.sizeof(c.Inference)))
        self.one = c.Inference.from_buffer(self.words)
        self.one.client, self.one.slice, self.one.rows = handle, SLICE_NS, 1
        self.one_at = addressof(self.one)


# The words of Inference: where the addresses of inputs and outputs are, and the request.
_INPUTS, _OUTPUTS, _REQUEST = (field.offset // 8 for field in (c.Inference.inputs, c.Inference.outputs, c.Inference.request))


def _data_at() -> int:
    """Where in an ndarray the address of its elements is; 0 if that is not known.

    It is the first field after the object's head: so says NumPy's C ABI, and
    so it is tried here. To C such a field is an array of one address, so an
    ndarray that is the only input can be passed as it is. Asking for the
    address instead makes objects, and takes longer than the whole call.
    """
    if sys.implementation.name != "cpython":
        return 0  # an id is not an address
    a = np.zeros(1)
    offset = object.__basicsize__
    return offset if c_void_p.from_address(id(a) + offset).value == a.__array_interface__["data"][0] else 0


_DATA_AT = _data_at()


class _Reaped(threading.local):
    """Where the library writes what has ended.

    A thread's own: the loops of several threads collect at once. And it stays,
    for the next time: a handler may raise before its numbers are taken.
    """

    def __init__(self) -> None:
        self.ids, self.count = (c_uint64 * 64)(), c_uint32()


class _Owner:
    """Lives as long as a call does; see Client.owed."""

    __slots__ = ("__weakref__",)


class Client:
    """A connection: its handle, and whole requests of single items."""

    handle = 0
    closed = False
    _opened: ClassVar[dict[int, tuple[weakref.ref, c_uint64]]] = {}  # as owed, for connections

    def __init__(self) -> None:
        self._lib = load()
        self._out = c_uint64()
        #: Claimed, and not given back: by the address of the struct that has its number. See sweep.
        self.owed: dict[int, tuple[weakref.ref, Any]] = {}
        self._on_device = False
        self._reaped = _Reaped()
        self._pool: list[Scratch] = []  # not one for each thread: a signal's handler may call too, in the midst of a call

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
        """inputs and outputs are empty if the model has no quick path; on_device: a stream orders commits and releases."""
        self.names, self.fixed, self.plain = names, fixed, plain
        self._on_device = on_device
        self.single = len(inputs) == len(outputs) == 1 and _DATA_AT > 0
        if self.single:
            (self._dtype, self._shape), self._y = inputs[0], outputs[0]

    def error(self, status: int) -> errors.Error:
        raise NotImplementedError

    def stream(self, given: Any = None) -> int:
        raise NotImplementedError

    def wait(self, request: int, timeout_ns: int) -> None:
        raise NotImplementedError

    def commit_one(self, request: int, timeout_ns: int, flags: int, stream: Any = None) -> int:
        """The status."""
        if not self._on_device:
            return self._lib.rb_commit(self.handle, request, timeout_ns, flags)
        at, number = self.stream(stream), c_uint64(request)  # a name keeps the number alive during the call
        return self._lib.rb_commit_on_stream(self.handle, addressof(number), 1, at, timeout_ns, flags)

    def release_one(self, request: int, stream: Any = None) -> None:
        """Gives its slots back; on the device once what was queued there has been done."""
        try:
            at = self.stream(stream) if self._on_device else None
        except Exception:  # closed, or at the interpreter's end
            at = None
        if at is None:
            self._lib.rb_release(self.handle, request)
        else:
            self._lib.rb_release_on_stream(self.handle, request, at)

    def close(self) -> None:
        self.closed = True  # first: what other threads wait for ends now, and that is why
        if addressof(self._out) in self._opened:
            self._lib.rb_close(self._out.value)  # a second time is harmless: the handle is known to be closed
            self._opened.pop(addressof(self._out), None)

    def __del__(self) -> None:
        if hasattr(self, "_out"):
            self.close()

    def sweep(self) -> None:
        """Gives back what is claimed and nobody has: a handler raised in the midst of giving it back."""
        for at, owes in list(self.owed.items()):
            owner, r = owes
            # Listed still, and by the one that is gone: meanwhile another thread may have handed
            # its request on, and ended, and its struct may be another call's.
            if owner() is None and self.owed.get(at) is owes:
                self.release_one(r.id if isinstance(r, c.Request) else r.request)
                self.owed.pop(at, None)

    def scratch(self) -> Scratch:
        """A free one; who is done with it appends it to the pool, unless the call failed."""
        try:
            return self._pool.pop()
        except IndexError:
            return Scratch(self.handle, len(self.names[0]), len(self.names[1]))

    def _fits(self, x: Any) -> bool:
        return self.single and type(x) is np.ndarray and x.dtype is self._dtype and x.shape == self._shape and x.flags.c_contiguous

    def one(self, x: Any) -> np.ndarray | None:
        """model(x) for one item of a model with one input and one output; None if x is not just that."""
        if not self._fits(x):
            return None
        s = self.scratch()
        y = np.empty(*self._y)
        words = s.words
        words[_INPUTS] = id(x) + _DATA_AT
        words[_OUTPUTS] = id(y) + _DATA_AT
        words[_REQUEST] = 0
        try:
            status = self._lib.rb_infer_prepared(s.one_at)
            while status == _FULL or (status == _TIMEOUT and not words[_REQUEST]):  # no slot yet, or not attached yet
                self.sweep()
                status = self._lib.rb_infer_prepared(s.one_at)
            while status == _TIMEOUT:
                status = self._lib.rb_wait(self.handle, words[_REQUEST], SLICE_NS)
                if status != _TIMEOUT:
                    status = self._lib.rb_collect_prepared(s.one_at)
            if status:
                raise self.error(status)
        except BaseException:  # perhaps a signal's handler raised it
            self._lib.rb_release(self.handle, words[_REQUEST])
            raise
        self._pool.append(s)
        return y

    def submit_into(
        self, waiters: dict[int, Any], waiter: Any, arrays: tuple[np.ndarray, ...], rows: int, timeout_ns: int, hold: bool
    ) -> int:
        """Sends and lists waiters[request] = waiter, before anybody can tell that it has ended; with hold it is not
        committed yet. The request's number; 0 if there is no room yet."""
        s = self.scratch()
        for k, a in enumerate(arrays):
            s.inputs[k] = a.__array_interface__["data"][0]
        call = s.call
        call.rows, call.timeout, call.flags, call.request = rows, 0, c.HOLD, 0
        owner = _Owner()
        self.owed[addressof(call)] = weakref.ref(owner), call
        try:
            status = self._lib.rb_submit_prepared(s.call_at)
            request = call.request  # from the pool another thread may take it, and write its own there
            if not status:
                self._list_and_commit(request, waiters, waiter, timeout_ns, hold)
        except BaseException:  # a signal's handler: who keeps what it raised keeps the owner
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
        """submit_into with hold for one item; None if x is not just what model(x) has a quick path for."""
        return self.submit_into(waiters, waiter, (x,), 1, 0, True) if self._fits(x) else None

    def commit_held(self, requests: list[int], waiters: dict[int, Any], timeout_ns: int) -> None:
        """Commits those that are listed in waiters still; the others were canceled."""
        listed = [r for r in requests if r in waiters]
        ids = (c_uint64 * len(listed))(*listed)
        status = self._lib.rb_commit_all(self.handle, addressof(ids), len(listed), timeout_ns, c.NOTIFY) if listed else 0
        if status:
            raise self.error(status)

    def drain(self, ended: list[int], waiters: dict[int, Any], loop: Any, deliver: Callable[[int, Any, Any, Any], None]) -> None:
        """Collects what has ended and gives each to deliver; what could not be given is still in ended, and in waiters."""
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
        """Appends the numbers of the requests that have ended; False once the client is closed."""
        ids, count = self._reaped.ids, self._reaped.count
        while True:
            if not count.value:  # otherwise a handler raised before they were appended
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

    def collect_one(self, request: int) -> np.ndarray:
        """The output of one that has ended; it is released."""
        s = self.scratch()
        y = np.empty(*self._y)
        s.words[_OUTPUTS] = id(y) + _DATA_AT
        s.one.request = request
        status = self._lib.rb_collect_prepared(s.one_at)
        if status:
            raise self.error(status)
        self._pool.append(s)
        return y


class Caller:
    """A model that is called."""

    _core: Any

    def _call(self, *inputs: Any, **named: Any) -> Any:
        raise NotImplementedError

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if len(inputs) == 1 and not named:
            y = self._core.one(inputs[0])
            if y is not None:
                return y
        return self._call(*inputs, **named)


class ByName(Mapping[str, Any]):
    """Arrays by name. To look whether there is one makes none: a worker's output would count as touched."""

    __slots__ = ()

    def __contains__(self, name: object) -> bool:
        return any(name == own for own in self)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401


class Columns(ByName):
    """The tensors of one side by name; arrays are made when asked for.

    It refers to its request or batch but is not referred to by it: what is
    forgotten goes at once, without the help of the garbage collector.
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
        """Whether these are its arrays."""
        return self._made is made

    def __setitem__(self, name: str, value: Any) -> None:
        raise TypeError(f"the arrays are where they are: write into them, [{name!r}][...] = value")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Held:
    """One claimed request and the arrays over it."""

    __slots__ = ("_committed", "_core", "_generation", "_made", "_ok", "_r", "_released", "_single", "rows")

    def __init__(self, core: Client, rows: int = 1, dims: tuple[int, ...] = (), timeout_ns: int = 0, single: bool = True) -> None:
        self._released = self._committed = self._ok = False
        self._core, self._single, self.rows = core, single, rows
        self._generation = Process.generation
        self._made: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        self._r = r = c.Request()
        core.owed[addressof(r)] = weakref.ref(self), r
        try:
            self._claim(dims, timeout_ns)
        except BaseException:  # who keeps what a signal's handler raised keeps this one
            self.release()
            raise

    def _claim(self, dims: tuple[int, ...], timeout_ns: int) -> None:
        core = self._core
        sizes = (c_uint32 * len(dims))(*dims)
        left = timeout_ns or FOREVER_NS
        deadline = time.monotonic_ns() + left
        while True:
            status = core._lib.rb_claim(core.handle, self.rows, addressof(sizes), len(dims), min(left, SLICE_NS), addressof(self._r))
            if status == 0:
                return
            error = core.error(status)
            if status not in (_FULL, _TIMEOUT):
                raise error
            core.sweep()  # also when the time is over: who only looks whether there is room will look again
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

    def _set_priority(self, priority: int) -> None:
        raise NotImplementedError

    @property
    def inputs(self) -> Mapping[str, np.ndarray]:
        """Where to write, by name; until the request is committed."""
        return Columns(self._core.names[0], self._input, self._made[0])

    @property
    def outputs(self) -> Mapping[str, np.ndarray]:
        """Where to read, by name, once the request has ended; a list of arrays where rows differ in size."""
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
        """Its inputs belong to the worker now."""
        self._committed = True
        self._end(0, committed)

    def _end(self, side: int, error: Callable[[], errors.Error]) -> None:
        made = self._made[side]
        for view in made.values():
            end_view(view, error)
        made.clear()

    def wait_in(self, timeout_ns: int) -> None:
        self._check()
        self._core.wait(self._id, timeout_ns)
        self._ok = True

    def run(self, timeout: float | None = None, *, priority: int | None = None, stream: Any = None) -> Any:
        """Commits and waits. stream: of a model on the device, whose work comes before; without it torch's current one."""
        if priority is not None:
            self._check()
            self._set_priority(priority)
        self.commit_in(nanoseconds(timeout), 0, stream)
        self.wait_in(0)
        return self

    def release(self, stream: Any = None) -> None:
        """Gives the slots back; the views of this request are over. stream: of a model on the device, what still uses them."""
        if not self._released:
            try:
                self._released = True
                self._end_views()
            finally:  # a signal's handler may raise in the midst of it, or at the start of any function of Python
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
        """Ends the arrays, and does with the request what submit_into does."""
        self._check()
        self._end_views()
        self._core._list_and_commit(self._r.id, waiters, waiter, timeout_ns, False)
        self._released = True  # last: until then release gives it back, if a signal's handler raises
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
    """(address, requests, rows, runs, pad_to), None if none came; a number is the status of an error."""
    out = ctypes.c_size_t()
    status = load().rb_worker_next(worker, timeout_ns, addressof(out))
    if status:
        return None if status == _TIMEOUT else status
    b = c.Batch.from_address(out.value)
    return out.value, b.requests, b.rows, b.runs, b.pad_to


def complete_batch(at: int) -> int:
    return load().rb_batch_complete(at)
