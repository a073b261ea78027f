# SPDX-License-Identifier: Apache-2.0
"""The kinds of models that ``ringbatch serve`` takes, and the command that serves each."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .. import errors
from ..worker.import_path import is_import_path
from .supervisor import share_of_cores

# By the end of the file's name: the module of this package that serves it.
KINDS = {
    ".pt": "torch", ".pt2": "torch", ".pth": "torch", ".jit": "torch", ".torchscript": "torch",
    ".onnx": "onnx",
    ".joblib": "object", ".pkl": "object", ".pickle": "object",
}  # fmt: skip
READY_S = 5.0


def kind_of(target: str) -> str:
    """torch, onnx or object."""
    if is_import_path(target):
        return "object"
    kind = KINDS.get(Path(target).suffix.lower())
    if kind is None:
        raise errors.Invalid(f"{target}: want a file that ends in {', '.join(KINDS)}, or an import path, package.module:name")
    if not Path(target).exists():
        raise errors.Invalid(f"{target}: there is no such file")
    return kind


def command(kind: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"ringbatch.serve.{kind}_cli", *arguments]


def share_cores(processes: int) -> None:
    """Each process computes with its share of the cores, unless $OMP_NUM_THREADS is set."""
    os.environ.setdefault("OMP_NUM_THREADS", share_of_cores(processes))
