# SPDX-License-Identifier: Apache-2.0
"""Refusals: a worker process reports to the serving process that its target is wrong, and that no restart helps.

The text goes through memory of the serving process, so that it also arrives if a broker starts the workers.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from .. import errors

TOLD_AT = "RINGBATCH_REFUSAL"  # the file to write to, and its identity

# Errors that stay. A missing GPU may appear: its driver may start later than the worker.
LASTING = (errors.Invalid, errors.WrongGPU)

_MOST_BYTES = 1 << 20  # then refusals are no longer read

_ADD_SEALS, _SEAL_GROW, _SEAL_WRITE = 1033, 4, 8  # <linux/fcntl.h>: not every Python's fcntl has them

# Not for processes that this process starts.
_told_at = os.environ.pop(TOLD_AT, "")


class Refusal(NamedTuple):
    name: str  # of the process, by its supervisor
    text: str  # empty: the process has attached


class Refusals:
    """The refusals of this serving process's workers, at their first starts."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("ringbatch-refusal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.over = False
        self._read = 0  # bytes; they stay in the file, since a worker may be appending
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}:{_identity(self._fd)}"

    def take(self) -> list[Refusal]:
        """The refusals since the last call."""
        if self.over or (size := os.fstat(self._fd).st_size) <= self._read:
            return []
        told = os.pread(self._fd, size - self._read, self._read)
        whole = told[: told.rfind(b"\n") + 1]  # the rest is being written
        self._read += len(whole)
        if self._read > _MOST_BYTES:
            self.end()
        return [Refusal(*json.loads(line)) for line in whole.splitlines()]

    def end(self) -> None:
        """From here on workers log their refusals. The descriptor stays open: workers know its number."""
        if not self.over:
            fcntl.fcntl(self._fd, _ADD_SEALS, _SEAL_GROW | _SEAL_WRITE)
            self.over = True

    def close(self) -> None:
        """Once the worker processes are gone."""
        os.close(self._fd)


def _identity(fd: int) -> str:
    s = os.fstat(fd)
    return f"{s.st_dev}:{s.st_ino}"


def attached() -> None:
    """In a worker process: it serves, so a later error does not condemn its target."""
    global _told_at
    _tell("")
    _told_at = ""


def refused(text: object) -> bool:
    """In a worker process: reports to the serving process; False if none listens."""
    return _tell(" ".join(str(text).split()) or "refused")


def _tell(text: str) -> bool:
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
        os.write(fd, json.dumps(Refusal(os.environ.get("RINGBATCH_WORKER_NAME", ""), text)).encode() + b"\n")
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


_Function = TypeVar("_Function", bound=Callable[..., Any])

# Flags of a command as arguments of serve.
_ARGUMENTS = ((r"--(args|task) ([\w,]+)", r'\1="\2"'), (r"--dim ([\w.]+)=('[^']*'|\d+)", r'dims={"\1": \2}'),
    (r"--([a-z]+)-([a-z]+)(?:-([a-z]+))?", lambda m: "--" + "_".join(filter(None, m.groups()))),
    (r"--no_buckets\b", "pad_sizes=False"), (r"--no_(\w+)", r"\1=False"), (r"--(input|output) (NAME|'[^']*')", r"\1s=[\2]"),
    (r"--(input|output|dim|provider)\b", r"\1s"),
    (r"--buckets\.([\w.]+)=([\d,]+)", r'buckets={"\1": [\2]}'), (r"--(\w+)[ =](?=[\d'A-Z])", r"\1="), (r"--(\w)", r"\1"))  # fmt: skip


_in_python = ContextVar("_in_python", default=False)


def for_python(function: _Function) -> _Function:
    """The function for callers in Python: its errors and notes name arguments and not the flags of a command."""

    @wraps(function)
    def called(*given: Any, **named: Any) -> Any:
        before = _in_python.set(True)
        try:
            return function(*given, **named)
        except errors.Error as e:
            e.args = (_with_arguments(str(e)),)
            raise
        finally:
            _in_python.reset(before)

    return called  # type: ignore[return-value]


def _with_arguments(text: str) -> str:
    for flag, argument in _ARGUMENTS:
        text = re.sub(r"(?<![\w/.-])" + flag, argument, text)  # models--bert is the name of a folder
    return text


def note(text: str) -> None:
    """Prints a note on standard error."""
    print(f"note: {_with_arguments(text) if _in_python.get() else text}", file=sys.stderr, flush=True)


def report(command: str, target: object, e: BaseException, text: str) -> None:
    """Prints why a worker process ends, unless the serving process will."""
    said = str(e)
    if isinstance(e, LASTING) and refused(said if said.startswith(str(target)) else f"{target}: {said}"):
        return
    print_error(f"{command}: {text}")


def print_error(text: str) -> None:
    """On standard error; below a broker with the level that its log takes the line for."""
    print(f"{'ERROR ' * ('RINGBATCH_WORKER_NAME' in os.environ)}{text}", file=sys.stderr, flush=True)
