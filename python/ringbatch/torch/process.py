# SPDX-License-Identifier: Apache-2.0
"""Settings of a worker process before it serves: its device, its sleeps, its memory."""

from __future__ import annotations

import ctypes
import gc

import torch

from .. import errors


def short_sleeps() -> None:
    """Lets this thread sleep for microseconds: the kernel rounds up by 50 µs otherwise."""
    pr_set_timerslack = 29
    ctypes.CDLL(None).prctl(pr_set_timerslack, 1000, 0, 0, 0)


def settle_memory() -> None:
    """What was loaded stays: from here on the garbage collector need not look at it, batch after batch."""
    gc.collect()
    gc.freeze()


def device_of(given: str | torch.device | None) -> torch.device:
    """The device asked for, with its number; a GPU if there is one, where nobody asked."""
    device = torch.device(given or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise errors.NoGPU("no GPU here: PyTorch sees none")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
