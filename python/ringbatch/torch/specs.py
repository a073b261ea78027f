# SPDX-License-Identifier: Apache-2.0
"""Tensors as texts, ``x:f32[3,<=224]``, with the types of torch."""

from __future__ import annotations

import re

import torch

from .. import errors
from ..binding.tensors import in_memory
from ..worker.axes import Input
from .planes import DTYPES, NAMES


def parse_spec(text: str) -> tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...]]:
    """x:f32[3,<=224] as name, dtype, largest shape, variable dimensions."""
    m = re.fullmatch(r"([^:\[\]]+):(\w+)\[([\d,<=\s]*)\](@\w+(:\d+)?)?", text.strip())
    if not m or m[2] not in NAMES:
        raise errors.Invalid(f"tensor {text!r}: want name:dtype[dims], like x:f32[3,224,224]")
    dims = [d.strip() for d in m[3].split(",") if d.strip()]
    shape = tuple(int(d.removeprefix("<=")) for d in dims)
    return m[1], DTYPES[NAMES.index(m[2])], shape, tuple(i for i, d in enumerate(dims) if d.startswith("<="))


def placed(text: str, memory: str | None, device: torch.device) -> str:
    """A tensor's text with where it lies: on the module's own GPU, if on any."""
    text = in_memory(text.strip(), memory)
    base, at, named = text.partition("@")
    if not at or named == "host":
        return base
    if device.type != "cuda":
        raise errors.NoGPU(f"tensor {base} in device memory: the module is on the {device}, and such memory is for modules on a GPU")
    if named not in ("device", f"device:{device.index}"):
        raise errors.WrongGPU(f"tensor {base} in the memory of {named}: the module is on cuda:{device.index}, and its tensors must be too")
    return f"{base}@device:{device.index}"


def input_of(text: str) -> Input:
    """Variable dimensions of one size go together: tokens:i64[<=512] and mask:i64[<=512] are as long as each other."""
    name, dtype, shape, variable = parse_spec(text)
    return Input(name, NAMES[DTYPES.index(dtype)], shape, variable, tuple(f"<={shape[d]}" for d in variable))
