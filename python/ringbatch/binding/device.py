# SPDX-License-Identifier: Apache-2.0
"""Tensors in the memory of a GPU.

A slot of such a tensor is a torch tensor over the slot itself. Without torch it is a
:class:`DeviceArray`, which CuPy and Numba take by ``__cuda_array_interface__``.

Work that a program queues on the GPU has not run yet when the call returns. So a
request is committed *on a stream*: after the stream's work so far. The caller names
the stream, or it is torch's current one. Without torch the whole GPU is waited for.
"""

from __future__ import annotations

import ctypes
import math
import operator
import os
from ctypes import addressof, c_char_p, c_void_p
from typing import Any, Callable

import numpy as np

from .. import errors
from . import structs as c
from .casting import converted_tensor
from .library import check
from .tensors import BITS, FULL, NAMES, NUMPY, Tensor, slots_behind

# The types of __cuda_array_interface__, which has no bfloat16 and no float8 (their bits), and of torch.
_DTYPES = {kind: np.dtype(name) for kind, name in zip(NAMES, NUMPY)}
TORCH = dict(zip(NAMES, FULL))


_unknown = object()
_torch: Any = _unknown  # PyPy wants it before torch()


def torch() -> Any:
    """PyTorch, or None."""
    global _torch
    if _torch is _unknown:
        try:
            import torch as found

            _torch = found
        except ImportError:
            _torch = None
    return _torch


def _needed() -> Any:
    if torch() is None:
        raise errors.Invalid(
            "the rows of this batch lie apart, and PyTorch, which copies them together, is not installed: use batch.runs, input_run and "
            "output_run"
        )
    return torch()


class DeviceMemory:
    """The device memory of a ring, mapped into this process while anything uses it."""

    def __init__(self, d: c.Device, memory: Any) -> None:
        self.base: int = d.base
        self.bytes: int = d.bytes
        #: The GPU's number in this process: torch's cuda:ordinal.
        self.ordinal: int = d.ordinal
        self.gpu: str = d.gpu.decode()
        self._context: int = d.context
        self._memory = memory  # keeps the mapping

    def plane(self, t: Tensor, offset: int) -> Any:
        """All slots of a tensor, and the bytes behind them."""
        return self.array(self.base + offset, (slots_behind(self.bytes - offset, t), *t.shape), t.kind)

    def array(self, at: int, shape: tuple[int, ...], kind: str) -> Any:
        """Memory of the device as a tensor of torch; without torch a DeviceArray."""
        rows = DeviceArray(self, at, shape, kind)
        return rows if torch() is None else _tensor(rows)

    def has(self, at: int) -> bool:
        return self.base <= at < self.base + self.bytes

    def copy(self, at: int, shape: tuple[int, ...], kind: str) -> Any:
        """A copy of some rows, as a tensor of torch that every stream may read."""
        made = _tensor(DeviceArray(self, at, shape, kind)).clone()
        torch().cuda.current_stream(self.ordinal).synchronize()
        return made

    def halves(self, at: int, shape: tuple[int, ...], kind: str) -> Any:
        """Rows of a state in place, as a tensor of torch: every second half."""
        return _tensor(DeviceArray(self, at, (2 * shape[0] - 1, *shape[1:]), kind))[::2]

    # For batches whose rows are not adjacent.

    def gather(self, plane: Any, slots: Any, padded: int) -> Any:
        """Copies rows of a plane into a new tensor, with zeros for the padding."""
        numbers = self._numbers(slots)
        rows = plane.index_select(0, numbers)
        return rows if padded == len(slots) else _needed().cat([rows, rows.new_zeros((padded - len(slots), *rows.shape[1:]))])

    def empty(self, rows: int, t: Tensor) -> Any:
        found = _needed()
        return found.empty((rows, *t.shape), dtype=getattr(found, TORCH[t.kind]), device=f"cuda:{self.ordinal}")

    def scatter(self, plane: Any, slots: Any, rows: Any) -> None:
        numbers = self._numbers(slots)
        rows = rows[: len(slots)]
        if plane.element_size() == 1 and plane.is_floating_point():  # torch copies no float8 by an index
            plane, rows = plane.view(_needed().uint8), rows.view(_needed().uint8)
        plane.index_copy_(0, numbers, rows)

    def _numbers(self, slots: Any) -> Any:
        return _needed().as_tensor(slots, device=f"cuda:{self.ordinal}")

    def stream(self, given: Any = None) -> int:
        """The given stream, or torch's current one. Without either this waits for the whole GPU."""
        if given is not None:
            return raw_stream(given)
        found = torch()
        if found is not None:
            return found._C._cuda_getCurrentRawStream(self.ordinal)  # current_stream() makes an object first, which takes 8 µs
        self.synchronize()
        return 0

    def synchronize(self) -> None:
        """Waits for all work of this process on the GPU."""
        found = torch()
        if found is not None:
            found.cuda.synchronize(self.ordinal)
            return
        driver, previous = _driver(), c_void_p()
        push, pop = [c_void_p(self._context)], [ctypes.byref(previous)]
        calls: dict[str, list[Any]] = {"cuCtxPushCurrent_v2": push, "cuCtxSynchronize": [], "cuCtxPopCurrent_v2": pop}
        for name, arguments in calls.items():
            status = getattr(driver, name)(*arguments)
            if status:
                text = c_char_p()
                driver.cuGetErrorName(status, ctypes.byref(text))
                raise RuntimeError(f"{name}: {(text.value or b'CUDA error').decode()}")


