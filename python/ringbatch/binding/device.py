# SPDX-License-Identifier: Apache-2.0
"""Tensors in the memory of a GPU.

A slot of such a tensor is handed out as a tensor of torch over the slot itself,
or where torch is not installed as a :class:`DeviceArray`, which torch, CuPy,
Numba and JAX take by ``__cuda_array_interface__`` or DLPack.

What a program queues on the GPU has not happened yet when the call returns. So
a request is committed *on a stream*: when the GPU has got there. It is the one
the caller names, else torch's current one; without torch the whole GPU is waited for.
"""

from __future__ import annotations

import ctypes
import math
import operator
import os
from ctypes import POINTER, addressof, c_char_p, c_int, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Any, Callable

import numpy as np

from .. import errors
from . import structs as c
from .library import check
from .tensors import Tensor

# By the names that tensors.py has: what __cuda_array_interface__, DLPack (code, bits) and torch say.
_KINDS: dict[str, tuple[str, tuple[int, int], str]] = {
    "bool": ("|b1", (6, 8), "bool"),
    "u8": ("|u1", (1, 8), "uint8"),
    "i8": ("|i1", (0, 8), "int8"),
    "i16": ("<i2", (0, 16), "int16"),
    "i32": ("<i4", (0, 32), "int32"),
    "i64": ("<i8", (0, 64), "int64"),
    "f16": ("<f2", (2, 16), "float16"),
    "bf16": ("<u2", (4, 16), "bfloat16"),  # the interface has no bfloat16: its bits
    "f32": ("<f4", (2, 32), "float32"),
    "f64": ("<f8", (2, 64), "float64"),
}


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


_unknown = object()
_torch: Any = _unknown


def _needed() -> Any:
    if torch() is None:
        raise errors.Invalid(
            "the rows of this batch lie apart, and PyTorch, which copies them together, is not installed: use batch.runs, input_run and "
            "output_run"
        )
    return torch()


class DeviceMemory:
    """The device memory of a ring, mapped into this process for as long as anything uses it."""

    def __init__(self, d: c.Device, memory: Any) -> None:
        self.base: int = d.base
        self.bytes: int = d.bytes
        #: Of the GPU in this process: torch's cuda:ordinal.
        self.ordinal: int = d.ordinal
        self.gpu: str = d.gpu.decode()
        self._context: int = d.context
        self._memory = memory  # what keeps the mapping

    def plane(self, t: Tensor, offset: int) -> Any:
        """All slots of a tensor (and what else lies behind them)."""
        rows = DeviceArray(self, self.base + offset, ((self.bytes - offset) // t.stride, *t.shape), t.kind)
        return rows if torch() is None else _tensor(rows)

    def has(self, at: int) -> bool:
        return self.base <= at < self.base + self.bytes

    def copy(self, at: int, shape: tuple[int, ...], kind: str) -> Any:
        """A copy of some rows, as a tensor of torch that every stream may read."""
        made = _tensor(DeviceArray(self, at, shape, kind)).clone()
        torch().cuda.current_stream(self.ordinal).synchronize()
        return made

    # For batches whose rows do not lie one after the other.

    def gather(self, plane: Any, slots: Any, padded: int) -> Any:
        """Rows of a plane in a tensor of their own, and zeros for the padding behind them."""
        numbers = self._numbers(slots)
        rows = plane.index_select(0, numbers)
        return rows if padded == len(slots) else _needed().cat([rows, rows.new_zeros((padded - len(slots), *rows.shape[1:]))])

    def empty(self, rows: int, t: Tensor) -> Any:
        found = _needed()
        return found.empty((rows, *t.shape), dtype=getattr(found, _KINDS[t.kind][2]), device=f"cuda:{self.ordinal}")

    def scatter(self, plane: Any, slots: Any, rows: Any) -> None:
        numbers = self._numbers(slots)
        plane.index_copy_(0, numbers, rows[: len(slots)])

    def _numbers(self, slots: Any) -> Any:
        return _needed().as_tensor(slots, device=f"cuda:{self.ordinal}")

    def stream(self, given: Any = None) -> int:
        """The stream that orders what was queued: the one given, or torch's current one. Without either everything is waited for."""
        if given is not None:
            return raw_stream(given)
        found = torch()
        if found is not None:
            return found._C._cuda_getCurrentRawStream(self.ordinal)  # current_stream() makes an object first, which takes 8 µs
        self.synchronize()
        return 0

    def synchronize(self) -> None:
        """Waits for everything that this process has queued on the GPU."""
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
    """That of a mapping, if it has any."""
    d = c.Device()
    d.size = ctypes.sizeof(d)
    check(lib, lib.rb_map_device(map_id, addressof(d)))
    return None if d.ordinal < 0 else DeviceMemory(d, memory)


def raw_stream(given: Any) -> int:
    """The CUstream of a stream of torch, of CuPy or of cuda.core; a number is one already."""
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

    ``torch.as_tensor(a, device="cuda")``, ``cupy.asarray(a)`` and ``from_dlpack``
    give arrays over the same memory.
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
        return math.prod(self.shape) * _KINDS[self.kind][1][1] // 8

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        self._check()
        return {"version": 3, "shape": self.shape, "typestr": _KINDS[self.kind][0], "data": (self._at, False), "strides": None,
            "stream": None}

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DL_CUDA, self._device.ordinal

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None) -> Any:
        """A capsule. Nothing is queued here that a consumer's stream would have to wait for."""
        self._check()
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("the rows stay where they are: take them as they are and copy them then")
        return _capsule(self)

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


_DL_CUDA = 2


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32), ("code", c_uint8), ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", c_void_p), ("strides", c_void_p), ("offset", c_uint64),
    ]  # fmt: skip


