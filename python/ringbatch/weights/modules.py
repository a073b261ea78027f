# SPDX-License-Identifier: Apache-2.0
"""Copies between buffers and torch: a publisher's tensors into a buffer, a version into a module."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .. import errors
from ..binding.device import TORCH, over_array
from ..binding.tensors import Tensor
from .buffers import Buffer


def put(buffer: Buffer, given: Mapping[str, Any]) -> None:
    """Copies arrays and tensors into a buffer, and waits for the GPU."""
    values = [_as_torch(t, given[t.name]) for t in buffer.tensors]
    for t, value in zip(buffer.tensors, values):
        if not _fits(value.dtype, getattr(torch, TORCH[t.kind])):
            raise errors.DType(f"weight {t.name!r}: expected {t.dtype}, got {value.dtype}")
    device = next((v.device for v in values if v.is_cuda), None)
    if buffer.device is not None:
        device = torch.device("cuda", buffer.device.ordinal)
    if device is None:
        _run(_copies(_parts(buffer), values))
        return
    urgent = torch.cuda.Stream(device, priority=-1)  # the GPU's workers may keep it busy
    urgent.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(urgent):
        if buffer.device is not None:
            _run(_copies(_parts(buffer), values))
        else:  # gathered on the GPU: one copy over the bus instead of one for each tensor
            staged = torch.empty(buffer.flat.shape, dtype=torch.uint8, device=device)
            _run(_copies(_split(staged, buffer.tensors), values))
            _pinned(buffer).copy_(staged, non_blocking=True)
    urgent.synchronize()


def _fits(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a weight may be converted. To float8 none is: torch would cut large numbers off."""
    return source == target or (torch.can_cast(source, target) and not (target.is_floating_point and target.itemsize == 1))


class ModuleLoad:
    """Copies versions into a torch module, in place: CUDA graphs and compiled code stay valid.

    A module on one GPU gets a version in two steps. The first brings it into memory of the worker's own, beside
    the batches that run. The second, within the GPU, is in order with them.
    """

    def __init__(self, net: Any, check_finite: bool = False, in_order: bool = False) -> None:
        """in_order: all batches run on the stream that is current when a version is loaded. Then a call does not wait for
        the GPU, and the buffer is read until `done`."""
        if not hasattr(net, "state_dict"):
            raise errors.Invalid(f"live weights are copied into a torch.nn.Module, got {type(net).__name__}")
        self._net, self._check_finite, self._in_order = net, check_finite, in_order
        self._staged: _Staged | None = None

    def __call__(self, buffer: Buffer) -> None:
        if self._staged is not None and self._in_order:  # the module is as it was prepared for serving
            self._staged.fetch(buffer)
            self._staged.apply()
            return
        state = self._net.state_dict()  # now: the module may have moved to a device, or to 16 bits
        _compare(state, buffer.tensors)
        devices = {t.device for t in state.values() if t.is_cuda}
        if len(devices) == 1:
            if self._staged is None or not self._staged.fits(state):
                self._staged = _Staged(buffer, state, next(iter(devices)))
            version = self._staged.fetch(buffer)
        else:
            version = dict(zip((t.name for t in buffer.tensors), _parts(buffer)))
        if self._check_finite:
            for name, value in version.items():
                if not torch.isfinite(value).all():
                    raise errors.Invalid(f"{name!r} has a NaN or an infinity")
        if not self._in_order:
            _synchronize(devices)  # batches that still run use the weights before
        if len(devices) == 1 and self._staged is not None:
            self._staged.apply()
        else:
            _run(_copies(list(state.values()), [version[name] for name in state]))
        if not self._in_order or len(devices) > 1:
            _synchronize(devices)

    def done(self, wait: bool) -> bool:
        """Whether the buffer was read. wait: until it was."""
        if self._staged is None or self._staged.arrived.query():
            return True
        if wait:
            self._staged.arrived.synchronize()
        return wait


