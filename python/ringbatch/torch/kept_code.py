# SPDX-License-Identifier: Apache-2.0
"""Compiled code that is kept whole, so that a restart reads it and traces nothing.

torch.compile keeps what its compiler makes of a graph. The graph itself, with the weights
folded into it, it makes anew at each start, which takes longer than anything else. Here both
stay in one file: the source text that the compiler wrote, and the constants that it names. The kernels
in that text stay where the compiler keeps them.

The file's name follows from all that its code was made of (fingerprint.py).
A process that reads it still compares its results with the module's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..worker.trust import descriptor_path, open_trusted
from .fingerprint import Untold
from .lanes import agree, failure

Code = Callable[..., Any]

MOST_KEPT = 8  # files in a folder; each is as large as its module's weights


class NotKept(Exception):
    """Why it cannot be."""


def load_or_compile(module: torch.nn.Module, xs: Sequence[torch.Tensor], of: object, state: str | Untold, folder: str,
        right: Callable[[Code], bool]) -> Code:
    """The module compiled for inputs like xs, its weights as constants.

    state: the module's fingerprint. of: what the code depends on besides. folder: nobody else may write there, what lies in it is run.
    right: tells whether code does what the module does.
    """
    file = _file(of, state, folder)
    if not isinstance(state, Untold):
        try:
            code = _read(file, xs[0].device)
            if right(code):
                return code
            raise ValueError("it gives other results")
        except FileNotFoundError:
            pass
        except Exception as e:  # it is cut off, or the compiler's insides are others, …
            print(f"compiling anew, since {file} is of no use: {failure(e)}", file=sys.stderr, flush=True)
    code, made = _compile(module, xs)
    try:
        if isinstance(state, Untold):
            raise NotKept(state)
        whole = _whole(made, xs, code)
        _write(file, whole)
        _not_whole(file).unlink(missing_ok=True)
        return _code(whole)
    except Exception as e:  # the compiler's insides, which differ from version to version, or a full disk
        if not isinstance(state, Untold):
            with contextlib.suppress(OSError):
                _not_whole(file).touch()
        print(f"a restart will trace the module again, since its compiled code cannot be kept whole: "
            f"{e if isinstance(e, NotKept) else failure(e)}",
              file=sys.stderr, flush=True)  # fmt: skip
        return code


def is_kept(of: object, state: str | Untold, folder: str) -> bool:
    """Whether load_or_compile will read it; or need not be waited for, since it will compile whatever other processes do."""
    file = _file(of, state, folder)
    return isinstance(state, Untold) or file.exists() or _not_whole(file).exists()


def _file(of: object, state: str | Untold, folder: str) -> Path:
    return Path(folder, f"whole-{hashlib.sha256(f'{of} {state}'.encode()).hexdigest()[:32]}.pt")


def _not_whole(file: Path) -> Path:
    """Is there where the code could not be kept so: the next start will fail to do it, most likely."""
    return file.with_name(f"not-{file.stem}")


def _compile(module: torch.nn.Module, xs: Sequence[torch.Tensor]) -> tuple[Code, list[tuple[Any, Any, int]]]:
    """torch.compile's own function, and what the compiler made: each graph, its code and how many inputs it has."""
    made: list[tuple[Any, Any, int]] = []

    def compiler(traced: Any, examples: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def noted(graph: Any, inputs: Sequence[Any], **how: Any) -> Any:
            code = compile_fx_inner(graph, inputs, **how)
            made.append((graph, code, len(inputs)))
            return code

        return compile_fx(traced, examples, inner_compile=noted)

    code = torch.compile(module, backend=compiler, dynamic=False)
    code(*xs)
    return code, made


def _whole(made: list[tuple[Any, Any, int]], xs: Sequence[torch.Tensor], code: Code) -> dict[str, Any]:
    """What a file holds; it was tried, and does what the code does."""
    from torch._inductor.output_code import CompiledFxGraphConstantsWithGm

    if len(made) != 1:
        raise NotKept(f"it is in {len(made)} parts, with Python between them")
    graph, made_of_it, inputs = made[0]
    constants = CompiledFxGraphConstantsWithGm(graph).unwrap(made_of_it)
    tensors = {name: c.detach() for name, c in constants.items() if isinstance(c, torch.Tensor)}
    if inputs != len(xs) or made_of_it.mutated_input_idxs or made_of_it.torchbind_constants or len(tensors) != len(constants):
        raise NotKept("it takes or changes more than its inputs")
    whole = {"source": made_of_it.source_code, "constants": tensors}
    got, want = list(_code(whole)(*xs)), code(*xs)
    want = list(want) if isinstance(want, (tuple, list)) else [want]
    if len(got) != len(want) or not agree(got, want):
        raise NotKept("its outputs are put together by Python")
    return whole


def _code(whole: dict[str, Any]) -> Code:
    from torch._inductor.codecache import PyCodeCache

    key, path = PyCodeCache.write(whole["source"])
    loaded = PyCodeCache.load_by_key_path(key, path, [], whole["constants"])
    return lambda *xs: loaded.call(list(xs))  # it empties the list


def _read(file: Path, device: torch.device) -> Code:
    os.utime(file)  # the latest stay
    with open_trusted(file) as f:
        return _code(torch.load(descriptor_path(f), map_location=device, mmap=True, weights_only=True))


def _write(file: Path, whole: dict[str, Any]) -> None:
    """All of it or nothing: another process may read it just now."""
    handle, name = tempfile.mkstemp(prefix=f"{file.name}.", dir=file.parent)
    os.close(handle)
    new = Path(name)
    try:
        torch.save(whole, new)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
    latest_last = sorted(file.parent.glob("whole-*.pt"), key=_used)
    left_behind = [f for f in file.parent.glob("whole-*.pt.*") if 0 < _used(f) < time.time() - 3600]  # by who was killed
    for old in (*latest_last[:-MOST_KEPT], *left_behind):
        old.unlink(missing_ok=True)


def _used(file: Path) -> float:
    """When; 0 if another process has removed it."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0
