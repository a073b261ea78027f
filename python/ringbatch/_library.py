"""The shared library: found at import, loaded at the first connection.

Not loading it earlier is what lets a process import ringbatch and fork as it
likes: only a process that has the library loaded must not fork and go on
using it in the child.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

from . import errors
from ._structs import ABI_VERSION, PROTOTYPES

_NATIVE = Path(__file__).with_name("_native")


class Process:
    """What fork has done to this process."""

    loaded = False
    forked = False  # the library was loaded before the fork: it cannot be used


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()
    Process.forked = Process.forked or Process.loaded


os.register_at_fork(after_in_child=_in_child)

_lock = threading.Lock()
_library: ctypes.CDLL | None = None


def library_path() -> str:
    """Where libringbatch.so is; $RINGBATCH_LIBRARY names another."""
    return os.environ.get("RINGBATCH_LIBRARY") or str(_NATIVE / "libringbatch.so")


def binary_path() -> str:
    """Where the ringbatch command is; $RINGBATCH_BINARY names another."""
    return os.environ.get("RINGBATCH_BINARY") or str(_NATIVE / "ringbatch")


def check_fork() -> None:
    if Process.forked:
        raise errors.Forked(
            "this process was forked after ringbatch had connected in its parent: connect in the children "
            "only, or start them by spawn or forkserver"
        )


def load() -> ctypes.CDLL:
    """Loads the library, once."""
    global _library
    check_fork()
    if _library is not None:
        return _library
    with _lock:
        if _library is None:
            try:
                lib = ctypes.CDLL(library_path())
            except OSError as e:
                raise errors.Error(f"cannot load {library_path()}: {e}; reinstall ringbatch") from e
            Process.loaded = True
            if lib.rb_abi_version() != ABI_VERSION:
                raise errors.Version(f"{library_path()} has ABI version {lib.rb_abi_version()}, this package needs {ABI_VERSION}")
            for name, (result, arguments) in PROTOTYPES.items():
                if not hasattr(lib, name):
                    raise errors.Version(f"{library_path()} is older than this package: it has no {name}")
                function = getattr(lib, name)
                function.restype, function.argtypes = result, arguments
            _library = lib
    return _library


def last_error(lib: ctypes.CDLL, status: int) -> errors.Error:
    """The exception for what the last call of this thread returned."""
    return errors.error_for(status, lib.rb_error().decode("utf-8", "replace"))


def check(lib: ctypes.CDLL, status: int) -> None:
    """Raises unless the status is OK."""
    if status:
        raise last_error(lib, status)


# Blocking calls return at least this often, so that Python can handle signals.
SLICE_NS = 50_000_000
FOREVER_NS = 1 << 62
