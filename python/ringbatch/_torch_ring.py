"""The ring as torch sees it: attached, pinned, its planes as tensors."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import _structs as c
from . import errors
from ._library import check, last_error, load

# By rb_dtype, from 1.
DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
          torch.float16, torch.bfloat16, torch.float32, torch.float64)  # fmt: skip
NAMES = ("bool", "u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64")

_TIMEOUT = 34  # RB_ERR_TIMEOUT

# So many runs of rows are copied one by one, which takes no multiprocessors
# from the batch that computes. More are gathered by a kernel: with 32 runs
# that is quicker. Where between the two the line is was not measured.
FEW_RUNS = 8


@dataclass
class Plane:
    """One tensor of the model, over all slots of the ring, a row per slot."""

    shape: tuple[int, ...]  # of the largest row
    variable: tuple[int, ...]  # its variable dimensions
    host: torch.Tensor  # [slots, elements]; the GPU knows it by the same address

    def __post_init__(self) -> None:
        self.base, self.stride = self.host.data_ptr(), self.host.stride(0) * self.host.element_size()  # in bytes

    def row_shape(self, dims: Sequence[int], at: int) -> tuple[int, ...]:
        """The shape of a row where the variable dimensions of its side are dims, its own from `at` on."""
        shape = list(self.shape)
        for n, i in enumerate(self.variable):
            shape[i] = dims[at + n]
        return tuple(shape)


@dataclass
class Rows:
    """A batch: which slots, and the shapes of its inputs."""

    rows: int
    slots: int  # address of the slot number of each row, 32 bits each, ascending
    runs: list[tuple[int, int, int]]  # of neighbouring slots: slot, row, rows; empty if there are more than FEW_RUNS
    shapes: list[tuple[int, ...]]
    handle: int = 0  # of the C batch; 0 if it is not one of a ring
    requests: int = 0
    output_dims: list[int] = field(default_factory=list)


class Memory:
    """Shared memory that a GPU may read and write in place."""

    def __init__(self, base: int, size: int, device: torch.device) -> None:
        self.base, self.size = base, size
        self.buffer = (ctypes.c_uint8 * size).from_address(base)
        self.registered = False
        if device.type == "cuda":
            # Once for the whole ring; from then on copies are asynchronous
            # and kernels reach it directly.
            status = int(torch.cuda.cudart().cudaHostRegister(base, size, 3))  # portable, mapped
            if status != 0:
                raise errors.NoMemory(f"cudaHostRegister of {size >> 20} MiB: error {status}")
            self.registered = True

    def plane(self, offset: int, slots: int, shape: tuple[int, ...], variable: tuple[int, ...], dtype: torch.dtype) -> Plane:
        count = math.prod(shape)
        host = torch.frombuffer(self.buffer, dtype=dtype, count=slots * count, offset=offset).view(slots, count)
        return Plane(shape, variable, host)

    def close(self) -> None:
        if self.registered:
            torch.cuda.cudart().cudaHostUnregister(self.base)
            self.registered = False


class Ring:
    """A worker's attachment."""

    def __init__(self, model: str, signature: str, device: torch.device, **options: Any) -> None:
        self.lib = load()
        o = c.WorkerOptions(size=ctypes.sizeof(c.WorkerOptions))
        for key, value in options.items():
            setattr(o, key, value.encode() if isinstance(value, str) else value)
        handle = ctypes.c_uint64()
        check(self.lib, self.lib.rb_worker_attach(model.encode(), signature.encode(), ctypes.byref(o), ctypes.byref(handle)))
        self.worker = handle.value
        about = c.Model()
        check(self.lib, self.lib.rb_worker_model(self.worker, ctypes.byref(about)))
        self.max_batch_size: int = about.max_batch_size
        self.map = c.Map()
        check(self.lib, self.lib.rb_worker_map(self.worker, ctypes.byref(self.map)))
        self.memory = Memory(self.map.base, self.map.bytes, device)
        self.inputs = [self._plane(c.INPUT, k, about.slots) for k in range(about.inputs)]
        self.outputs = [self._plane(c.OUTPUT, k, about.slots) for k in range(about.outputs)]
        self._next = ctypes.c_size_t()
        self._at = ctypes.addressof(self._next)
        # The usual case: all rows of the model have one shape.
        self._shapes = None if any(p.variable for p in self.inputs) else [p.shape for p in self.inputs]

    def _plane(self, side: int, k: int, slots: int) -> Plane:
        t = c.Tensor()
        check(self.lib, self.lib.rb_worker_tensor(self.worker, side, k, ctypes.byref(t)))
        shape = tuple(t.shape[: t.rank])
        variable = tuple(i for i in range(t.rank) if t.variable >> i & 1)
        return self.memory.plane(t.offset, slots, shape, variable, DTYPES[t.dtype - 1])

    def next(self, timeout_ns: int) -> Rows | None:
        """The next batch, or None if none comes in time."""
        status = self.lib.rb_worker_next(self.worker, timeout_ns, self._at)
        if status == _TIMEOUT:
            return None
        if status:
            raise last_error(self.lib, status)
        b = c.Batch.from_address(self._next.value)
        shapes = self._shapes or self._actual_shapes(b.dims)
        runs = [(r.slot, r.row, r.rows) for r in b.run[: b.runs]] if b.runs <= FEW_RUNS else []
        return Rows(b.rows, ctypes.addressof(b.slot.contents), runs, shapes, self._next.value, b.requests)

    def _actual_shapes(self, dims: Sequence[int]) -> list[tuple[int, ...]]:
        shapes, at = [], 0
        for p in self.inputs:
            shapes.append(p.row_shape(dims, at))
            at += len(p.variable)
        return shapes

    def complete(self, rows: Rows, failure: str = "") -> None:
        """Answers a batch."""
        if failure:
            self.lib.rb_batch_fail_all(rows.handle, failure.encode())
        elif rows.output_dims:
            dims = (ctypes.c_uint32 * len(rows.output_dims))(*rows.output_dims)
            for i in range(rows.requests):
                check(self.lib, self.lib.rb_batch_set_output_dims(rows.handle, i, dims, len(dims)))
        check(self.lib, self.lib.rb_batch_complete(rows.handle))

    def close(self) -> None:
        self.memory.close()
        self.lib.rb_worker_close(self.worker)
        self.lib.rb_map_release(self.map.id)
