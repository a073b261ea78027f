# SPDX-License-Identifier: Apache-2.0
"""The shared library: found at import, loaded at the first use."""

from __future__ import annotations

import ctypes
import operator
import os
import re
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Union

from .. import errors
from .structs import ABI_VERSION, PROTOTYPES

if not sys.platform.startswith("linux"):
    raise ImportError(f"ringbatch runs on Linux only: it shares sealed memory (memfd) and futexes between processes, which {sys.platform} "
        "has not")

_NATIVE = Path(__file__).parents[1] / "_native"


class Process:
    """Counts forks: a forked child must not use its parent's objects."""

    generation = 0


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()
    Process.generation += 1
    if _quick is not None:
        _quick.forked()


os.register_at_fork(after_in_child=_in_child)

_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_quick: Any = None


def use(quick: Any) -> None:
    """Registers the extension, which gets the library when it is loaded."""
    global _quick
    _quick = quick


def library_path() -> str:
    """The path of libringbatch.so; $RINGBATCH_LIBRARY names another. Without a C compiler at the package's build it is the system's."""
    own = _NATIVE / "libringbatch.so"
    return os.environ.get("RINGBATCH_LIBRARY") or (str(own) if own.exists() else "libringbatch.so.1")


def binary_path() -> str:
    """The path of the ringbatch command; $RINGBATCH_BINARY names another."""
    path = os.environ.get("RINGBATCH_BINARY") or str(_NATIVE / "ringbatch")
    if not os.path.exists(path):
        raise errors.Error(f"there is no ringbatch command at {path}: a package that was built without Go has clients and workers only; "
            "install Go 1.26 and the package again, or name a command in $RINGBATCH_BINARY")
    return path


def load() -> ctypes.CDLL:
    """Loads the library, once."""
    global _library
    if _library is not None:
        return _library
    with _lock:
        if _library is None:
            try:
                lib = ctypes.CDLL(library_path())
            except OSError as e:
                raise errors.Error(f"cannot load {library_path()}: {e}; install a C compiler and ringbatch again, or the C library, or "
                    "name it in $RINGBATCH_LIBRARY") from e
            if lib.rb_abi_version() != ABI_VERSION:
                raise errors.Version(f"{library_path()} has ABI version {lib.rb_abi_version()}, this package needs {ABI_VERSION}")
            for name, (result, arguments) in PROTOTYPES.items():
                if not hasattr(lib, name):
                    raise errors.Version(f"{library_path()} is older than this package: it has no {name}")
                function = getattr(lib, name)
                function.restype, function.argtypes = result, arguments
            if _quick is not None:
                _quick.load(os.fsencode(library_path()))
            _library = lib
    return _library


def version() -> str:
    """The version of the library and the package."""
    return str(load().rb_version().decode())


def cores() -> int:
    """The cores that this process may use, by its affinity and the CPU quota of its control group."""
    return int(load().rb_cores())


def encode(text: str | os.PathLike[str] | None) -> bytes | None:
    """A text or path for the C side."""
    return None if text is None else os.fsencode(text)


def last_error(lib: ctypes.CDLL, status: int) -> errors.Error:
    """The exception for the status of this thread's last call."""
    return errors.error_for(status, lib.rb_error().decode("utf-8", "replace"))


def check(lib: ctypes.CDLL, status: int) -> None:
    """Raises unless the status is OK."""
    if status:
        raise last_error(lib, status)


# Blocking calls return after a signal, and at least this often, since the signal
# may have reached another thread: so Python can run its handlers.
SLICE_NS = 50_000_000
FOREVER_NS = 1 << 62


class Pauses:
    """The pauses between attempts: 2 ms, then twice as long each time, up to 0.2 s."""

    def __init__(self) -> None:
        self._next = 0.002

    def next(self, deadline: float | None = None) -> float | None:
        """In seconds; None if the next attempt would not come before the deadline."""
        pause, self._next = self._next, min(2 * self._next, 0.2)
        return pause if deadline is None or time.monotonic() + pause < deadline else None


# Seconds, a text like "5ms" or "1m30s", or a timedelta.
Duration = Union[float, str, timedelta]
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)"


def seconds(given: Duration) -> float:
    """A duration as a number of seconds; raises Invalid."""
    if isinstance(given, timedelta):
        return given.total_seconds()
    if isinstance(given, str) and re.fullmatch(f"({_PART})+", given):
        return sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, given))
    try:
        if isinstance(given, (bool, bytes, bytearray)):
            raise TypeError
        number = float(given)
    except (TypeError, ValueError):
        near = "".join(str(given).split()).lower()
        meant = f" (did you mean {near}?)" if re.fullmatch(f"({_PART})+", near) else ""
        raise errors.Invalid(f'"{given}" is not a duration: write 5ms, 1.5s, or seconds as a number{meant}') from None
    if number != number:  # a wait until then would not end
        raise errors.Invalid("a duration is a number of seconds, or None where there may be none; got nan")
    return number


def not_negative(what: str, given: Duration) -> float:
    """A duration of 0 or more as a number of seconds; raises Invalid."""
    if (length := seconds(given)) < 0:
        raise errors.Invalid(f"{what} is a duration of 0 or more, got {given!r}")
    return length


def whole(what: str, value: Any) -> int:
    """A whole number; raises Invalid."""
    try:
        return operator.index(value)
    except TypeError:
        raise errors.Invalid(f"{what} is a whole number, got {value!r}") from None


def nanoseconds(timeout: Duration | None) -> int:
    """A timeout of Python for the C side, where 0 is no timeout, as None is here."""
    if timeout is None:
        return 0
    return max(1, int(min(seconds(timeout) * 1e9, FOREVER_NS)))  # float("inf") is a timeout too
