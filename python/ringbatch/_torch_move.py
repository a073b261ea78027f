"""The kernels of the native GPU worker that move rows, launched from Python.

torch has kernels of its own that could (index_select, index_copy_), but they
fill the whole GPU with threads that wait for the bus. These use a few blocks,
and leave the rest to the batch that computes meanwhile.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

BLOCKS, THREADS, CHUNK = 48, 512, 16384  # as worker/cuda/lane.go has them


class Mover:
    """The kernels of worker/cuda/kernels/move.cu, in the current CUDA context."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        ptx = Path(__file__).with_name("_move.ptx").read_bytes()
        self.module = ctypes.c_void_p()
        self._check("cuModuleLoadData", self.driver.cuModuleLoadData(ctypes.byref(self.module), ptx))
        self._gather, self._scatter = self._function("rb_gather"), self._function("rb_scatter")

    def _function(self, name: str) -> ctypes.c_void_p:
        f = ctypes.c_void_p()
        self._check("cuModuleGetFunction", self.driver.cuModuleGetFunction(ctypes.byref(f), self.module, name.encode()))
        return f

    def _check(self, call: str, status: int) -> None:
        if status:
            name = ctypes.c_char_p()
            self.driver.cuGetErrorName(status, ctypes.byref(name))
            raise RuntimeError(f"{call}: {(name.value or b'CUDA error').decode()}")

    def _launch(self, function: ctypes.c_void_p, stream: Any, units: int, *args: int) -> None:
        values = (ctypes.c_uint64 * len(args))(*args)
        first = ctypes.addressof(values)
        places = (ctypes.c_void_p * len(args))(*range(first, first + 8 * len(args), 8))
        status = self.driver.cuLaunchKernel(function, min(units, BLOCKS), 1, 1, THREADS, 1, 1, 0, ctypes.c_void_p(stream.cuda_stream), places, None)
        self._check("cuLaunchKernel", status)

    def gather(self, stream: Any, to: int, plane: int, stride: int, slots: int, row_bytes: int, rows: int) -> None:
        """Rows of a plane, by slot number, one after the other to device memory."""
        self._launch(self._gather, stream, rows * -(-row_bytes // CHUNK), to, row_bytes, plane, stride, slots, row_bytes, rows, rows)

    def scatter(self, stream: Any, plane: int, stride: int, source: int, slots: int, row_bytes: int, rows: int) -> None:
        """The way back."""
        self._launch(self._scatter, stream, rows * -(-row_bytes // CHUNK), plane, stride, source, row_bytes, slots, row_bytes, rows)
