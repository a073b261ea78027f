# SPDX-License-Identifier: Apache-2.0
"""Conversions that keep every value. Only rounding to a smaller float is allowed.

The same comparisons check arrays of NumPy and tensors of torch, also on a GPU.
"""

from __future__ import annotations

import math
import sys
from functools import cache
from typing import Any

import numpy as np

from .. import errors

# Bits of the exponent, significant bits, and whether there is a sign.
_TYPES = {
    "bool": (0, 1, 0), "uint8": (0, 8, 0), "uint16": (0, 16, 0), "uint32": (0, 32, 0), "uint64": (0, 64, 0),
    "int8": (0, 7, 1), "int16": (0, 15, 1), "int32": (0, 31, 1), "int64": (0, 63, 1),
    "float16": (5, 11, 1), "bfloat16": (8, 8, 1), "float32": (8, 24, 1), "float64": (11, 53, 1),
    "float8_e4m3fn": (4, 4, 1), "float8_e5m2": (5, 3, 1), "float8_e4m3fnuz": (4, 4, 1), "float8_e5m2fnuz": (5, 3, 1),
}  # fmt: skip


@cache
def added(name: str) -> np.dtype | None:
    """ml_dtypes' bfloat16 or float8, if it is installed: NumPy has none."""
    try:
        import ml_dtypes
    except ImportError:
        return None
    return np.dtype(getattr(ml_dtypes, name))


def as_array(value: Any) -> np.ndarray:
    """np.asarray, also of torch's bfloat16 and float8, and of lists of them."""
    try:
        return np.asarray(value)
    except TypeError:
        if isinstance(value, (list, tuple)):
            return np.stack([as_array(v) for v in value])
        name = str(getattr(value, "dtype", "")).rpartition("torch.")[2]
        if name not in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            raise
    found = added(name)
    if found is None:
        bits = ", or pass the bits, x.view(torch.uint16)" if name == "bfloat16" else ""
        raise errors.DType(f"NumPy has no {name}: pip install ml_dtypes{bits}")
    return value.view(getattr(sys.modules["torch"], f"uint{8 * value.element_size()}")).numpy().view(found)


def is_masked(value: Any) -> bool:
    """Whether it is a masked array. NumPy imports their module when one is made, which takes long."""
    return isinstance(value, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ()))


@cache
def _names(source: Any, target: Any) -> tuple[str, str, bool]:
    """The names of two types, and whether the second one holds all values of the first one."""
    a, b = (str(t).rpartition(".")[2] for t in (source, target))  # torch.int32
    return a, b, a in _TYPES and b in _TYPES and all(x <= y for x, y in zip(_TYPES[a], _TYPES[b]))


def _changes(given: Any, kept: Any, back: Any, source: str, target: str) -> Any:
    """Where a conversion changed more than a rounding. back: the converted values in their first type."""
    reads, writes = "float" in source, "float" in target
    if target == "float8_e4m3fn" and reads:  # it has no infinity: NumPy gives NaN, torch its largest number, 448
        return abs(given) > 464
    if reads and writes:
        return (abs(kept) == math.inf) & (abs(given) < math.inf)
    if reads == writes or target == "bool":
        return kept != given
    f, limit = (given, 2.0 ** _TYPES[target][1]) if reads else (kept, 2.0 ** _TYPES[source][1])
    return (abs(f) == math.inf) | (f != f) | (f >= limit) | (back != given)


def converted(array: np.ndarray, dtype: np.dtype, what: str = "the array") -> np.ndarray:
    """The array with another type; raises DType if that does not hold a value. An array of uint16 has the bits of bfloat16."""
    if array.dtype == dtype:
        return array
    if dtype.name == "bfloat16" and array.dtype == np.uint16:
        return array.view(dtype)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    source, target, exact = _names(array.dtype, dtype)
    if exact or (array.dtype.kind not in "iufc" and "float" not in source):  # NumPy has its own errors for texts and objects
        return array.astype(dtype)
    if array.dtype.kind == "c":
        raise errors.DType(f"{what}: {dtype} does not hold complex numbers")
    with np.errstate(all="ignore"):
        kept = array.astype(dtype)
        if array.dtype.kind == dtype.kind == "f" and np.isfinite(kept).all():
            return kept
        wrong = _changes(array, kept, kept.astype(array.dtype), source, target)
    if wrong.any():
        raise errors.DType(f"{what}: {target} does not hold {array[wrong][0]} ({source}); only floats are rounded, to smaller floats")
    return kept


def of_tensor(given: Any, dtype: Any) -> tuple[Any, Any]:
    """A tensor of torch with another type, and a tensor that says whether a value changed, or None if none can.
    It waits for nothing on a GPU."""
    if given.dtype == dtype:
        return given, None
    kept = given.to(dtype)
    source, target, exact = _names(given.dtype, dtype)
    if exact:
        return kept, None
    given, wide, back = (x.float() if "float8" in str(x.dtype) else x for x in (given, kept, kept.to(given.dtype)))
    return kept, _changes(given, wide, back, source, target).any()


def converted_tensor(given: Any, dtype: Any, what: str) -> Any:
    """The same as converted, for a tensor of torch. If a value may change, it waits for the GPU."""
    kept, wrong = of_tensor(given, dtype)
    if wrong is not None and bool(wrong):
        raise not_held(what, given.dtype, dtype)
    return kept


def not_held(what: str, source: Any, target: Any) -> errors.DType:
    return errors.DType(f"{what}: {target} does not hold a value of the {source}; only floats are rounded, to smaller floats")