class _DLManaged(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, POINTER(_DLManaged))
_Destructor = ctypes.CFUNCTYPE(None, c_void_p)
_DLManaged._fields_ = [("tensor", _DLTensor), ("context", c_void_p), ("deleter", _Deleter)]
_lent: dict[int, tuple[Any, ...]] = {}  # what consumers hold, by the address of their struct


@_Deleter
def _give_back(managed: Any) -> None:
    _lent.pop(addressof(managed.contents), None)


@_Destructor
def _unused(capsule: int) -> None:
    """A capsule that nobody took: one that was taken has another name."""
    api = ctypes.pythonapi
    api.PyCapsule_IsValid.restype, api.PyCapsule_IsValid.argtypes = c_int, [c_void_p, c_char_p]
    api.PyCapsule_GetPointer.restype, api.PyCapsule_GetPointer.argtypes = c_void_p, [c_void_p, c_char_p]
    if api.PyCapsule_IsValid(capsule, _CAPSULE):
        _lent.pop(api.PyCapsule_GetPointer(capsule, _CAPSULE), None)


_CAPSULE = b"dltensor"  # the capsule keeps the address of the text


def _capsule(a: DeviceArray) -> Any:
    code, bits = _KINDS[a.kind][1]
    shape = (c_int64 * len(a.shape))(*a.shape)
    tensor = _DLTensor(a._at, _DL_CUDA, a._device.ordinal, len(a.shape), code, bits, 1, addressof(shape), None, 0)
    managed = _DLManaged(tensor, None, _give_back)
    at = addressof(managed)
    _lent[at] = managed, shape, a._device
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [c_void_p, c_char_p, c_void_p]
    return new(at, _CAPSULE, ctypes.cast(_unused, c_void_p))


# -- tensors of torch


def _tensor(rows: DeviceArray) -> Any:
    """A tensor over the rows; it keeps their memory mapped."""
    found = torch()
    kind = "i16" if rows.kind == "bf16" else rows.kind
    with found.inference_mode(False):  # its slices may be written, also outside of it
        plane = found.as_tensor(DeviceArray(rows._device, rows._at, rows.shape, kind), device=f"cuda:{rows._device.ordinal}")
        return plane.view(found.bfloat16) if kind != rows.kind else plane


def is_device_array(value: Any) -> bool:
    """Whether it lies in a GPU's memory: a tensor of torch there, an array of CuPy, a DeviceArray."""
    return hasattr(value, "__cuda_array_interface__") or getattr(value, "is_cuda", False)


def owned_rows(rows: Any) -> Any:
    """Rows that their user may write: of a tensor of torch a copy; without torch the rows themselves."""
    return rows if isinstance(rows, DeviceArray) else rows.clone()


def end_device_array(view: Any, error: Callable[[], errors.Error]) -> None:
    """What was handed out is over: it loses its memory. Slices that torch made of it keep the mapping, and see what is in the slot by
    then."""
    if isinstance(view, DeviceArray):
        view._over = error
    else:
        view.set_()


def convert_on_device(t: Tensor, value: Any, cast: bool, ordinal: int) -> Any:
    """What a caller passed for a tensor on the device, as a tensor of torch with its type there; or an error."""
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
    want = getattr(found, _KINDS[t.kind][2])
    if given.dtype == want or (cast and found.can_cast(given.dtype, want)):
        return given
    advice = f"Nothing is converted silently: pass x.to({want}), or connect with cast=True"
    if cast:
        advice = "cast=True converts only to a type of the same kind"
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
    if hasattr(value, "detach"):  # a tensor of torch
        value = value.detach().cpu()
        return value.view(torch().uint16).numpy() if t.kind == "bf16" and value.dtype == torch().bfloat16 else value
    return value.get() if hasattr(value, "get") else torch().as_tensor(value, device="cuda").cpu()  # of CuPy, or another


def concatenate(parts: Any) -> Any:
    return torch().cat(list(parts))
