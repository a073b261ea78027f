# SPDX-License-Identifier: Apache-2.0
"""Ends a worker whose GPU is lost.

Some CUDA errors are sticky: the context is dead, and every later call of the
process fails. Such a worker would fail batch after batch. It ends at once
without an answer, and the broker gives its batches to other workers.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

from .refusal import print_error


class Lost(RuntimeError):
    """The GPU or its context is gone: only a new process can go on."""


def lost(e: BaseException) -> Lost:
    """The error for a device that fails with e."""
    said = str(e).strip().splitlines() or ["no message"]
    return Lost(f"the GPU or its context was lost; this worker must be started again ({type(e).__name__}: {said[0]})")


def end_if_lost(e: BaseException) -> None:
    """Ends the process if a batch's error e, or the GPU itself, says that the GPU is lost."""
    found = e if isinstance(e, Lost) else _dead_context()
    if found is not None:
        end_process(found)


def end_process(why: Lost) -> NoReturn:
    """Exits at once: at the interpreter's end the driver's clean-up of a dead context can hang."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(Exception):
        print_error(f"ringbatch: worker {os.getpid()} ends: {why}")
    os._exit(1)


def _dead_context() -> Lost | None:
    """Synchronizes the GPUs that PyTorch uses in this process; the error if one is dead."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return None
    try:
        _synchronize(torch)
    except RuntimeError:
        try:
            _synchronize(torch)  # an error that is not sticky is reported once
        except RuntimeError as e:
            return lost(e)
    return None


def _synchronize(torch: object) -> None:
    """Skips GPUs without a context: synchronizing would create one."""
    cuda, has_context = torch.cuda, torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    for gpu in range(cuda.device_count()):
        if has_context(gpu):
            cuda.synchronize(gpu)
