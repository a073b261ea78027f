# SPDX-License-Identifier: Apache-2.0
"""Settings of a worker process: its device, sleeps and memory."""

from __future__ import annotations

import ctypes
import gc

import torch

from .. import errors


def short_sleeps() -> None:
    """Lets this thread sleep for microseconds: by default the kernel adds 50 µs."""
    pr_set_timerslack = 29
    ctypes.CDLL(None).prctl(pr_set_timerslack, 1000, 0, 0, 0)


def settle_memory() -> None:
    """Takes loaded objects out of later garbage collections."""
    gc.collect()
    gc.freeze()


def device_of(given: str | torch.device | None) -> torch.device:
    """The given device with its number; by default a GPU if there is one."""
    device = torch.device(given or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise errors.NoGPU("no GPU here: PyTorch sees none")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
