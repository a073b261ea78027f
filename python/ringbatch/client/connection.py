# SPDX-License-Identifier: Apache-2.0
"""A connection: the handle of the C library, and the signature of its model.

Nothing here refers to the users' objects: a forgotten model goes without close.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from ctypes import addressof, c_uint32
from functools import partial
from typing import Any, Callable, Union

import numpy as np

from .. import errors
from ..binding import structs as c
from ..binding import texts
from ..binding.device import DeviceMemory
from ..binding.library import Duration, Pauses, encode, last_error, load, not_negative, whole
from ..binding.paths import Client, quick
from ..binding.tensors import Tensor, needs_numpy, signature_of
from ..binding.views import Mapping, View, Weakly, end_view, fresh, released, strided

_TIMEOUT = errors.Timeout.status

# Rows of an output: an array, or a list of one array per row if rows differ in size.
Rows = Union[np.ndarray, list[np.ndarray]]

_MOST_WINDOW = (1 << 32) - 1
_CONNECT_TIMEOUT_NS = 5_000_000_000


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
        needs_numpy([*every, *s.state])
        names = {t.name: k for k, t in enumerate(s.inputs)}, {t.name: len(s.inputs) + k for k, t in enumerate(s.outputs)}
        tensors = tuple(
            ((t.shape, t.dtype), t.dtype.itemsize, sum(1 << i for i in t.variable), partial(texts.decode, t=t) if t.is_text else None)
            for t in every)
        self.learn(names, tensors, not s.on_device)

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
        start, pauses = time.monotonic(), Pauses()
        deadline = start + not_negative("wait", wait)
        while True:
            status = self.dial(model.encode(), encode(socket), encode(name), window or 0, _CONNECT_TIMEOUT_NS)
            if status == 0:
                return
            error = last_error(self.lib, status)
            if status == _TIMEOUT and time.monotonic() < start + _CONNECT_TIMEOUT_NS / 1e9:
                continue  # interrupted by a signal
            if not error.retry_attach or (pause := pauses.next(deadline)) is None:
                raise error
            time.sleep(pause)

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

    def version(self, request: int) -> int:
        """The version of the live weights that answered an ended request; 0 if the model has none, or the request failed."""
        v = c_uint32()
        self.check(self.lib.rb_request_version(self.handle, request, addressof(v)))
        return v.value

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
        if t.is_text and k < len(self.signature.inputs):
            raise errors.Invalid(f'input {t.name!r} is text: assign it, request.inputs["{t.name}"] = "…"')
        if t not in mapping.offsets:  # the first use of this tensor
            mapping.offsets[t] = self.place(request, k, 0)[0] - mapping.base_of(t) - slot * t.stride
        if t.on_device:  # a new array, since this request's end takes its memory away
            plane = mapping.plane(t)
            return plane[slot] if single else plane[slot : slot + rows]
        if t.is_text:  # a copy
            rows_of_it = mapping.rows(t, slot, rows, t.shape)
            return texts.decode(rows_of_it[0] if single else rows_of_it, t)
        if single and not t.variable:
            return self._hand_out(mapping.row(t, slot), mapping)
        at = self.place(request, k, -1) if t.variable else (0, 0, (rows, *t.shape))
        if at is None:  # rows differ in size
            each = [self.place(request, k, row)[2][1:] for row in range(rows)]
            return [self._hand_out(mapping.rows(t, slot + row, 1, own)[0], mapping) for row, own in enumerate(each)]
        all_rows = mapping.rows(t, slot, rows, at[2][1:])
        return self._hand_out(all_rows[0, ...] if single else all_rows, mapping)

    def set_text(self, k: int, request: int, single: bool, value: Any) -> None:
        """Writes an input of text before the commit."""
        t = self._tensors[k]
        if not t.is_text:
            raise TypeError(f"arrays cannot be replaced: write into them, [{t.name!r}][...] = value")
        address, _, shape = self.place(request, k, -1)
        data = texts.encode(value, t, "input")
        if data.shape != (shape[1:] if single else shape):
            rows = "" if single else f"{shape[0]} rows of "
            raise errors.Shape(f"input {t.name!r}: expected {rows}{t.expected_row}; got another number of them")
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def _hand_out(self, array: np.ndarray, mapping: Mapping) -> View:
        view = fresh(array, mapping.memory)
        self._handed_out.add(view)
        return view

    # -- sequences

    def undo(self, sequence: int, request: int | None) -> None:
        """Takes a step back whose caller does not get the answer; nothing if it was not sent."""
        if sequence and request:
            self.lib.rb_sequence_undo(self.handle, sequence, request)

    def state_rows(self, sequence: int, k: int, fresh: np.ndarray | None) -> Any:
        """The present state in place: an array of all rows, or a tensor of torch on the device."""
        v, t = c.View(), self.signature.state[k]
        self.check(self.lib.rb_sequence_state(self.handle, sequence, k, addressof(v), None if fresh is None else fresh.ctypes.data))
        shape = tuple(v.shape[: v.rank])
        if t.on_device:
            return self.device.halves(v.data, shape, t.kind)
        return strided((ctypes.c_uint8 * v.bytes).from_address(v.data), t.dtype, 0, v.stride, shape)

    # -- answers

    def give(self, outs: Sequence[Rows]) -> Any:
        """The answer: an array, or a dict of several by name."""
        return outs[0] if len(outs) == 1 else dict(zip(self.signature.output_names, outs))

    def collect(self, request: int, rows: int) -> tuple[Any, int]:
        """The answer and the version of an ended request, which is released. rows: -1 for one item."""
        if self.in_c:
            return super().collect(request, rows)
        try:
            version = self.version(request)
            outs = [self._copy(request, k, abs(rows)) for k in range(len(self.signature.inputs), len(self._tensors))]
        finally:
            self.release_one(request)
        return self.give([o if rows > 0 else o[0] if isinstance(o, list) else o[0, ...] for o in outs]), version

    def _copy(self, request: int, k: int, rows: int) -> Any:
        """A copy of an output; on the device one that is ready for every stream."""
        t, at = self._tensors[k], self.place(request, k, -1)
        if at is None:  # rows differ in size
            return [_copy(t, *self.place(request, k, row))[0] for row in range(rows)]
        if t.is_text:
            return texts.decode(_copy(t, *at), t)
        if not t.on_device:
            return _copy(t, *at)
        m = self._mapping
        if m is None or m.device is None or not m.device.has(at[0]):
            m = self._mapping = self._map(self.lib.rb_request_map, self.handle, request)
            assert m.device
        return m.device.copy(at[0], at[2], t.kind)


def _copy(t: Tensor, address: int, stride: int, shape: tuple[int, ...]) -> np.ndarray:
    memory = (ctypes.c_uint8 * (shape[0] * stride)).from_address(address)
    return np.array(strided(memory, t.dtype, 0, stride, shape))
