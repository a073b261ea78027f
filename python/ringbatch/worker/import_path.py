# SPDX-License-Identifier: Apache-2.0
"""Import paths, ``package.module:name``, and the names of models."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from .. import errors


def is_import_path(target: str) -> bool:
    """Whether the target is an import path and not a file."""
    module, colon, name = target.partition(":")
    return bool(colon) and not Path(target).exists() and all(part.isidentifier() for part in [*module.split("."), name])


def name_of(target: str) -> str:
    """The default name of a model."""
    path = Path(target)
    return target.partition(":")[2] if is_import_path(target) else path.resolve().name if path.is_dir() else path.stem


def imported(target: str) -> Any:
    """The object of an import path."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise errors.Invalid(f"{target}: an import path is 'package.module:name'")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, SyntaxError) as e:
        raise errors.Invalid(f"{target}: {e}") from e
