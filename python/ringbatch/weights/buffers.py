# SPDX-License-Identifier: Apache-2.0
"""The buffers of a publisher or follower as arrays. A buffer holds one version of all tensors."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import addressof
from typing import Any

import numpy as np

from ..binding import structs as c
from ..binding.device import DeviceMemory
from ..binding.library import check, encode
from ..binding.tensors import Tensor

_REPLY_NS = 1_000_000_000  # for the broker's answer, and of a follower for a publisher
_MOST_KNOWN = 8  # more are buffers of brokers that are gone


class Buffer:
    """One buffer."""

    def __init__(self, tensors: Sequence[Tensor], arrays: dict[str, Any], flat: Any, device: DeviceMemory | None) -> None:
        self.tensors = tensors
        #: The tensors by name: of NumPy, or in device memory of torch (a DeviceArray without torch).
        self.arrays = arrays
        #: The whole buffer as bytes.
        self.flat = flat
        self.device = device
        #: For weights.modules: the tensors of torch, and whether the memory is pinned.
        self.parts: Any = None
        self.pinned = False


class Buffers:
    """The buffers of a handle of the library, by address."""

    def __init__(self, lib: ctypes.CDLL, role: str, handle: int, keeps: Any) -> None:
        """role: "publish" or "follow". keeps: what the arrays keep alive."""
        self.tensors: list[Tensor] = []
        t, d = c.Tensor(), c.Device()
        while getattr(lib, f"rb_{role}_tensor")(handle, len(self.tensors), addressof(t)) == 0:
            self.tensors.append(Tensor(t, 0))
        self._bytes = max(t.offset + t.row_bytes for t in self.tensors)
        d.size = ctypes.sizeof(d)
        check(lib, getattr(lib, f"rb_{role}_device")(handle, addressof(d)))
        self.device = DeviceMemory(d, keeps) if d.ordinal >= 0 else None
        self._known: dict[int, Buffer] = {}
        self._keeps = keeps

    def at(self, address: int) -> Buffer:
        if address not in self._known:
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
            self._known[address] = self._on_host(address) if self.device is None else self._on_device(self.device, address)
        return self._known[address]

    def clear(self) -> None:
        """Forgets the arrays, which would keep the handle."""
        self._known.clear()
        self.device = None

    def _on_host(self, address: int) -> Buffer:
        memory: Any = (ctypes.c_uint8 * self._bytes).from_address(address)
        memory.keeps = self._keeps  # the memory stays mapped for the arrays
        arrays = {t.name: np.ndarray(t.shape, t.dtype, memory, t.offset) for t in self.tensors}
        return Buffer(self.tensors, arrays, np.frombuffer(memory, np.uint8), None)

    def _on_device(self, device: DeviceMemory, address: int) -> Buffer:
        arrays = {t.name: device.array(address + t.offset, t.shape, t.kind) for t in self.tensors}
        return Buffer(self.tensors, arrays, device.array(address, (self._bytes,), "u8"), device)


def options(socket: str | os.PathLike[str] | None, name: str | None) -> c.ConnectOptions:
    """Of one attempt: callers repeat it, so that Ctrl-C is heard."""
    o = c.ConnectOptions()
    o.size, o.socket, o.name, o.timeout, o.device = ctypes.sizeof(o), encode(socket), encode(name), _REPLY_NS, 1
    return o
