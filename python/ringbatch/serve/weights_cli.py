# SPDX-License-Identifier: Apache-2.0
"""``python -m ringbatch weights load MODEL FILE``: publishes the tensors of a .safetensors or .npz file as a new version."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import errors
from ..weights.publishing import publisher
from ..worker.trust import open_trusted

_DTYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
    "BF16": "<i2", "F8_E4M3": "u1", "F8_E5M2": "u1",
}  # fmt: skip
_TORCH = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


def read(path: str) -> dict[str, Any]:
    """The tensors of a file by name."""
    with open_trusted(path) as f:
        try:
            if path.endswith(".npz"):
                return dict(np.load(f, allow_pickle=False))
            return _safetensors(f.read())
        except (ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as e:
            raise errors.Invalid(f"{path}: want a .safetensors or .npz file of tensors: {type(e).__name__}: {e}") from e


def _safetensors(data: bytes) -> dict[str, Any]:
    """The tensors must cover the data exactly, as in the reference implementation: no hole, none overlapping."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    found, at = {}, start
    for name, t in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        a = np.frombuffer(data, _DTYPES[t["dtype"]], math.prod(t["shape"]), at).reshape(t["shape"])
        if t["data_offsets"] != [at - start, at - start + a.nbytes]:
            raise ValueError(f"{name!r} has {a.nbytes} bytes at {at - start}, and its data_offsets are {t['data_offsets']}")
        found[name] = _of_torch(a, _TORCH[t["dtype"]]) if t["dtype"] in _TORCH else a
        at += a.nbytes
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes after the last tensor")
    return found


def _of_torch(a: np.ndarray, name: str) -> Any:
    try:
        import torch
    except ModuleNotFoundError:
        raise errors.Invalid(f"{name} tensors need the package torch: pip install torch") from None
    return torch.from_numpy(a.copy()).view(getattr(torch, name))


def main(argv: Sequence[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m ringbatch weights load", allow_abbrev=False, description=__doc__)
    p.add_argument("model")
    p.add_argument("file")
    p.add_argument("--socket", help="the broker's control socket")
    p.add_argument("--wait", default=10.0, type=float, help="seconds to wait for a broker, and for a worker that follows (default 10)")
    a = p.parse_args(argv)
    try:
        tensors = read(os.fspath(a.file))
        with publisher(a.model, tensors, socket=a.socket, name="weights load", wait=a.wait) as target:
            print(f"{a.model} has version {target.publish(tensors)}")
    except errors.Error as e:
        print(f"{p.prog}: {e}", file=sys.stderr)
        return 1
    return 0