class _Staged:
    """A version in device memory of this process, in the types and memory formats of a module."""

    def __init__(self, buffer: Buffer, state: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._device, self._own = device, _formats(state)
        self._memory = torch.empty(buffer.flat.shape, dtype=torch.uint8, device=device)
        as_published = {t.name: part for t, part in zip(buffer.tensors, _split(self._memory, buffer.tensors))}
        others = [n for n, t in as_published.items() if t.dtype != state[n].dtype or not state[n].is_contiguous()]
        converted = {name: torch.empty_like(state[name]) for name in others}
        self._convert = _copies(list(converted.values()), [as_published[name] for name in others])
        self._version = {**as_published, **converted}
        self._apply = _copies(list(state.values()), [self._version[name] for name in state])
        self._stream = torch.cuda.Stream(device, priority=-1)
        self.arrived = torch.cuda.Event()  # the buffer was read
        self._read = torch.cuda.Event()  # the version before was read

    def fits(self, state: Mapping[str, torch.Tensor]) -> bool:
        return self._own == _formats(state)

    def fetch(self, buffer: Buffer) -> dict[str, torch.Tensor]:
        """Brings a version here, for work on the current stream."""
        self._stream.wait_event(self._read)
        with torch.cuda.stream(self._stream):
            self._memory.copy_(buffer.flat if buffer.device is not None else _pinned(buffer), non_blocking=True)
            self.arrived.record()
            _run(self._convert)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return self._version

    def apply(self) -> None:
        """Copies it into the module, on the current stream."""
        _run(self._apply)
        self._read.record(torch.cuda.current_stream(self._device))


def _formats(state: Mapping[str, torch.Tensor]) -> list[Any]:
    return [(name, t.data_ptr(), t.dtype, t.stride()) for name, t in state.items()]


def _compare(state: Mapping[str, torch.Tensor], published: Sequence[Tensor]) -> None:
    """Refuses a version whose names or shapes are not the module's."""
    shapes = {t.name: t.shape for t in published}
    for name in [*state, *shapes]:
        if name not in state or name not in shapes:
            raise errors.Invalid(f"{'the module has no' if name not in state else 'the version has no'} {name!r}")
        if tuple(state[name].shape) != shapes[name]:
            raise errors.Shape(f"{name!r}: the module has {list(state[name].shape)}, the version {list(shapes[name])}")
    for t in published:
        if not _fits(getattr(torch, TORCH[t.kind]), state[t.name].dtype):
            raise errors.DType(f"{t.name!r}: the module has {state[t.name].dtype}, the version {TORCH[t.kind]}")


Copies = list[tuple[list[torch.Tensor], list[torch.Tensor]]]


def _copies(to: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Copies:
    """Pairs of tensors in groups of equal types and strides, which a few kernels copy."""
    groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for a, b in zip(to, values):
        alike = a.stride() == b.stride()
        if not alike and a.is_contiguous() and b.is_contiguous():  # strides of dimensions of one element may differ
            a, b, alike = a.view(-1), b.view(-1), True
        targets, sources = groups.setdefault((a.dtype, b.dtype, b.device, alike), ([], []))
        targets.append(a)
        sources.append(b)
    return list(groups.values())


def _run(copies: Copies) -> None:
    with torch.no_grad():
        for targets, sources in copies:
            torch._foreach_copy_(targets, sources)


def _split(flat: torch.Tensor, tensors: Sequence[Tensor]) -> list[torch.Tensor]:
    return [flat[t.offset : t.offset + t.row_bytes].view(getattr(torch, TORCH[t.kind])).view(t.shape) for t in tensors]


def _parts(buffer: Buffer) -> list[torch.Tensor]:
    if buffer.parts is None:
        buffer.parts = [_as_torch(t, buffer.arrays[t.name]) for t in buffer.tensors]
    return buffer.parts


def _pinned(buffer: Buffer) -> torch.Tensor:
    """A buffer in host memory, pinned from its first use on, if the system allows it."""
    address = buffer.flat.ctypes.data
    if not buffer.pinned:
        buffer.pinned = True
        if int(torch.cuda.cudart().cudaHostRegister(address, buffer.flat.nbytes, 0)) == 0:
            weakref.finalize(buffer, _unpin, address).atexit = False
    return torch.from_numpy(buffer.flat)


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


def _as_torch(t: Tensor, value: Any) -> torch.Tensor:
    """The value as a tensor over its memory. NumPy's uint16 has the bits of bfloat16, where it has no such type."""
    if isinstance(value, np.ndarray):
        value = np.require(value, requirements=["C", "W"])  # else torch has no view of it
        return over_array(value, t.kind)
    return torch.as_tensor(value).detach()


def _synchronize(devices: set[torch.device]) -> None:
    for d in devices:
        torch.cuda.synchronize(d)
