# SPDX-License-Identifier: Apache-2.0
"""A text that changes with all that a module computes with: weights, settings, sources."""

from __future__ import annotations

import enum
import functools
import hashlib
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .compiling import code_text

_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module())) - {"training"}
_TOLD_BY_REPR = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)
_NO_STATE = (type(None), type, types.ModuleType)  # what a function of C may belong to, and no text need tell
_OURS = ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS")  # these change nothing of the code


class Untold(Exception):
    """Something in a module that no text tells: it may be another at the next start."""


def fingerprint(module: torch.nn.Module) -> str | Untold:
    """The same in another process."""
    found = hashlib.sha256()
    try:
        for line in (*_about_torch(), *_sources(module), *_parts(module)):
            found.update(line.encode() + b"\n")
    except Untold as e:
        return e
    except Exception as e:  # a module may have anything in it
        return Untold(f"{type(e).__name__}: {e}")
    return found.hexdigest()


def _about_torch() -> Iterator[str]:
    precision = f"{torch.get_float32_matmul_precision()} {torch.are_deterministic_algorithms_enabled()}"
    yield f"{torch.__version__} {torch.version.git_version} {precision}"
    yield repr(sorted((k, v) for k, v in os.environ.items() if k.startswith("TORCHINDUCTOR_") and k not in _OURS))


def _sources(module: torch.nn.Module) -> Iterator[str]:
    """Of all modules of Python that are loaded, since a forward may call into any: but Python's own and PyTorch's."""
    for part in module.modules():
        named = type(part).__module__
        if getattr(sys.modules.get(named), "__file__", None) is None:
            raise Untold(f"{type(part).__qualname__} is of {named}, which has no file")
    ours = str(Path(__file__).parents[1]) + os.sep  # is not part of the code, but calls it
    python = sysconfig.get_path("stdlib") + os.sep
    for name, loaded in sorted(sys.modules.items()):
        file = getattr(loaded, "__file__", None)
        of_python = file and file.startswith(python) and "-packages" + os.sep not in file
        if not file or of_python or name.split(".")[0] == "torch" or file.startswith(ours):
            continue
        try:
            content = Path(file).read_bytes() if file.endswith(".py") else f"{os.stat(file).st_size} {os.stat(file).st_mtime_ns}".encode()
        except OSError:
            continue  # in an archive: its neighbours tell
        yield f"{name} {hashlib.sha256(content).hexdigest()}"


def _parts(module: torch.nn.Module) -> Iterator[str]:
    for name, part in module.named_modules(remove_duplicate=False):
        yield f"{name}: {type(part).__module__} {type(part).__qualname__} {sorted(_constants(part))}"
        for key, value in _settings(part):
            try:
                yield f"{name}.{key}: {_text(value)}"
            except Untold as e:
                raise Untold(f"{name}.{key} is a thing of type {e}, which may be another at the next start".lstrip(".")) from None
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        yield f"{name}: {_text(x)}"


def _settings(part: torch.nn.Module) -> list[tuple[str, Any]]:
    """What it has besides weights and parts."""
    hooks = [(key, hook) for key in sorted(_OF_EVERY_MODULE) if key.endswith("_hooks") for hook in vars(part).get(key, {}).values()]
    if isinstance(part, torch.fx.GraphModule):
        hooks = [(key, hook) for key, hook in hooks if not str(hook.__module__).startswith("torch.")]  # PyTorch's own check inputs
        return [("code", part.code), *((k, v) for k, v in vars(part).items() if isinstance(v, torch.Tensor)), *hooks]
    if type(part).__module__.startswith("torch.export.") and type(part).__name__ == "GuardsFn":
        return []  # checks inputs too
    return [*sorted((k, v) for k, v in vars(part).items() if k not in _OF_EVERY_MODULE), *hooks]


def _constants(part: torch.nn.Module) -> Iterator[str]:
    """Simple values of its class and of the globals that its forward names: the environment may have made them."""
    forward = getattr(type(part), "forward", None)
    around = {}
    if isinstance(forward, types.FunctionType):
        around = {k: v for k, v in forward.__globals__.items() if k in forward.__code__.co_names}
    kinds = [kind for kind in reversed(type(part).__mro__) if not kind.__module__.startswith("torch.")]
    of_class = {name: value for kind in kinds for name, value in vars(kind).items() if not name.startswith("__")}
    for name, value in (*of_class.items(), *around.items()):
        if isinstance(value, _TOLD_BY_REPR):
            yield f"{name} {value!r}"


def _text(value: Any) -> str:
    """Of a setting. Raises Untold with its type."""
    if isinstance(value, _TOLD_BY_REPR):
        return f"{type(value).__qualname__} {value!r}"
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()} {_hash(value)}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__qualname__} [{', '.join(map(_text, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__qualname__} [{', '.join(sorted(map(_text, value)))}]"
    if isinstance(value, dict):
        return f"{type(value).__qualname__} {_text(list(value.items()))}"
    if isinstance(value, type) or (isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, _NO_STATE)):
        return f"{value.__module__} {value.__qualname__}"
    if isinstance(value, functools.partial):
        return f"partial {_text([value.func, value.args, value.keywords])}"
    if isinstance(value, types.FunctionType) and value.__closure__ is None:
        about = f"{value.__module__} {value.__qualname__} {value.__code__.co_firstlineno} {code_text(value.__code__)}"
        return f"{about} {_text([value.__defaults__, value.__kwdefaults__])}"
    raise Untold(type(value).__qualname__)


def _hash(x: torch.Tensor) -> str:
    flat = x.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data if flat.numel() else b"").hexdigest()