def device_memory(lib: ctypes.CDLL, map_id: int, memory: Any) -> DeviceMemory | None:
    """The device memory of a mapping, if it has any."""
    d = c.Device()
    d.size = ctypes.sizeof(d)
    check(lib, lib.rb_map_device(map_id, addressof(d)))
    return None if d.ordinal < 0 else DeviceMemory(d, memory)


def raw_stream(given: Any) -> int:
    """The CUstream of a stream of torch, CuPy or cuda.core; a number is returned as it is."""
    for take in (lambda s: s.cuda_stream, lambda s: s.__cuda_stream__()[1], lambda s: s.ptr, operator.index):
        try:
            return int(take(given))
        except (AttributeError, TypeError):
            pass
    raise errors.Invalid(f"stream={given!r}: want a stream of torch or CuPy, or its address")


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ.get("RINGBATCH_LIBCUDA") or "libcuda.so.1")


# -- arrays without torch


class DeviceArray:
    """Rows in device memory, valid until their request or batch is over.

    ``cupy.asarray(a)`` and ``torch.as_tensor(a, device="cuda")`` give arrays over the same memory.
    """

    __slots__ = ("_at", "_device", "_over", "kind", "shape")

    def __init__(self, device: DeviceMemory, at: int, shape: tuple[int, ...], kind: str) -> None:
        self._device, self._at, self.shape, self.kind = device, at, shape, kind
        self._over: Callable[[], errors.Error] | None = None

    def _check(self) -> None:
        if self._over is not None:
            raise self._over()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.kind].itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        self._check()
        return {"version": 3, "shape": self.shape, "typestr": _DTYPES[self.kind].str, "data": (self._at, False), "strides": None,
            "stream": None}

    def __getitem__(self, key: Any) -> DeviceArray:
        """A row, or some neighbouring rows."""
        self._check()
        if isinstance(key, tuple) and len(key) == 2 and key[1] is ...:
            key = key[0]
        rows, *rest = self.shape
        whole = DeviceArray(self._device, self._at, tuple(rest), self.kind)
        if isinstance(key, slice):
            first, end, step = key.indices(rows)
            if step == 1:
                return DeviceArray(self._device, self._at + first * whole.nbytes, (max(0, end - first), *rest), self.kind)
        elif 0 <= key < rows:
            whole._at += key * whole.nbytes
            return whole
        raise IndexError(f"{key} of {rows} rows: want one row, or neighbouring ones")

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return "<ringbatch view that is over>" if self._over else f"<{self.kind}{list(self.shape)} on {self._device.gpu}>"


# -- tensors of torch


