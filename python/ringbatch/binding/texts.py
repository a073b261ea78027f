# SPDX-License-Identifier: Apache-2.0
"""Texts: ``str`` of Python as the memory of a str tensor, and back.

The last dimension of the tensor is the memory of one text: UTF-8, which has no byte
0xff, and such bytes behind a text that is shorter.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import errors
from .casting import is_masked

#: The type of the arrays of texts. No array of a caller has it: texts come from encode.
BYTE = np.dtype([("utf8", "u1")])
END = np.frombuffer(b"\xff", BYTE)[0]
_END = b"\xff"


def encode(value: Any, t: Any, side: str) -> np.ndarray:
    """A str, or nested lists or an array of them, as the memory of a Tensor: of one item, or of rows."""
    if getattr(value, "dtype", None) is BYTE:
        return value
    shape, flat = _flat(value, t, side)
    most = t.shape[-1]
    each = [_bytes(text, t, side, most) for text in flat]
    return np.frombuffer(bytearray().join(each), BYTE).reshape(*shape, most)


def _flat(value: Any, t: Any, side: str) -> tuple[tuple[int, ...], list[Any]]:
    """The shape of nested lists, and what is in them."""
    if hasattr(value, "__array__") and not isinstance(value, str):
        if is_masked(value):
            raise errors.Invalid(f"{side} {t.name!r}: a masked array has no texts where it is masked: fill it first, with filled(...)")
        array = np.asarray(value)
        if array.dtype.kind not in "OUT":
            raise errors.DType(f"{side} {t.name!r}: expected {t.expected}; got an array of {array.dtype}")
        return array.shape, array.ravel().tolist()
    if not isinstance(value, (list, tuple)):
        return (), [value]
    parts = [_flat(v, t, side) for v in value]
    if len({shape for shape, _ in parts}) > 1:
        raise errors.Shape(f"{side} {t.name!r}: expected {t.expected}; got lists of different lengths, or lists beside str")
    return (len(parts), *(parts[0][0] if parts else ())), [text for _, flat in parts for text in flat]


def _bytes(text: Any, t: Any, side: str, most: int) -> bytes:
    if not isinstance(text, str):
        advice = "; pass text.decode()" if isinstance(text, (bytes, bytearray)) else ""
        raise errors.DType(f"{side} {t.name!r}: expected {t.expected}; got {type(text).__name__}{advice}")
    try:
        data = text.encode()
    except UnicodeEncodeError as e:
        raise errors.DType(f"{side} {t.name!r}: a str that UTF-8 cannot have: {e.reason} at {e.start}") from None
    if len(data) > most:
        n = len(data)
        raise errors.Size(f"{side} {t.name!r}: a str of {n} bytes of UTF-8, at most {most}: shorten it, or declare str[<={n}]")
    return data.ljust(most, _END)


def decode(array: np.ndarray, t: Any) -> Any:
    """The str of one text, or nested lists of them."""
    most, data = array.shape[-1], array.tobytes()
    flat: list[Any] = [_text(data, at, most, t) for at in range(0, len(data), most)]
    for n in array.shape[-2:0:-1]:
        flat = [flat[i : i + n] for i in range(0, len(flat), n)]
    return flat if array.ndim > 1 else flat[0]


def _text(data: bytes, at: int, most: int, t: Any) -> str:
    end = data.find(_END, at, at + most)
    try:
        return data[at : at + most if end < 0 else end].decode()
    except UnicodeDecodeError:
        raise errors.DType(f"{t.name!r}: the text of row {at // t.row_bytes} is not UTF-8") from None
