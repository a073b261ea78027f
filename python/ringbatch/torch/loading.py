# SPDX-License-Identifier: Apache-2.0
"""Loads the module that ``ringbatch torch`` serves: a TorchScript file, an exported program (.pt2), or a Python object."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from .. import errors
from ..worker.import_path import imported
from ..worker.trust import descriptor_path, open_trusted
from .lanes import failure
from .planes import DTYPES, NAMES


def load(target: str, device: str) -> tuple[Callable[..., Any], list[str] | None]:
    """The module, and its inputs if the file has them."""
    if ":" in target and not Path(target).exists():
        return made(target), None
    with open_trusted(target) as f:
        return _exported(target, f, device) if Path(target).suffix == ".pt2" else (_scripted(target, f, device), None)


def _scripted(target: str, f: BinaryIO, device: str) -> Callable[..., Any]:
    try:
        return torch.jit.load(descriptor_path(f), map_location=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as e:
        _refuse_saved(target, f)
        raise errors.Invalid(
            f"{target} cannot be loaded as TorchScript (torch.jit.save): {failure(e)}. If torch.save wrote it, it has weights, or a "
            "pickle: write a function without arguments that makes the module and loads them, and serve that, package.module:name"
        ) from e


def _refuse_saved(target: str, f: BinaryIO) -> None:
    """Refuses a file of torch.save."""
    f.seek(0)
    names = {name.rpartition("/")[2] for name in zipfile.ZipFile(f).namelist()} if zipfile.is_zipfile(f) else set()
    if "data.pkl" in names and "constants.pkl" not in names:
        f.seek(0)
        try:
            found = torch.load(f, weights_only=True, map_location="meta")
            what = f"has {type(found).__name__}"
            if isinstance(found, Mapping) and found and all(isinstance(v, torch.Tensor) for v in found.values()):
                what = f"is a state_dict, the weights of a module without the module: {next(iter(found))} and {len(found) - 1} others"
        except Exception:  # it has other classes
            what = "is a pickle of a module or of other objects"
        raise errors.Invalid(
            f"{target} was written by torch.save and {what}. Save the module with "
            "torch.export.save (.pt2) or torch.jit.save, or serve a function that makes it and loads the weights, package.module:name"
        )


def made(target: str) -> Callable[..., Any]:
    """The torch.nn.Module of an import path, or of a function without arguments there."""
    found = imported(target)
    if isinstance(found, torch.nn.Module):
        return found
    if not callable(found):
        raise errors.Invalid(f"{target} is {found!r}: want a torch.nn.Module, or a function that makes one")
    made = found()
    if not callable(made):
        raise errors.Invalid(f"{target} made {made!r}: want a torch.nn.Module")
    return made


def is_exported(module: Any) -> bool:
    """Whether torch.export made the module: its mode, type and layout are fixed."""
    return isinstance(module, torch.fx.GraphModule)


def _exported(target: str, f: BinaryIO, device: str) -> tuple[Callable[..., Any], list[str]]:
    try:
        program = torch.export.load(f)
    except torch.OutOfMemoryError:
        raise
    except Exception as e:
        _refuse_saved(target, f)
        by = f"this PyTorch, {torch.__version__}"
        raise errors.Invalid(f"{target} is no file of torch.export.save that {by}, can load: {failure(e)}") from e
    if torch.device(device).type == "cuda":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    values = {n.name: n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"}
    return program.module(), [_spec(name, values[name]) for name in program.graph_signature.user_inputs if isinstance(name, str)]


def _spec(name: str, value: Any) -> str:
    """One row as a tensor's text; the first dimension is the batch."""
    batch, *dims = value.shape
    if isinstance(batch, int):
        raise errors.Invalid(
            f"input {name!r} was exported for batches of {batch} only: export it with dynamic_shapes="
            f"{{{name!r}: {{0: torch.export.Dim('batch')}}}}"
        )
    open_dims = [d for d in dims if not isinstance(d, int)]
    text = ",".join("?" if d in open_dims else str(d) for d in dims)
    return f"{name}:{NAMES[DTYPES.index(value.dtype)]}[{text}]"


def inputs_of(target: str, told: list[str] | None, given: list[str] | None, states: Sequence[str] = ()) -> list[str]:
    """The given inputs, or those of the file without the states."""
    if given:
        return given
    if told is None:
        raise errors.Invalid(f"{target} does not tell its inputs: name them, --input 'x:f32[3,224,224]'")
    told = [text for text in told if text.partition(":")[0] not in [state.partition(":")[0] for state in states]]
    if any("?" in text for text in told):
        raise errors.Invalid(f"{target} has inputs {' '.join(told)}: say how large the open dimensions (?) are at most, --input "
            "'tokens:i64[<=512]'")
    return told
