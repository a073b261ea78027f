# SPDX-License-Identifier: Apache-2.0
"""The package as a whole: its version, its layers, its errors, and the modules that an import loads."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from importlib import metadata
from pathlib import Path

import pytest
from conftest import REPOSITORY, python

import ringbatch as rb
from ringbatch import errors
from ringbatch.binding import library
from ringbatch.binding.structs import PROTOTYPES

PACKAGE = Path(__file__).parents[1] / "ringbatch"

# Each sub-package with the sub-packages that it may import. All may import errors.py.
ALLOWED = {
    "binding": set(),
    "client": {"binding"},
    "weights": {"binding"},
    "worker": {"binding", "weights"},
    "torch": {"binding", "weights", "worker"},
    "hf": {"binding", "torch", "worker"},
    "onnx": {"binding", "worker"},
    "rl": {"binding", "client"},
    "serve": {"binding", "weights", "worker"},
}
LAZY = {"serve": {"torch", "hf", "onnx"}}  # imported only inside of functions

# By their place in the package: ("client", "model").
MODULES = {p.relative_to(PACKAGE).with_suffix("").parts: ast.parse(p.read_text(encoding="utf-8")) for p in PACKAGE.rglob("*.py")}


def imports(name: tuple[str, ...], tree: ast.AST) -> list[tuple[str, ...]]:
    """The modules of the package that a piece of a module imports, at load time or later."""
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
            found += [(*named, a.name) for a in node.names if a.name != "_quick"]  # the extension in C
    return [m if m in MODULES else m[:-1] if m[:-1] in MODULES else (*m[:-1], "__init__") for m in found]


def test_no_modules_import_one_another_in_a_circle():
    graph = {name: imports(name, tree) for name, tree in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        pytest.fail(" imports ".join("/".join(m) for m in reversed(e.args[1])))


@pytest.mark.parametrize("layer", ALLOWED)
def test_a_layer_imports_only_layers_below_it(layer):
    for name, tree in MODULES.items():
        if name[0] != layer or name[-1] == "__main__":
            continue
        lazy = [i for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)) for i in imports(name, f)]
        for module in imports(name, tree):
            allowed = {layer} | ALLOWED[layer] | (LAZY.get(layer, set()) if module in lazy else set())
            assert module in (("errors",), ("__init__",)) or module[0] in allowed, f"{'/'.join(name)} imports {'/'.join(module)}"


def test_functions_keep_their_names_beside_packages_of_the_same_name():
    from ringbatch.serve import supervisor
    from ringbatch.worker import worker

    assert rb.serve is supervisor.serve and rb.worker is worker.worker


def loaded(code: str) -> list[str]:
    code += "; import sys; print(*(name for name in sys.modules if name.partition('.')[0] == 'asyncio'))"
    return subprocess.check_output([sys.executable, "-c", code], text=True).split()


def test_asyncio_is_not_imported_before_it_is_used():
    declare = "import ringbatch as rb; x = {'x': ('float32', (4,))}; w = rb.worker('m', inputs=x, outputs=x, concurrency=2)"
    assert loaded(f"{declare}; exec('async def run(batch): pass'); w(run)") == []


def test_import_does_not_load_the_library():
    assert python("print(any('libringbatch' in line for line in open('/proc/self/maps')))") == "False"


def test_the_package_the_library_and_the_command_have_the_version_of_the_file():
    version = (REPOSITORY / "VERSION").read_text(encoding="utf-8").strip()
    assert metadata.version("ringbatch") == version
    assert rb.__version__ == version  # the library's
    for command in ([rb.binary_path(), "--version"], [sys.executable, "-m", "ringbatch", "version"]):
        assert subprocess.check_output(command, text=True).split()[:2] == ["ringbatch", version]


def test_the_script_ringbatch_does_not_start_itself(tmp_path):
    script = tmp_path / "ringbatch"
    script.write_text(f"#!{sys.executable}\nfrom ringbatch.__main__ import main\nmain()\n")
    script.chmod(0o755)
    p = subprocess.run([script, "models"], env={**os.environ, "RINGBATCH_BINARY": str(script)}, capture_output=True, text=True, timeout=60)
    assert p.returncode == 1 and "unset it" in p.stderr


def test_the_package_has_the_kernels_of_the_native_worker():
    kernels = REPOSITORY / "worker" / "cuda" / "kernels" / "move.ptx"
    assert (Path(rb.__file__).parent / "_native" / "move.ptx").read_bytes() == kernels.read_bytes()


def test_exceptions_mirror_the_statuses_of_the_library():
    lib = library.load()
    for status, cls in errors.BY_STATUS.items():
        assert lib.rb_status_name(status).decode() == cls.__name__ and getattr(rb, cls.__name__) is cls
        assert bool(lib.rb_status_retryable(status)) == cls.retryable
        assert cls.__name__ in errors.__all__
        assert cls.__doc__
    assert lib.rb_status_name(len(errors.BY_STATUS) + 1) == b"Unknown"
    assert rb.ForkedClient is rb.Forked
    assert "status 99" in str(errors.error_for(99, "?"))


def test_every_function_of_the_header_has_a_prototype():
    headers = sorted((REPOSITORY / "cbindings").glob("ringbatch*.h"))
    if not headers:
        pytest.skip("no headers here")
    declared = re.findall(r"^RB_API [^(]*?\*?(rb_\w+)\(([^;]*)\);", "".join(h.read_text() for h in headers), re.M)
    counts = {name: 0 if arguments == "void" else arguments.count(",") + 1 for name, arguments in declared}
    for name, (_, arguments) in PROTOTYPES.items():
        assert counts[name] == len(arguments), name


@pytest.mark.parametrize("minor", range(9, 15))
def test_the_extension_compiles_for_every_cpython_at_hand(minor):
    """A name that the limited API of 3.9 lacks would be taken for a function that returns int."""
    roots = [Path(sys.base_prefix), *Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions").glob(f"3.{minor}.*"), Path("/usr")]
    headers = [h for root in roots if (h := root / "include" / f"python3.{minor}") and (h / "Python.h").exists()]
    if not headers or not shutil.which("cc") or not (REPOSITORY / "cbindings").exists():
        pytest.skip(f"no CPython 3.{minor} with headers here, or no compiler")
    subprocess.run(["cc", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Werror", "-Wno-missing-field-initializers", "-fsyntax-only", f"-I{headers[0]}",
        f"-I{REPOSITORY / 'cbindings'}", *map(str, (PACKAGE.parent / "quick").glob("*.c"))], check=True)  # fmt: skip


@pytest.mark.parametrize(("missing", "built", "says"), [
    ("go", ["_quick.abi3.so", "_native/libringbatch.so"], "built without Go"),
    ("cc", [], "name it in $RINGBATCH_LIBRARY"),
])
def test_without_go_or_a_compiler_the_package_installs_and_says_what_is_missing(tmp_path, missing, built, says):
    pytest.importorskip("setuptools")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("cc", "as", "ld", "git"):
        if name != missing and (found := shutil.which(name)):
            (tools / name).symlink_to(found)
    source = tmp_path / "source"
    shutil.copytree(REPOSITORY, source, ignore=shutil.ignore_patterns("build", "bin", ".git", "docs", "dist", "*.egg-info"))
    target, env = tmp_path / "installed", {**os.environ, "PATH": str(tools), "CC": "cc"}
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--target", str(target),
        str(source / "python")], env=env, check=True)  # fmt: skip
    assert not (target / "ringbatch" / "_native" / "ringbatch").exists()
    assert all((target / "ringbatch" / file).exists() for file in built)
    code = """
import ringbatch as rb
try:
    rb.connect("m", socket="none")
except rb.NoBroker:  # the library works
    rb.binary_path()
"""
    p = subprocess.run([sys.executable, "-c", code], env={**env, "PYTHONPATH": str(target)}, capture_output=True, text=True)
    assert says in p.stderr.splitlines()[-1], p.stderr
    p = subprocess.run([sys.executable, "-m", "ringbatch", "version"], env={**env, "PYTHONPATH": str(target)}, capture_output=True, text=True)
    assert p.returncode == 1 and p.stderr.startswith("ringbatch: there is no ringbatch command")
