# SPDX-License-Identifier: Apache-2.0
"""The folder where compiled code stays. Without torch: its own bytecode is kept there too, where Python keeps none."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from .. import errors
from .trust import refuse_way_of_others


def cache_folder() -> str:
    """The folder of compiled code; made if it is not there."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(given or os.path.join(base, "ringbatch", "torch"))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        refuse_way_of_others(folder)
    except errors.Invalid as e:
        raise errors.Invalid(f"{e}; name another folder for compiled code in $TORCHINDUCTOR_CACHE_DIR") from None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return str(folder)


@contextlib.contextmanager
def kept_bytecode() -> Iterator[None]:
    """Keeps the bytecode of what is imported in here, where that of torch is neither there nor would be, as in many images.
    Importing it takes three times as long then. For torch's own modules: bytecode of a user's is taken for that of another
    file with the same time and size."""
    prefix = _bytecode_folder()
    if prefix is None:
        yield
        return
    before, environment = (sys.pycache_prefix, sys.dont_write_bytecode), {name: os.environ.get(name) for name in _ABOUT_BYTECODE}
    sys.pycache_prefix, sys.dont_write_bytecode = prefix, False
    os.environ["PYTHONPYCACHEPREFIX"] = prefix  # of the compiler's processes
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        yield
    finally:
        sys.pycache_prefix, sys.dont_write_bytecode = before
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


_ABOUT_BYTECODE = ("PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE")


def _bytecode_folder() -> str | None:
    """None: Python has torch's bytecode, or will keep it by itself, or there is no folder for it."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.cached is None or os.path.exists(torch.cached):
        return None
    if not sys.dont_write_bytecode and (sys.pycache_prefix or os.access(os.path.dirname(torch.cached.replace("__pycache__", "")), os.W_OK)):
        return None
    try:
        return os.path.join(cache_folder(), "bytecode")
    except (errors.Error, OSError):
        return None  # who compiles will say so
