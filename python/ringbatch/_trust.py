# SPDX-License-Identifier: Apache-2.0
"""Whose files are loaded: a model file can hold code, and loading it runs that."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from . import errors

WARNING = "a pickle (.pkl, .joblib, and what is inside .pt2) can run any code when it is loaded: serve only files that you trust"


def refuse_writable_by_others(path: Path) -> None:
    """Raises if everybody on this host could have written the file, or put another in its place."""
    try:
        mode = path.stat().st_mode
    except OSError as e:
        raise errors.Invalid(f"{path}: {e.strerror}") from None
    if stat.S_ISDIR(mode):
        raise errors.Invalid(f"{path} is a folder, not a model's file")
    if mode & stat.S_IWOTH:
        raise errors.Invalid(f"{path}: everybody may write this file, and loading it may run what they wrote: chmod o-w {path}")
    folder = Path(os.path.realpath(path)).parent
    held = folder.stat().st_mode
    if held & stat.S_IWOTH and not held & stat.S_ISVTX:
        raise errors.Invalid(f"{path}: everybody may replace files in {folder}, and loading one may run what they wrote: chmod o-w {folder}, or move the file")
