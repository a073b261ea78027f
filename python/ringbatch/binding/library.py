# SPDX-License-Identifier: Apache-2.0
"""The shared library: found at import, loaded at the first use."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path
from typing import Any

from .. import errors
from .structs import ABI_VERSION, PROTOTYPES

if not sys.platform.startswith("linux"):
    raise ImportError(f"ringbatch runs on Linux only: it shares sealed memory (memfd) and futexes between processes, which {sys.platform} "
        "has not")

_NATIVE = Path(__file__).parents[1] / "_native"


class Process:
    """Which process this is: a forked child keeps what its parent had apart from its own."""

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
    """Has the extension use the library too, once it is loaded."""
    global _quick
    _quick = quick


def library_path() -> str:
    """Where libringbatch.so is; $RINGBATCH_LIBRARY names another."""
    return os.environ.get("RINGBATCH_LIBRARY") or str(_NATIVE / "libringbatch.so")


def binary_path() -> str:
    """Where the ringbatch command is; $RINGBATCH_BINARY names another."""
    return os.environ.get("RINGBATCH_BINARY") or str(_NATIVE / "ringbatch")


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
                raise errors.Error(f"cannot load {library_path()}: {e}; reinstall ringbatch") from e
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
    """The library's, which is the package's."""
    return str(load().rb_version().decode())


def cores() -> int:
    """How many this process may use: by its affinity, or fewer by the CPU quota of its control group."""
    return int(load().rb_cores())


def encode(text: str | os.PathLike[str] | None) -> bytes | None:
    """A text or path for the C side."""
    return None if text is None else os.fsencode(text)


def last_error(lib: ctypes.CDLL, status: int) -> errors.Error:
    """The exception for what the last call of this thread returned."""
    return errors.error_for(status, lib.rb_error().decode("utf-8", "replace"))


def check(lib: ctypes.CDLL, status: int) -> None:
    """Raises unless the status is OK."""
    if status:
        raise last_error(lib, status)


# Blocking calls return when a signal's handler has run, and at least this often
# in case that was in another thread: so Python can handle signals.
SLICE_NS = 50_000_000
FOREVER_NS = 1 << 62


def nanoseconds(timeout: float | None) -> int:
    """A timeout of Python (None: none) for the C side, where 0 is none."""
    if timeout is None:
        return 0
    if timeout != timeout:
        raise errors.Invalid("a timeout is a number of seconds, or None; got nan")
    return max(1, int(min(timeout * 1e9, FOREVER_NS)))  # float("inf") is a timeout too
