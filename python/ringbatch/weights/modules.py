# SPDX-License-Identifier: Apache-2.0
"""Copies between buffers and torch: a publisher's tensors into a buffer, a version into a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .. import errors
from ..binding.device import TORCH
from ..binding.tensors import Tensor
from .buffers import Buffer


def put(buffer: Buffer, given: Mapping[str, Any]) -> None:
    """Copies arrays and tensors into a buffer, and waits for the GPU."""
    values = [_as_torch(t, given[t.name]) for t in buffer.tensors]
    device = next((v.device for v in values if v.is_cuda), None)
    if device is None or buffer.device is not None:
        _copy([_as_torch(t, buffer.arrays[t.name]) for t in buffer.tensors], values)
    else:  # gathered on the GPU: one copy over the bus instead of one for each tensor
        staged = torch.empty(buffer.flat.shape, dtype=torch.uint8, device=device)
        _copy(_split(staged, buffer.tensors), values)
        torch.from_numpy(buffer.flat).copy_(staged)
    if buffer.device is not None:
        torch.cuda.current_stream(buffer.device.ordinal).synchronize()


class ModuleLoad:
    """Copies versions into a torch module, in place: CUDA graphs and compiled code stay valid.

    A module on one GPU gets a version in two steps. The first brings it into memory of the
    worker's own, beside the batches that run. The second, within the GPU, is in order with them.
    """

    def __init__(self, net: Any, check_finite: bool = False, in_order: bool = False) -> None:
        """in_order: all batches run on the stream that is current when a version is loaded."""
        if not hasattr(net, "state_dict"):
            raise errors.Invalid(f"live weights are copied into a torch.nn.Module, got {type(net).__name__}")
        self._net, self._check_finite, self._in_order = net, check_finite, in_order
        self._staged: _Staged | None = None

    def __call__(self, buffer: Buffer) -> None:
        state = self._net.state_dict()  # now: the module may have moved to a device, or to 16 bits
        _compare(state, buffer.tensors)
        devices = {t.device for t in state.values() if t.is_cuda}
        if len(devices) == 1:
            device = next(iter(devices))
            if self._staged is None or self._staged.memory.device != device:
                self._staged = _Staged(len(buffer.flat), device)
            version = self._staged.fetch(buffer)
        else:
            version = {t.name: _as_torch(t, buffer.arrays[t.name]) for t in buffer.tensors}
        if self._check_finite:
            for name, value in version.items():
                if not torch.isfinite(value).all():
                    raise errors.Invalid(f"{name!r} has a NaN or an infinity")
        if not self._in_order:
            _synchronize(devices)  # batches that still run use the weights before
        _copy(list(state.values()), [version[name] for name in state])
        if self._staged is not None:
            self._staged.read.record()
        if not self._in_order or len(devices) > 1:
            _synchronize(devices)


class _Staged:
    """A version in device memory of this process."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.read = torch.cuda.Event()  # the version before was read
        self._stream = torch.cuda.Stream(device)

    def fetch(self, buffer: Buffer) -> dict[str, torch.Tensor]:
        self._stream.wait_event(self.read)
        with torch.cuda.stream(self._stream):
            self.memory.copy_(torch.as_tensor(buffer.flat), non_blocking=True)
        self._stream.synchronize()
        return {t.name: part for t, part in zip(buffer.tensors, _split(self.memory, buffer.tensors))}


def _compare(state: Mapping[str, torch.Tensor], published: Sequence[Tensor]) -> None:
    """Refuses a version whose names or shapes are not the module's."""
    shapes = {t.name: t.shape for t in published}
    for name in [*state, *shapes]:
        if name not in state or name not in shapes:
            raise errors.Invalid(f"{'the module has no' if name not in state else 'the version has no'} {name!r}")
        if tuple(state[name].shape) != shapes[name]:
            raise errors.Shape(f"{name!r}: the module has {list(state[name].shape)}, the version {list(shapes[name])}")


def _copy(to: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(to, values)


def _split(flat: torch.Tensor, tensors: Sequence[Tensor]) -> list[torch.Tensor]:
    return [flat[t.offset : t.offset + t.row_bytes].view(getattr(torch, TORCH[t.kind])).view(t.shape) for t in tensors]


def _as_torch(t: Tensor, value: Any) -> torch.Tensor:
    """The value as a tensor over its memory. The bits of NumPy's uint16 are those of bfloat16."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16) if t.kind == "bf16" else torch.from_numpy(value)
    return torch.as_tensor(value).detach()


def _synchronize(devices: set[torch.device]) -> None:
    for d in devices:
        torch.cuda.synchronize(d)
