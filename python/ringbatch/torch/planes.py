# SPDX-License-Identifier: Apache-2.0
"""The ring's memory as torch tensors, pinned if it is host memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from .. import errors
from ..binding.tensors import FULL, NAMES, Declared, Tensor, in_memory
from ..worker.ring import Ring

# By rb_dtype, as NAMES.
DTYPES: tuple[Any, ...] = tuple(getattr(torch, name, None) for name in FULL)  # torch has no str


def output_kind(y: torch.Tensor, first: torch.dtype, name: str) -> str:
    """The type of an output that is not declared: the module's, but floats below 64 bits are as wide as the first input's.
    Without such a float there (float8 would round much), bfloat16 and float8 become float32, which holds their values: NumPy has neither.
    """
    kept = y.dtype == torch.float64 or not (y.is_floating_point() and first.is_floating_point and first.itemsize > 1)
    dtype = (torch.float32 if is_small(y) else y.dtype) if kept else first
    if dtype not in DTYPES:
        raise errors.Invalid(f"the module gives {dtype} in output {name!r}: tensors have one of the types {', '.join(NAMES)}. Name the "
            "outputs to serve without it, --output NAME")
    return NAMES[DTYPES.index(dtype)]


def is_small(y: torch.Tensor) -> bool:
    """Whether NumPy alone lacks the type: bfloat16 and float8."""
    return y.is_floating_point() and (y.dtype == torch.bfloat16 or y.element_size() == 1)


@dataclass
class Plane:
    """One tensor of the model, over all slots of the ring, a row per slot."""

    shape: tuple[int, ...]  # of a row, the largest
    variable: tuple[int, ...]  # its variable dimensions
    rows: torch.Tensor  # [slots, elements], in device memory, or in pinned host memory with one address for CPU and GPU
    name: str = ""
    is_state: bool = False  # a slot has two rows, its halves: a step reads one and writes the other

    def __post_init__(self) -> None:
        self.base, self.stride = self.rows.data_ptr(), self.rows.stride(0) * self.rows.element_size()  # in bytes
        self.on_device, self.dtype = self.rows.is_cuda, self.rows.dtype
        if not self.on_device:
            bits = {1: torch.uint8, 2: torch.int16}[self.rows.element_size()] if is_small(self.rows) else self.dtype
            self.bits = self.rows.view(bits)  # torch and NumPy move them, whatever they mean
            self._array = self.bits.numpy()
            self._whole = self._array.reshape(len(self._array), *self.shape)

    def copy(self, first: int, rows: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A copy of adjacent rows in host memory, which begin with this shape. NumPy needs a third of torch's time."""
        if shape == self.shape:
            x = torch.from_numpy(self._whole[first : first + rows].copy())
        else:
            x = torch.from_numpy(self._array[first : first + rows, : math.prod(shape)].copy().reshape(rows, *shape))
        return x if x.dtype is self.dtype else x.view(self.dtype)


class Planes:
    """All tensors of a ring, in memory that the GPU reads and writes in place."""

    def __init__(self, ring: Ring, device: torch.device) -> None:
        self._base = 0
        sides = ring.signature.inputs, ring.signature.outputs
        if device.type == "cuda" and any(not t.on_device for side in (*sides, ring.signature.state) for t in side):
            # Once for the whole ring: then copies are asynchronous, and kernels reach it.
            base, size = ring.mapping.base, ring.mapping.bytes
            status = int(torch.cuda.cudart().cudaHostRegister(base, size, 3))  # portable, mapped
            if status != 0:
                raise errors.NoMemory(f"cudaHostRegister of {size >> 20} MiB: error {status}")
            self._base = base
        states = [_plane(ring, t, True) for t in ring.signature.state]
        self.inputs, self.outputs = ([*(_plane(ring, t) for t in side), *states] for side in sides)

    def close(self) -> None:
        """Unpins the memory, when the device has stopped using it."""
        if self._base:
            torch.cuda.cudart().cudaHostUnregister(self._base)
            self._base = 0


def placed(t: Declared, memory: str | None, device: torch.device) -> Declared:
    """The tensor with its memory: the host's, or that of the module's own GPU. memory: the default."""
    t = in_memory(t, memory)
    if not t.memory:
        return t
    base = t._replace(memory="")
    if device.type != "cuda":
        raise errors.NoGPU(f"tensor {base} in device memory: the module is on the {device}, and such memory is for modules on a GPU")
    if t.memory not in ("device", f"device:{device.index}"):
        raise errors.WrongGPU(f"tensor {base} in the memory of {t.memory}: the module is on cuda:{device.index}, its tensors must be too")
    return t._replace(memory=f"device:{device.index}")


def _plane(ring: Ring, t: Tensor, is_state: bool = False) -> Plane:
    count, rows = math.prod(t.shape), ring.slots * (1 + is_state)
    if t.on_device:
        return Plane(t.shape, t.variable, ring.mapping.plane(t)[:rows].view(rows, count), t.name, is_state)
    dtype = DTYPES[NAMES.index(t.kind)]
    host = torch.frombuffer(ring.mapping.memory, dtype=dtype, count=rows * count, offset=t.offset) if count else torch.empty(0, dtype=dtype)
    return Plane(t.shape, t.variable, host.view(rows, count), t.name, is_state)
