# SPDX-License-Identifier: Apache-2.0
"""The package's layers: which module may import which, read from the sources."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ringbatch as rb

PACKAGE = Path(__file__).parents[1] / "ringbatch"

# Each sub-package with those that it may import; errors.py is for all.
ALLOWED = {
    "binding": set(),
    "client": {"binding"},
    "worker": {"binding"},
    "torch": {"binding", "worker"},
    "onnx": {"binding", "worker"},
    "serve": {"binding", "worker"},
}
# Only when they are called for, inside of functions.
LAZY = {"serve": {"torch", "onnx"}}


# By their place in the package: ("client", "model").
MODULES = {p.relative_to(PACKAGE).with_suffix("").parts: ast.parse(p.read_text(encoding="utf-8")) for p in PACKAGE.rglob("*.py")}


def imports(name: tuple[str, ...], tree: ast.AST) -> list[tuple[str, ...]]:
    """The modules of the package that a piece of one imports, whether when it is loaded or later."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [tuple(a.name.split(".")[1:]) for a in node.names if a.name.split(".")[0] == "ringbatch"]
        elif isinstance(node, ast.ImportFrom):
            named = tuple((node.module or "").split(".")) if node.module else ()
            if node.level:
                named = name[: len(name) - node.level] + named
            elif named[:1] == ("ringbatch",):
                named = named[1:]
            else:
                continue
            found += [(*named, a.name) for a in node.names if a.name != "_quick"]  # which is C
    return [m if m in MODULES else m[:-1] if m[:-1] in MODULES else (*m[:-1], "__init__") for m in found]


def test_no_modules_import_one_another_in_a_circle():
    graph = {name: imports(name, tree) for name, tree in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        pytest.fail(" imports ".join("/".join(m) for m in reversed(e.args[1])))


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_those_below_it(room):
    for name, tree in MODULES.items():
        if name[0] != room or name[-1] == "__main__":
            continue
        lazy = [i for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)) for i in imports(name, f)]
        for module in imports(name, tree):
            allowed = {room} | ALLOWED[room] | (LAZY.get(room, set()) if module in lazy else set())
            assert module in (("errors",), ("__init__",)) or module[0] in allowed, f"{'/'.join(name)} imports {'/'.join(module)}"


def test_functions_keep_their_names_beside_rooms_of_the_same_name():
    from ringbatch.serve import supervisor
    from ringbatch.worker import worker

    assert rb.serve is supervisor.serve and rb.worker is worker.worker
