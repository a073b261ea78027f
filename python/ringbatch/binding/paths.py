# SPDX-License-Identifier: Apache-2.0
"""Chooses one of the two paths to the C library.

``_quick`` is an extension of CPython. ctypes_path does the same over ctypes, if
the extension was not built or ``RINGBATCH_CTYPES=1`` is set.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from . import ctypes_path, library
from .views import committed, end_view, parents, released

if TYPE_CHECKING:
    from .ctypes_path import Caller, Client, Held, Stepper, complete_batch, copy_inputs, next_batch, write_outputs


def _quick() -> Any:
    """The extension, if it was built and knows the layout of arrays."""
    if os.environ.get("RINGBATCH_CTYPES"):
        return None
    try:
        quick: Any = importlib.import_module("ringbatch._quick")
    except ImportError:
        return None

    class Columns(quick.Columns, ctypes_path.ByName):  # type: ignore[misc]
        """The tensors of one side of a request by name; arrays are made when asked for."""

        __slots__ = ()

    probe = np.zeros((2, 3), np.float32)
    known = quick.setup(
        probe, probe.dtype, probe.__array_interface__["data"][0], probe.itemsize,
        np.ndarray, np.empty, Columns, end_view, library.nanoseconds, released, committed, parents,
    )  # fmt: skip
    return quick if known else None


quick = _quick()
if not TYPE_CHECKING:
    _taken = quick or ctypes_path
    Caller, Client, Held, Stepper = _taken.Caller, _taken.Client, _taken.Held, _taken.Stepper
    next_batch, copy_inputs, write_outputs, complete_batch = (
        _taken.next_batch, _taken.copy_inputs, _taken.write_outputs, _taken.complete_batch,
    )  # fmt: skip
library.use(quick)
