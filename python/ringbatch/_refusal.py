# SPDX-License-Identifier: Apache-2.0
"""How a worker process tells who serves it that no other start would do better: what it is to serve is wrong.

The text goes through memory of the serving process, so that it arrives also where a broker starts the workers.
"""

from __future__ import annotations

import os
import sys

from . import errors

TOLD_AT = "RINGBATCH_REFUSAL"  # where a worker process writes it

LASTING = (errors.Invalid, errors.NoGPU, errors.WrongGPU)  # errors that do not go away by themselves


class Refusals:
    """Of the worker processes that this process serves with, until closed."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("ringbatch-refusal")
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def take(self) -> str:
        """The first that came since the last call; empty if none did."""
        if self._fd < 0 or not os.fstat(self._fd).st_size:
            return ""
        text = os.pread(self._fd, 1 << 16, 0).decode("utf-8", "replace")
        os.ftruncate(self._fd, 0)
        return text.partition("\n")[0]

    def close(self) -> None:
        """From here on worker processes say it in their own logs."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def refused(text: object) -> bool:
    """In a worker process: tells it to who serves; False if nobody wants to know, or not any more."""
    at = os.environ.get(TOLD_AT)
    if not at:
        return False
    try:
        fd = os.open(at, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(fd, " ".join(str(text).split()).encode("utf-8", "replace") + b"\n")
    finally:
        os.close(fd)
    return True


def report(command: str, target: object, e: BaseException, text: str) -> None:
    """Prints why a worker process ends, unless who serves it will."""
    said = str(e)
    if isinstance(e, LASTING) and refused(said if said.startswith(str(target)) else f"{target}: {said}"):
        return
    print(f"{command}: {text}", file=sys.stderr, flush=True)
