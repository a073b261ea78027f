# SPDX-License-Identifier: Apache-2.0
"""A connection: the handle of the C library, and the signature of its model.

Nothing here refers to the users' objects: a forgotten model goes without close.
"""

from __future__ import annotations

import ctypes
import os
import time
from ctypes import addressof, c_uint32, c_uint64
from typing import Any, Callable, Union

import numpy as np

from .. import errors
from ..binding import structs as c
from ..binding.ctypes_path import Scratch
from ..binding.device import DeviceMemory
from ..binding.library import FOREVER_NS, SLICE_NS, Duration, encode, last_error, load, seconds, whole
from ..binding.paths import Client, quick
from ..binding.tensors import Tensor, signature_of
from ..binding.views import Mapping, View, Weakly, end_view, fresh, released, strided

_FULL = errors.Full.status
_TIMEOUT = errors.Timeout.status
_SHAPE = errors.Shape.status

# Rows of an output: an array, or a list of one array per row if rows differ in size.
Rows = Union[np.ndarray, list[np.ndarray]]

# Between two attempts to connect.
_FIRST_RETRY_S, _LAST_RETRY_S = 0.005, 0.2
_MOST_WINDOW = (1 << 32) - 1
_CONNECT_TIMEOUT_NS = 5_000_000_000


def address(a: np.ndarray) -> int:
    """The address of a contiguous array."""
    return a.__array_interface__["data"][0]


class Step:
    """A step under way, and its request's number as soon as it is known."""

    __slots__ = ("request", "sequence")

    def __init__(self, sequence: int) -> None:
        self.sequence, self.request = sequence, 0


