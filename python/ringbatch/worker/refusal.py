# SPDX-License-Identifier: Apache-2.0
"""How a worker process tells who serves it that no other start would do better: what it is to serve is wrong.

The text goes through memory of the serving process, so that it arrives also where a broker starts the workers.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from typing import NamedTuple

from .. import errors

TOLD_AT = "RINGBATCH_REFUSAL"  # where a worker process writes it, and which file is there

# Errors that do not go away by themselves. A missing GPU may: its driver is up later than we are.
LASTING = (errors.Invalid, errors.WrongGPU)

_MOST_BYTES = 1 << 20  # of refusals: thousands, and none was a reason to end

_ADD_SEALS, _SEAL_GROW, _SEAL_WRITE = 1033, 4, 8  # <linux/fcntl.h>: not every Python's fcntl has them

_told_at = os.environ.pop(TOLD_AT, "")  # what this process starts in turn is no worker process of that serve


class Refusal(NamedTuple):
    pid: int
    name: str  # that the broker gave the process; empty if no broker started it
    text: str


class Refusals:
    """Of the worker processes that this process serves with, at their first starts."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("ringbatch-refusal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._over = False
        self._read = 0  # bytes; what was read stays, since another process may be writing behind it
        self._told: list[Refusal] = []
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}:{_identity(self._fd)}"

    def take(self, pid: int | None = None) -> list[Refusal]:
        """Those that came since they were taken last; of one process, if a pid is given."""
        if not self._over and (size := os.fstat(self._fd).st_size) > self._read:
            told = os.pread(self._fd, size - self._read, self._read)
            whole = told[: told.rfind(b"\n") + 1]  # behind that one is being written
            self._read += len(whole)
            self._told += [Refusal(*json.loads(line)) for line in whole.splitlines()]
            if self._read > _MOST_BYTES:
                self.end()
        mine = [r for r in self._told if pid in (None, r.pid)]
        self._told = [r for r in self._told if r not in mine]
        return mine

    def end(self) -> None:
        """From here on worker processes say it in their own logs.
        The descriptor stays: they know its number, which another file would get."""
        if not self._over:
            fcntl.fcntl(self._fd, _ADD_SEALS, _SEAL_GROW | _SEAL_WRITE)
            self._over = True

    def close(self) -> None:
        """Once the worker processes are gone."""
        os.close(self._fd)


def _identity(fd: int) -> str:
    s = os.fstat(fd)
    return f"{s.st_dev}:{s.st_ino}"


def attached() -> None:
    """In a worker process: it has served, so what ends it from here on is no verdict about what it serves."""
    global _told_at
    _told_at = ""


def refused(text: object) -> bool:
    """In a worker process: tells it to who serves; False if nobody wants to know, or not any more."""
    path, _, identity = _told_at.partition(":")
    if not path:
        return False
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if _identity(fd) != identity:
            return False  # another process has the number, or another file
        told = Refusal(os.getpid(), os.environ.get("RINGBATCH_WORKER_NAME", ""), " ".join(str(text).split()))
        os.write(fd, json.dumps(told).encode() + b"\n")
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def report(command: str, target: object, e: BaseException, text: str) -> None:
    """Prints why a worker process ends, unless who serves it will."""
    said = str(e)
    if isinstance(e, LASTING) and refused(said if said.startswith(str(target)) else f"{target}: {said}"):
        return
    print(f"{command}: {text}", file=sys.stderr, flush=True)
