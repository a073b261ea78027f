"""A connection: the handle of the C library and what is known of its model.

Nothing here refers to the objects that users hold, so that those can be
forgotten without being closed.
"""

from __future__ import annotations

import array
import ctypes
import os
import sys
import time
from ctypes import addressof, c_uint32, c_uint64, c_void_p
from typing import Any, Callable, Union

import numpy as np

from . import _structs as c
from . import errors
from ._library import FOREVER_NS, SLICE_NS, check, last_error, load
from ._tensors import Signature, Tensor
from ._views import Mapping, strided

_FULL = errors.Full.status
_TIMEOUT = errors.Timeout.status
_SHAPE = errors.Shape.status
_NOT_SENT = (errors.Released.status, errors.Committed.status, errors.Closed.status, errors.Forked.status, errors.Invalid.status)

# Rows of an output: an array, or a list of one array per row where rows differ in size.
Rows = Union[np.ndarray, list[np.ndarray]]

# Between tries to reach a broker or model that is not there yet.
_FIRST_RETRY_S, _LAST_RETRY_S = 0.005, 0.2
_MOST_WINDOW = (1 << 32) - 1
_CONNECT_TIMEOUT_NS = 5_000_000_000


def encode(text: str | os.PathLike[str] | None) -> bytes | None:
    return None if text is None else os.fsencode(text)


def nanoseconds(timeout: float | None) -> int:
    """A timeout of Python (None: none) for the C side, where 0 is none."""
    if timeout is None:
        return 0
    if timeout != timeout:
        raise errors.Invalid("a timeout is a number of seconds, or None; got nan")
    return max(1, int(min(timeout * 1e9, FOREVER_NS)))  # float("inf") is a timeout too


class Scratch:
    """Room for the arguments of a call."""

    __slots__ = ("call", "call_at", "inputs", "one", "one_at", "outputs", "step", "step_at", "step_words", "words")

    def __init__(self, handle: int, signature: Signature) -> None:
        self.inputs = (c_void_p * len(signature.inputs))()
        self.outputs = (c_void_p * len(signature.outputs))()
        self.call = c.Inference(handle, addressof(self.inputs), addressof(self.outputs), 0, SLICE_NS)
        self.call_at = addressof(self.call)
        # For one item of a model with one input and one output: the words of
        # a struct, as assigning to its fields takes longer.
        self.words = array.array("Q", bytes(ctypes.sizeof(c.Inference)))
        self.one = c.Inference.from_buffer(self.words)
        self.one.client, self.one.slice, self.one.rows = handle, SLICE_NS, 1
        self.one_at = addressof(self.one)
        # For claiming and running one row without copies; slice and timeout change.
        self.step_words = array.array("Q", bytes(ctypes.sizeof(c.Inference)))
        self.step = c.Inference.from_buffer(self.step_words)
        self.step.client, self.step.slice, self.step.rows = handle, SLICE_NS, 1
        self.step_at = addressof(self.step)


# The words of Inference: where the addresses of inputs and outputs are, the
# timeout, the request, and the slot (the lower half) with its attachment.
_INPUTS, _OUTPUTS, TIMEOUT, REQUEST, SLOT = (
    field.offset // 8 for field in (c.Inference.inputs, c.Inference.outputs, c.Inference.timeout, c.Inference.request, c.Inference.slot)
)

_SMALL_BYTES = 16 << 10  # what is not contiguous is made so first; a larger one is written to its slot as it is


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


def address(a: np.ndarray) -> int:
    """Where a contiguous array lies."""
    return a.__array_interface__["data"][0]