class Core(Client):
    def __init__(self, model: str, socket: str | os.PathLike[str] | None, window: int | None, name: str | None, wait: Duration) -> None:
        self.lib = load()
        self._handed_out = Weakly()  # views of requests, which end with the connection
        super().__init__()
        self.name = model
        self._mapping: Mapping | None = None
        self.completions: Callable[[], Any] = lambda: None  # a weak reference
        self._connect(model, socket, window, name, wait)
        self._learn()

    def _learn(self) -> None:
        self._info = info = c.Model()
        self.check(self.lib.rb_client_model(self.handle, addressof(info)))
        self.signature = s = signature_of(self.lib, self.lib.rb_client_tensor, self.handle, info)
        every = self._tensors = [*s.inputs, *s.outputs]
        names = {t.name: k for k, t in enumerate(s.inputs)}, {t.name: len(s.inputs) + k for k, t in enumerate(s.outputs)}
        fixed = tuple(not t.variable for t in every)
        takes = tuple((t.dtype, t.shape) for t in s.inputs) if s.in_c else ()
        gives = tuple((t.shape, t.dtype) for t in s.outputs) if s.in_c else ()
        self.learn(names, fixed, not s.variable_inputs, takes, gives, s.on_device)
        # A pool and not one for each thread: a signal handler may call in the middle of a call.
        self._pool: list[Scratch] = []

    @property
    def model(self) -> str:
        """The model's own name; the client may have asked for an alias."""
        return bytes(self.info.name).decode()

    @property
    def info(self) -> c.Model:
        """The model's present settings; the last known ones once the client is closed."""
        info = c.Model()
        if not self.closed and self.lib.rb_client_model(self.handle, addressof(info)) == 0:
            self._info = info
        return self._info

    def _connect(self, model: str, socket: str | os.PathLike[str] | None, window: int | None, name: str | None, wait: Duration) -> None:
        if window is not None and not 1 <= whole("window", window) <= _MOST_WINDOW:  # C has 32 bits, and 0 is the default
            raise errors.Invalid(f"window is 1..{_MOST_WINDOW} rows, got {window}")
        start, delay = time.monotonic(), _FIRST_RETRY_S
        deadline = start + seconds(wait)
        while True:
            status = self.dial(model.encode(), encode(socket), encode(name), window or 0, _CONNECT_TIMEOUT_NS)
            if status == 0:
                return
            error = last_error(self.lib, status)
            if status == _TIMEOUT and time.monotonic() < start + _CONNECT_TIMEOUT_NS / 1e9:
                continue  # interrupted by a signal
            if not error.retry_attach or time.monotonic() + delay > deadline:
                raise error
            time.sleep(delay)
            delay = min(2 * delay, _LAST_RETRY_S)

    def check(self, status: int) -> None:
        if status:
            raise self.error(status)

    def error(self, status: int) -> errors.Error:
        if self.closed:
            return errors.Closed(f"the connection to {self.name} was closed")
        return last_error(self.lib, status)

    def close(self) -> None:
        for view in self._handed_out.arrays():  # first: after the close they would show zeros
            end_view(view, released)
        super().close()
        self._mapping = None

    def sweep(self) -> None:
        """Makes room: returns slots that this process can no longer use."""
        if quick is None:  # in the extension no handler can interrupt a release
            super().sweep()
        completions = self.completions()
        if completions is not None:
            completions.sweep()

    # -- steps of a request

    def wait(self, request: int, timeout_ns: int) -> None:
        """Waits for the request's end, in slices; raises Timeout."""
        left = timeout_ns or FOREVER_NS
        deadline = time.monotonic_ns() + left
        while True:
            status = self.lib.rb_wait(self.handle, request, min(left, SLICE_NS))
            if status == 0:
                return
            left = deadline - time.monotonic_ns()
            if status != _TIMEOUT or left <= 0:
                raise self.error(status)

    def version(self, request: int) -> int:
        """The version of the live weights that answered an ended request; 0 if the model has none, or the request failed."""
        v = c_uint32()
        self.check(self.lib.rb_request_version(self.handle, request, addressof(v)))
        return v.value

    def release(self, request: int) -> None:
        if self.signature.on_device:
            self.lib.rb_release_on_stream(self.handle, request, self.stream())
        else:
            self.lib.rb_release(self.handle, request)

    @property
    def device(self) -> DeviceMemory:
        """The device memory of the last mapping."""
        m = self._mapping or self.present_mapping()
        assert m.device
        self._mapping = m
        return m.device

    def stream(self, given: Any = None) -> int:
        """The CUDA stream that orders commits and releases."""
        return self.device.stream(given)

    def mapping(self, request: int, attachment: int) -> Mapping:
        """The mapping of a request's slots. A restarted broker has another one."""
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
        except BaseException:  # also of a signal handler
            self.lib.rb_map_release(out.id)
            raise

    def view(self, k: int, request: int, slot: int, rows: int, attachment: int, single: bool) -> View | list[View]:
        """An array over the slots of the k-th tensor; outputs follow the inputs."""
        t, mapping = self._tensors[k], self.mapping(request, attachment)
        output = k - len(self.signature.inputs)
        if t not in mapping.offsets:  # the first use of this tensor
            v = c.View()
            if output < 0:
                self.check(self.lib.rb_input(self.handle, request, k, addressof(v)))
            else:
                self.check(self.lib.rb_output_row(self.handle, request, output, 0, addressof(v)))
            mapping.offsets[t] = v.data - mapping.base_of(t) - slot * t.stride
        if t.on_device:  # a new array, since this request's end takes its memory away
            plane = mapping.plane(t)
            return plane[slot] if single else plane[slot : slot + rows]
        if single and not t.variable:
            return self._hand_out(mapping.row(t, slot), mapping)
        shape = t.shape if not t.variable else self._input_shape(request, k) if output < 0 else self._output_shapes(request, output, rows)
        if isinstance(shape, list):  # rows differ in size
            return [self._hand_out(mapping.rows(t, slot + row, 1, own)[0], mapping) for row, own in enumerate(shape)]
        all_rows = mapping.rows(t, slot, rows, shape)
        return self._hand_out(all_rows[0, ...] if single else all_rows, mapping)

    def _hand_out(self, array: np.ndarray, mapping: Mapping) -> View:
        view = fresh(array, mapping.memory)
        self._handed_out.add(view)
        return view

    # -- whole requests, for models of fixed shapes and contiguous arrays

    def _scratch(self) -> Scratch:
        """A free scratch; after a successful call it returns to the pool."""
        try:
            return self._pool.pop()
        except IndexError:
            return Scratch(self.handle, len(self.signature.inputs), len(self.signature.outputs))

    def infer(self, arrays: list[np.ndarray], rows: int, timeout_ns: int, step: Step | None = None) -> list[np.ndarray]:
        s, sequence = self._scratch(), step.sequence if step else 0
        outs = self._empty(s, rows)
        for k, a in enumerate(arrays):
            s.inputs[k] = address(a)
        call = s.call
        call.rows, call.timeout, call.slice, call.request = rows, timeout_ns, min(timeout_ns or SLICE_NS, SLICE_NS), 0
        deadline = time.monotonic_ns() + timeout_ns
        try:
            status = self._infer_slice(s.call_at, sequence)
            if status:
                self._unsliced(call, status, deadline, sequence)
        except BaseException:
            self.release(call.request)
            raise
        finally:
            if step:
                step.request = call.request
        self._pool.append(s)
        return outs

    def _infer_slice(self, call_at: int, sequence: int) -> int:
        return self.lib.rb_step_prepared(call_at, sequence) if sequence else self.lib.rb_infer_prepared(call_at)

    def _unsliced(self, call: c.Inference, status: int, deadline: int, sequence: int) -> None:
        """Continues a call after its first slice, or raises. The deadline counts if the call has a timeout."""
        while status == _FULL or (status == _TIMEOUT and not call.request):  # no slot yet, or not attached yet
            error = self.error(status)
            self.sweep()
            if call.timeout:
                left = deadline - time.monotonic_ns()
                if left <= 0:
                    raise error
                call.timeout, call.slice = left, min(left, SLICE_NS)
            status = self._infer_slice(addressof(call), sequence)
        if status == _TIMEOUT and call.request:
            self.wait(call.request, 0)
            status = self.lib.rb_collect_prepared(addressof(call))
        self.check(status)

    def commit_several(self, requests: list[int], timeout_ns: int, stream: Any) -> None:
        """Commits claimed requests."""
        ids = (c_uint64 * len(requests))(*requests)
        if self.signature.on_device:
            status = self.lib.rb_commit_on_stream(self.handle, addressof(ids), len(requests), self.stream(stream), timeout_ns, 0)
        else:
            status = self.lib.rb_commit_all(self.handle, addressof(ids), len(requests), timeout_ns, 0)
        self.check(status)

    def collect(self, request: int, rows: int) -> list[np.ndarray]:
        """The outputs of an ended request, which is released."""
        s = self._scratch()
        outs = self._empty(s, rows)
        s.call.request = request
        self.check(self.lib.rb_collect_prepared(s.call_at))
        self._pool.append(s)
        return outs

    def _empty(self, s: Scratch, rows: int) -> list[np.ndarray]:
        outs = []
        for k, t in enumerate(self.signature.outputs):
            out = np.empty((rows, *t.shape), t.dtype)
            s.outputs[k] = address(out)
            outs.append(out)
        return outs

    # -- sequences

    def undo(self, sequence: int, request: int | None) -> None:
        """Takes a step back whose caller does not get the answer; nothing if it was not sent."""
        if sequence and request:
            self.lib.rb_sequence_undo(self.handle, sequence, request)

    def state_rows(self, sequence: int, k: int, fresh: np.ndarray | None) -> Any:
        """The present state in place: an array of all rows, or a tensor of torch on the device."""
        v, t = c.View(), self.signature.state[k]
        self.check(self.lib.rb_sequence_state(self.handle, sequence, k, addressof(v), None if fresh is None else address(fresh)))
        shape = tuple(v.shape[: v.rank])
        if t.on_device:
            return self.device.halves(v.data, shape, t.kind)
        return strided((ctypes.c_uint8 * v.bytes).from_address(v.data), t.dtype, 0, v.stride, shape)

    # -- requests of models with variable dimensions

    def take(self, request: int, rows: int) -> list[Rows]:
        """Copies of the outputs of an ended request, which is released."""
        try:
            self.check(self.lib.rb_poll(self.handle, request))
            outs: list[Rows] = []
            v = c.View()
            for k, t in enumerate(self.signature.outputs):
                status = self.lib.rb_output(self.handle, request, k, addressof(v))
                if t.on_device:
                    self.check(status)
                    outs.append(self._device_copy(request, t, v))
                elif status == _SHAPE:
                    outs.append([_copy(t, self._row(request, k, row, v))[0] for row in range(rows)])
                else:
                    self.check(status)
                    outs.append(_copy(t, v))
            return outs
        finally:
            self.release(request)

    def _device_copy(self, request: int, t: Tensor, v: c.View) -> Any:
        """A copy of an output on the device, ready for every stream."""
        m = self._mapping
        if m is None or m.device is None or not m.device.has(v.data):
            m = self._mapping = self._map(self.lib.rb_request_map, self.handle, request)
            assert m.device
        return m.device.copy(v.data, tuple(v.shape[: v.rank]), t.kind)

    def _row(self, request: int, k: int, row: int, v: c.View) -> c.View:
        self.check(self.lib.rb_output_row(self.handle, request, k, row, addressof(v)))
        return v

    def _output_shapes(self, request: int, k: int, rows: int) -> tuple[int, ...] | list[tuple[int, ...]]:
        """The actual shape of the rows of a variable output; a list of shapes if they differ."""
        v = c.View()
        status = self.lib.rb_output(self.handle, request, k, addressof(v))
        if status == _SHAPE:
            return [tuple(self._row(request, k, row, v).shape[1 : v.rank]) for row in range(rows)]
        self.check(status)
        return tuple(v.shape[1 : v.rank])

    def _input_shape(self, request: int, k: int) -> tuple[int, ...]:
        """The shape of the rows of a variable input, rounded up to the model's buckets."""
        v = c.View()
        self.check(self.lib.rb_input(self.handle, request, k, addressof(v)))
        return tuple(v.shape[1 : v.rank])


def _copy(t: Tensor, v: c.View) -> np.ndarray:
    memory = (ctypes.c_uint8 * v.bytes).from_address(v.data)
    return np.array(strided(memory, t.dtype, 0, v.stride, tuple(v.shape[: v.rank])))
