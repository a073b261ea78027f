# SPDX-License-Identifier: Apache-2.0
"""The folder where compiled code stays. Without torch: its own bytecode is kept there too, where Python keeps none."""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from pathlib import Path

from . import errors


def cache_folder() -> str:
    """The folder of compiled code; made if it is not there."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(given or os.path.join(base, "ringbatch", "torch"))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.geteuid() or about.st_mode & stat.S_IWOTH:
        raise errors.Invalid(f"{folder}: what lies here is run, and others may write it; name another folder in $TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return str(folder)


def keep_bytecode() -> None:
    """Before torch is imported, which takes three times as long where its bytecode is neither there nor kept, as in many images."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.cached is None or os.path.exists(torch.cached):
        return
    if not sys.dont_write_bytecode and (sys.pycache_prefix or os.access(os.path.dirname(torch.cached.replace("__pycache__", "")), os.W_OK)):
        return  # Python will
    try:
        prefix = os.path.join(cache_folder(), "bytecode")
    except (errors.Error, OSError):
        return  # who compiles will say so
    sys.pycache_prefix, sys.dont_write_bytecode = prefix, False
    os.environ["PYTHONPYCACHEPREFIX"] = prefix  # of the compiler's processes
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