def _tensor(rows: DeviceArray) -> Any:
    """A torch tensor over the rows; it keeps their memory mapped."""
    found = torch()
    kind = rows.kind if rows.kind not in BITS else "i16" if rows.kind == "bf16" else "u8"
    with found.inference_mode(False):  # so that its slices may be written
        plane = found.as_tensor(DeviceArray(rows._device, rows._at, rows.shape, kind), device=f"cuda:{rows._device.ordinal}")
        return plane.view(getattr(found, TORCH[rows.kind])) if kind != rows.kind else plane


def over_array(array: np.ndarray, kind: str) -> Any:
    """A torch tensor over the memory of an array, also of a type that NumPy lacks."""
    found = torch()
    if kind not in BITS:
        return found.from_numpy(array)
    return found.from_numpy(array.view(np.int16 if kind == "bf16" else np.uint8)).view(getattr(found, TORCH[kind]))


def is_device_array(value: Any) -> bool:
    """Whether the value is in GPU memory: a torch tensor, a CuPy array or a DeviceArray."""
    return hasattr(value, "__cuda_array_interface__") or getattr(value, "is_cuda", False)


def owned_rows(rows: Any) -> Any:
    """Rows that the caller may write: a copy of a torch tensor; without torch the rows themselves."""
    return rows if isinstance(rows, DeviceArray) else rows.clone()


def end_device_array(view: Any, error: Callable[[], errors.Error]) -> None:
    """Takes the memory away from an array that was handed out. Slices by torch keep the mapping, and see the slot's later content."""
    if isinstance(view, DeviceArray):
        view._over = error
    else:
        view.set_()


def convert_on_device(t: Tensor, value: Any, cast: bool, ordinal: int) -> Any:
    """The caller's value as a torch tensor of t's type on the device; raises if it needs a conversion that cast does not allow."""
    found = torch()
    if found is None:
        raise errors.Invalid(
            f"input {t.name!r} is on the GPU, and arrays are copied there by PyTorch, which is not installed: use request() and write "
            f"inputs[{t.name!r}]"
        )
    if isinstance(value, DeviceArray):
        value = _tensor(value)
    elif not isinstance(value, found.Tensor) and is_device_array(value):
        value = found.as_tensor(value, device="cuda")
    given = value if isinstance(value, found.Tensor) else found.as_tensor(value)
    if not given.is_cuda and not cast:
        raise errors.Invalid(
            f"input {t.name!r} is on the GPU (cuda:{ordinal}), and this array is on the CPU. Nothing is copied between them silently: "
            f"pass x.to('cuda:{ordinal}'), or connect with cast=True"
        )
    if given.is_cuda and given.device.index != ordinal and not cast:
        raise errors.WrongGPU(
            f"input {t.name!r} is on cuda:{ordinal}, and this tensor on {given.device}: pass x.to('cuda:{ordinal}'), or connect with "
            "cast=True"
        )
    want = getattr(found, TORCH[t.kind])
    if given.dtype == want:
        return given
    if cast and found.can_cast(given.dtype, want):
        return converted_tensor(given, want, f"input {t.name!r}")
    advice = f"Nothing is converted silently: pass x.to({want}), or connect with cast=True"
    if cast:
        advice = f"cast=True does not convert {given.dtype} to {want}"
    got = f"{given.dtype} of shape {tuple(given.shape)}"
    raise errors.DType(f"input {t.name!r}: expected {want} of shape {t.shape}, or rows of it; got {got}. {advice}")


def to_host(t: Tensor, value: Any, cast: bool) -> Any:
    """The value for a tensor in host memory. Raises if it lies on a GPU, unless cast is set."""
    if isinstance(value, np.ndarray) or not is_device_array(value):
        return value
    if not cast:
        raise errors.Invalid(
            f"input {t.name!r} is in host memory, and this array is on a GPU. Nothing is copied between them silently: pass x.cpu(), "
            "connect with cast=True, "
            "or serve the model with memory='device:0'"
        )
    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach().cpu()
        return value.view(torch().uint16).numpy() if t.kind == "bf16" and value.dtype == torch().bfloat16 else value  # without ml_dtypes
    return value.get() if hasattr(value, "get") else torch().as_tensor(value, device="cuda").cpu()  # CuPy, or another


def concatenate(parts: Any) -> Any:
    return torch().cat(list(parts))
