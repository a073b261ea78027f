# SPDX-License-Identifier: Apache-2.0
"""The workers that serve takes, and how a new process finds them again.

A worker process imports the module, or runs the script again. Only there is a
class instantiated, a factory called, a model loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any, Callable, Union

from .. import errors
from ..worker.worker import Worker

Served = Union[Worker, Callable[[], Worker], str]

# Of this program: a copy, before a script changes them.
ARGUMENTS = list(sys.argv)

_AGAIN = "write it to a file and run that, name it by an import path ('package.module:name'), or serve with processes=0"


class Reached(BaseException):
    """Ends the script in a worker process that has reached serve."""

    def __init__(self, served: Sequence[Served]) -> None:
        super().__init__("serve is not for worker processes")
        self.served = served


def check(served: Served) -> None:
    """Raises Invalid if no process could serve it."""
    if isinstance(served, Worker):
        return
    if isinstance(served, str):
        module, _, name = served.partition(":")
        if not module or not name:
            raise errors.Invalid(f"serve({served!r}): an import path is 'package.module:name'")
        try:
            found = importlib.util.find_spec(module)
        except ImportError:
            found = None
        if found is None:
            raise errors.Invalid(f"serve({served!r}): there is no module {module!r}")
        return
    try:
        if isinstance(served, type) or inspect.isbuiltin(served):
            raise TypeError
        inspect.signature(served).bind()  # a factory takes nothing
    except (TypeError, ValueError):
        raise errors.Invalid(
            f"serve wants a function or class decorated with @ringbatch.worker, a function without arguments that makes one, "
            f"or 'package.module:name'; got {served!r}"
        ) from None


def describe(served: Served, index: int) -> list[str]:
    """The arguments by which a new process finds a worker; index is its place in serve's list."""
    if isinstance(served, str):
        return ["module", *served.split(":", 1)]
    main = sys.modules["__main__"]
    run_as = getattr(getattr(main, "__spec__", None), "name", None)  # python -m
    path = getattr(main, "__file__", None)
    path = path if path and os.path.exists(path) else None  # '<stdin>'
    module = sys.modules.get(getattr(served, "__module__", "") or "__main__", main)
    name = _top_level(module, served)
    if name and module is not main:
        return ["module", module.__name__, name]
    if name and run_as:
        return ["module", run_as, name]
    if name and path:
        return ["file", os.path.abspath(path), name, str(index)]
    if run_as:
        return ["rerun-module", run_as, str(index)]
    if path:
        return ["rerun-file", os.path.abspath(path), str(index)]
    typed = "an interactive session" if sys.stdin.isatty() else "standard input"
    where = {"-c": "the command line", "-": "standard input"}.get(ARGUMENTS[0], typed)
    raise errors.Invalid(f"worker processes run the script again, and {where} cannot be read twice: {_AGAIN}")


def _top_level(module: Any, served: Any) -> str | None:
    name = getattr(served, "__qualname__", None)
    if name and getattr(module, name, None) is served:
        return name
    return next((n for n, value in vars(module).items() if value is served), None)


def find(kind: str, where: str, *rest: str) -> Worker:
    """In the new process: the worker that describe described."""
    try:
        if kind == "module":
            name, index = rest[0], 0
            served = getattr(importlib.import_module(where), name)
        elif kind == "file":
            name, index = rest[0], int(rest[1])
            served = runpy.run_path(where, run_name="__ringbatch_worker__")[name]
        else:
            index = int(rest[0])
            if kind == "rerun-file":
                runpy.run_path(where, run_name="__main__")
            else:
                runpy.run_module(where, run_name="__main__", alter_sys=True)
            raise errors.Invalid(f"{where} ended without calling serve: in a worker process it takes another path than at first")
    except Reached as reached:
        served = reached.served[index]
    return worker_of(served)


def worker_of(served: Served) -> Worker:
    """The worker; a factory is called, an import path imported."""
    if isinstance(served, str):
        module, name = served.split(":", 1)
        return worker_of(getattr(importlib.import_module(module), name))
    made = served if isinstance(served, Worker) else served()
    if not isinstance(made, Worker):
        raise errors.Invalid(f"{served!r} made {made!r}; it should return a function or class decorated with @ringbatch.worker")
    return made