class Core:
    def __init__(self, model: str, socket: str | os.PathLike[str] | None, window: int | None, name: str | None, wait: float) -> None:
        self.lib = load()
        self.name = model
        # The library writes the handle here: it is known also if a signal's
        # handler raises before the call has returned.
        self._out = c_uint64()
        self.closed = False
        try:
            self._connect(model, socket, window, name, wait)
            self._learn()
        except BaseException:
            self.close()
            raise

    def _learn(self) -> None:
        self.handle = self._out.value
        self._info = info = c.Model()
        self.check(self.lib.rb_client_model(self.handle, addressof(info)))
        self.signature = Signature(
            tensors(self.lib, self.lib.rb_client_tensor, self.handle, c.INPUT, info.inputs),
            tensors(self.lib, self.lib.rb_client_tensor, self.handle, c.OUTPUT, info.outputs),
        )
        self.plain = not self.signature.variable_inputs
        self.single = _DATA_AT > 0 and self.signature.single
        # Not one for each thread: a signal's handler may call too, in the midst of a call.
        self._pool: list[Scratch] = []
        self.rb_claim, self.rb_run, self.rb_release = self.lib.rb_claim_prepared, self.lib.rb_run_prepared, self.lib.rb_release
        self._rb_infer, self._rb_submit, self._rb_collect = self.lib.rb_infer_prepared, self.lib.rb_submit_prepared, self.lib.rb_collect_prepared
        self._mapping: Mapping | None = None

    @property
    def info(self) -> c.Model:
        """The model as the broker has it; as it was, once the client is closed."""
        info = c.Model()
        if not self.closed and self.lib.rb_client_model(self.handle, addressof(info)) == 0:
            self._info = info
        return self._info

    def _connect(self, model: str, socket: str | os.PathLike[str] | None, window: int | None, name: str | None, wait: float) -> None:
        if window is not None and not 1 <= window <= _MOST_WINDOW:  # to C 0 is what fits, and a larger one is not what was asked for
            raise errors.Invalid(f"window is 1..{_MOST_WINDOW} rows, got {window}")
        o = c.ConnectOptions(ctypes.sizeof(c.ConnectOptions), window or 0, encode(socket), encode(name), _CONNECT_TIMEOUT_NS)
        start, delay = time.monotonic(), _FIRST_RETRY_S
        deadline = start + wait
        while True:
            status = self.lib.rb_connect(model.encode(), addressof(o), addressof(self._out))
            if status == 0:
                return
            error = last_error(self.lib, status)
            if status == _TIMEOUT and time.monotonic() < start + _CONNECT_TIMEOUT_NS / 1e9:
                continue  # it was a signal
            waiting = isinstance(error, (errors.NoBroker, errors.UnknownModel, errors.BrokerGone, errors.Draining, errors.Timeout))
            if not waiting or time.monotonic() + delay > deadline:
                raise error
            time.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY_S)

    def __del__(self) -> None:
        if not getattr(self, "closed", True):  # a signal's handler raised in the midst of closing
            self.close()

    def check(self, status: int) -> None:
        if status:
            raise self.error(status)

    def error(self, status: int) -> errors.Error:
        if self.closed:
            return errors.Closed(f"the connection to {self.name} was closed")
        return last_error(self.lib, status)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.lib.rb_close(self._out.value)
            self._mapping = None

    # -- steps of a request

    def claim(self, rows: int, dims: list[int], timeout_ns: int) -> c.Request:
        """Waits for room in the window, for timeout_ns at most."""
        if not 0 <= rows < 1 << 32:  # C would see another number
            raise errors.Rows(f"a request has 1..{self.info.window} rows (this client's window), got {rows}")
        r = c.Request()
        sizes = (c_uint32 * len(dims))(*dims)
        left = timeout_ns or FOREVER_NS
        deadline = time.monotonic_ns() + left
        try:
            while True:
                status = self.lib.rb_claim(self.handle, rows, addressof(sizes), len(dims), min(left, SLICE_NS), addressof(r))
                if status == 0:
                    return r
                left = deadline - time.monotonic_ns()
                if status not in (_FULL, _TIMEOUT) or left <= 0:
                    raise self.error(status)
        except BaseException:  # perhaps a signal's handler raised it
            self.release(r.id)
            raise

    def wait(self, request: int, timeout_ns: int) -> None:
        """Waits for the end, in slices; Timeout if it does not come in time."""
        left = timeout_ns or FOREVER_NS
        deadline = time.monotonic_ns() + left
        while True:
            status = self.lib.rb_wait(self.handle, request, min(left, SLICE_NS))
            if status == 0:
                return
            left = deadline - time.monotonic_ns()
            if status != _TIMEOUT or left <= 0:
                raise self.error(status)

    def release(self, request: int) -> None:
        self.lib.rb_release(self.handle, request)

    def claim_one(self) -> tuple[int, int, int]:
        """claim for one row of a model of fixed shapes: the request, its slot and its attachment."""
        s = self.scratch()
        words = s.step_words
        words[REQUEST] = request = 0
        try:
            if self.rb_claim(s.step_at) == 0:
                request, place = words[REQUEST], words[SLOT]
                self._pool.append(s)
                return request, place & 0xFFFFFFFF, place >> 32
        except BaseException:  # perhaps a signal's handler raised it
            self.release(request or words[REQUEST])
            raise
        self._pool.append(s)
        r = self.claim(1, [], 0)
        return r.id, r.slot, r.attachment

    def run_one(self, request: int, timeout_ns: int, committed: Callable[[], None]) -> None:
        """Commits, tells that, and waits for the end."""
        s = self.scratch()
        words = s.step_words
        words[REQUEST], words[TIMEOUT] = request, timeout_ns
        status = self.rb_run(s.step_at)
        self._pool.append(s)
        if status not in _NOT_SENT:
            committed()
        if status == _TIMEOUT:
            self.wait(request, 0)
        elif status:
            raise self.error(status)

    def mapping(self, request: int, attachment: int) -> Mapping:
        """The mapping that a request lies in; another one after a broker's restart."""
        m = self._mapping
        if m is None or m.attachment != attachment:
            m = self._mapping = self._map(self.lib.rb_request_map, self.handle, request)
        return m

    def present_mapping(self) -> Mapping:
        return self._map(self.lib.rb_client_map, self.handle)

    def _map(self, function: Any, *of: int) -> Mapping:
        out = c.Map()
        try:
            self.check(function(*of, addressof(out)))
            return Mapping(self.lib, out)
        except BaseException:  # perhaps a signal's handler raised it
            self.lib.rb_map_release(out.id)
            raise

    # -- whole requests, for models of fixed shapes and contiguous arrays

    def scratch(self) -> Scratch:
        """A free one; who is done with it appends it to the pool, unless the call failed."""
        try:
            return self._pool.pop()
        except IndexError:
            return Scratch(self.handle, self.signature)

    def quick(self) -> Callable[[Any], np.ndarray | None]:
        """model(x) for one item of a model with one input and one output; None if x is not just that.

        All it needs is in one place, its defaults: where many processes take
        turns on few cores, caches are cold, and each object looked at costs
        more than the step it is for. Whether the client was closed is left to
        the library, which looks in any case.
        """
        if not self.single:
            return lambda _x: None
        x_tensor, y_tensor = self.signature.inputs[0], self.signature.outputs[0]

        def one(
            x: Any,
            ndarray: Any = np.ndarray,
            dtype: Any = x_tensor.dtype,
            shape: Any = x_tensor.shape,
            empty: Any = np.empty,
            y_shape: Any = y_tensor.shape,
            y_dtype: Any = y_tensor.dtype,
            pop: Any = self._pool.pop,
            infer: Any = self._rb_infer,
            append: Any = self._pool.append,
        ) -> np.ndarray | None:
            if type(x) is not ndarray or x.dtype is not dtype or x.shape != shape:
                return None
            if not x.flags.c_contiguous:
                if x.nbytes > _SMALL_BYTES:
                    return None
                x = np.ascontiguousarray(x)
            try:
                s = pop()
            except IndexError:
                s = Scratch(self.handle, self.signature)
            y = empty(y_shape, y_dtype)
            words = s.words
            words[_INPUTS] = id(x) + _DATA_AT
            words[_OUTPUTS] = id(y) + _DATA_AT
            words[REQUEST] = 0
            try:
                status = infer(s.one_at)
                if status:
                    self._unsliced(s.one, status, 0)
            except BaseException:  # perhaps a signal's handler raised it
                self.release(words[REQUEST])
                raise
            append(s)
            return y

        return one

    def infer(self, arrays: list[np.ndarray], rows: int, timeout_ns: int) -> list[np.ndarray]:
        s = self.scratch()
        outs = self._empty(s, rows)
        for k, a in enumerate(arrays):
            s.inputs[k] = address(a)
        call = s.call
        call.rows, call.timeout, call.slice, call.request = rows, timeout_ns, min(timeout_ns or SLICE_NS, SLICE_NS), 0
        deadline = time.monotonic_ns() + timeout_ns
        try:
            status = self._rb_infer(s.call_at)
            if status:
                self._unsliced(call, status, deadline)
        except BaseException:
            self.release(call.request)
            raise
        self._pool.append(s)
        return outs

    def _unsliced(self, call: c.Inference, status: int, deadline: int) -> None:
        """Goes on where one slice of the call was not enough, or raises. The deadline counts if the call has a timeout."""
        while status == _FULL or (status == _TIMEOUT and not call.request):  # no slot yet, or not attached yet
            if call.timeout:
                left = deadline - time.monotonic_ns()
                if left <= 0:
                    break
                call.timeout, call.slice = left, min(left, SLICE_NS)
            status = self._rb_infer(addressof(call))
        if status == _TIMEOUT and call.request:
            self.wait(call.request, 0)
            status = self._rb_collect(addressof(call))
        self.check(status)

    def submit(self, arrays: list[np.ndarray], rows: int, timeout_ns: int, flags: int = c.NOTIFY) -> int:
        """Sends and returns the request's number; 0 if there is no room."""
        s = self.scratch()
        for k, a in enumerate(arrays):
            s.inputs[k] = address(a)
        call = s.call
        call.rows, call.timeout, call.flags = rows, timeout_ns, flags
        return self._sent(s, call, s.call_at)

    def _sent(self, s: Scratch, call: c.Inference, at: int) -> int:
        call.request = request = 0
        try:
            status = self._rb_submit(at)
            if status == 0:
                request = call.request
                self._pool.append(s)
                return request
        except BaseException:  # perhaps a signal's handler raised it
            self.release(request or call.request)
            raise
        self._pool.append(s)
        if status in (_FULL, _TIMEOUT):  # no slot yet, or not attached yet
            return 0
        raise self.error(status)

    def commit_all(self, requests: list[int], timeout_ns: int) -> None:
        """Commits what was submitted with HOLD."""
        ids = (c_uint64 * len(requests))(*requests)
        self.check(self.lib.rb_commit_all(self.handle, addressof(ids), len(requests), timeout_ns, c.NOTIFY))

    def submit_one(self, x: np.ndarray, flags: int) -> int:
        """submit for what quick takes."""
        s = self.scratch()
        s.words[_INPUTS] = id(x) + _DATA_AT
        s.one.flags = flags
        return self._sent(s, s.one, s.one_at)

    def collect_one(self, request: int) -> np.ndarray:
        s = self.scratch()
        t = self.signature.outputs[0]
        y = np.empty(t.shape, t.dtype)
        s.words[_OUTPUTS] = id(y) + _DATA_AT
        s.one.request = request
        status = self._rb_collect(s.one_at)
        if status:
            raise self.error(status)
        self._pool.append(s)
        return y

    def collect(self, request: int, rows: int) -> list[np.ndarray]:
        """The outputs of a request that has ended; it is released in any case."""
        s = self.scratch()
        outs = self._empty(s, rows)
        s.call.request = request
        self.check(self._rb_collect(s.call_at))
        self._pool.append(s)
        return outs

    def _empty(self, s: Scratch, rows: int) -> list[np.ndarray]:
        outs = []
        for k, t in enumerate(self.signature.outputs):
            out = np.empty((rows, *t.shape), t.dtype)
            s.outputs[k] = address(out)
            outs.append(out)
        return outs

    # -- requests of models with variable dimensions

    def take(self, request: int, rows: int) -> list[Rows]:
        """Copies of the outputs of a request that has ended; it is released in any case."""
        try:
            self.check(self.lib.rb_poll(self.handle, request))
            outs: list[Rows] = []
            v = c.View()
            for k, t in enumerate(self.signature.outputs):
                status = self.lib.rb_output(self.handle, request, k, addressof(v))
                if status == _SHAPE:
                    outs.append([_copy(t, self._row(request, k, row, v))[0] for row in range(rows)])
                else:
                    self.check(status)
                    outs.append(_copy(t, v))
            return outs
        finally:
            self.release(request)

    def _row(self, request: int, k: int, row: int, v: c.View) -> c.View:
        self.check(self.lib.rb_output_row(self.handle, request, k, row, addressof(v)))
        return v

    def output_shapes(self, request: int, k: int, rows: int) -> tuple[int, ...] | list[tuple[int, ...]]:
        """The actual shape of the k-th output's rows; a list of shapes if they differ."""
        t = self.signature.outputs[k]
        if not t.variable:
            return t.shape
        v = c.View()
        status = self.lib.rb_output(self.handle, request, k, addressof(v))
        if status == _SHAPE:
            return [tuple(self._row(request, k, row, v).shape[1 : v.rank]) for row in range(rows)]
        self.check(status)
        return tuple(v.shape[1 : v.rank])

    def input_shapes(self, request: int) -> list[tuple[int, ...]]:
        """The shapes of the inputs' rows: rounded up to the model's buckets."""
        shapes = []
        v = c.View()
        for k, t in enumerate(self.signature.inputs):
            if t.variable:
                self.check(self.lib.rb_input(self.handle, request, k, addressof(v)))
                shapes.append(tuple(v.shape[1 : v.rank]))
            else:
                shapes.append(t.shape)
        return shapes


def _copy(t: Tensor, v: c.View) -> np.ndarray:
    memory = (ctypes.c_uint8 * v.bytes).from_address(v.data)
    return np.array(strided(memory, t.dtype, 0, v.stride, tuple(v.shape[: v.rank])))


def tensors(lib: Any, function: Any, handle: int, side: int, count: int) -> list[Tensor]:
    """Asks for all tensors of one side of a model."""
    found: list[Tensor] = []
    dims = 0
    for k in range(count):
        t = c.Tensor()
        check(lib, function(handle, side, k, addressof(t)))
        found.append(Tensor(t, dims))
        dims += len(found[-1].variable)
    return found
