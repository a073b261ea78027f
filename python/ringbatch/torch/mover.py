# SPDX-License-Identifier: Apache-2.0
"""Moves rows between the ring, in host or device memory, and the GPU's buffers, launched from Python.

torch's kernels (index_select, index_copy_) fill the whole GPU with threads that wait
for the bus. These kernels, of the native worker, use a few blocks and leave the rest
to the computing batch. Calls go straight to the driver, to save microseconds.
"""

from __future__ import annotations

import ctypes
from ctypes import c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any

BLOCKS, THREADS, CHUNK = 48, 512, 16384  # the same as in worker/cuda/lane.go
DEVICE_BLOCKS = 264  # within device memory no kernel waits for the bus: as many as fit


def _kernels() -> Path:
    """worker/cuda/kernels/move.ptx: of the wheel, or of the checkout in which this package lies."""
    package = Path(__file__).parents[1]
    installed = package / "_native" / "move.ptx"
    return installed if installed.exists() else package.parents[1] / "worker" / "cuda" / "kernels" / "move.ptx"


class Kernel:
    """A kernel whose arguments have 64 bits each; the driver copies them at the launch."""

    def __init__(self, mover: Mover, name: str, count: int) -> None:
        self.mover, self.function = mover, c_void_p()
        mover.check("cuModuleGetFunction", mover.driver.cuModuleGetFunction(ctypes.byref(self.function), mover.module, name.encode()))
        self.values: Any = (c_uint64 * count)()
        first = ctypes.addressof(self.values)
        self.places = (c_void_p * count)(*range(first, first + 8 * count, 8))

    def __call__(self, stream: int, blocks: int, *arguments: int) -> None:
        self.values[:] = arguments
        status = self.mover.launch(self.function, blocks, 1, 1, THREADS, 1, 1, 0, stream, self.places, None)
        if status:
            self.mover.check("cuLaunchKernel", status)


class Mover:
    """The kernels of worker/cuda/kernels/move.cu, in the current CUDA context. Streams are addresses."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        ptx = _kernels().read_bytes()
        self.module = c_void_p()
        self.check("cuModuleLoadData", self.driver.cuModuleLoadData(ctypes.byref(self.module), ptx))
        self.launch = self.driver.cuLaunchKernel
        self.launch.argtypes = [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p]
        self._copy = self.driver.cuMemcpyAsync
        self._copy.argtypes = [c_uint64, c_uint64, ctypes.c_size_t, c_void_p]
        self._gather, self._scatter = Kernel(self, "rb_gather", 8), Kernel(self, "rb_scatter", 7)
        self._gather_packed = Kernel(self, "rb_gather_packed", 9)

    def check(self, call: str, status: int) -> None:
        if status:
            name = ctypes.c_char_p()
            self.driver.cuGetErrorName(status, ctypes.byref(name))
            raise RuntimeError(f"{call}: {(name.value or b'CUDA error').decode()}")

    def copy(self, stream: int, to: int, source: int, size: int) -> None:
        """Copies adjacent rows, either way."""
        status = self._copy(to, source, size, stream)
        if status:
            self.check("cuMemcpyAsync", status)

    def gather(self, stream: int, to: int, plane: int, stride: int, slots: int, row_bytes: int, rows: int, on_device: bool = False) -> None:
        """Copies rows of a plane, by slot number, to adjacent rows in device memory."""
        self._gather(stream, _blocks(rows, row_bytes, on_device), to, row_bytes, plane, stride, slots, row_bytes, rows, rows)

    def gather_packed(self, stream: int, to: int, plane: int, stride: int, slots: int, offsets: int, item_bytes: int, rows: int,
            most_bytes: int, padded: int, on_device: bool = False) -> None:
        """Copies rows of different sizes, one behind the other, and clears the items behind them up to `padded`."""
        blocks = min(rows * -(-most_bytes // CHUNK) + 1, DEVICE_BLOCKS if on_device else BLOCKS)
        self._gather_packed(stream, blocks, to, plane, stride, slots, offsets, item_bytes, rows, most_bytes, padded)

    def scatter(self, stream: int, plane: int, stride: int, source: int, slots: int, row_bytes: int, rows: int,
            on_device: bool = False) -> None:
        """Copies adjacent rows in device memory to their slots."""
        self._scatter(stream, _blocks(rows, row_bytes, on_device), plane, stride, source, row_bytes, slots, row_bytes, rows)


def _blocks(rows: int, row_bytes: int, on_device: bool) -> int:
    return min(rows * -(-row_bytes // CHUNK), DEVICE_BLOCKS if on_device else BLOCKS)
