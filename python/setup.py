# SPDX-License-Identifier: Apache-2.0
"""Builds the shared library, the extension and the ringbatch command into the package.

The library and the extension are C, the command is Go. What the wheel then
needs at run time is NumPy; the compilers are needed only here. Without the
extension (no headers of Python) the package takes ctypes instead.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # older setuptools
    from wheel.bdist_wheel import bdist_wheel

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent


class BuildNative(build_py):
    def run(self) -> None:
        super().run()
        native = Path(self.build_lib, "ringbatch", "_native").resolve()
        native.mkdir(parents=True, exist_ok=True)
        if not shutil.which("go") or not (REPOSITORY / "go.mod").exists():
            sys.exit("building ringbatch needs a C compiler, Go and the whole repository: pip install ./python from its root")
        self._library(native / "libringbatch.so")
        self._extension(native.parent / "_quick.abi3.so")
        self._go(native / "ringbatch", "./cmd/ringbatch")
        shutil.copy(REPOSITORY / "cbindings" / "ringbatch.h", native)

    def _library(self, out: Path) -> None:
        self._cc(out, *sorted(map(str, (REPOSITORY / "cbindings" / "src").glob("*.c"))))

    def _extension(self, out: Path) -> None:
        """One for every CPython from 3.9 on (the limited API)."""
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            return  # has no limited API
        headers = sysconfig.get_paths()["include"]
        if not Path(headers, "Python.h").exists():
            print(f"no Python.h in {headers}: building without the extension, the package will use ctypes", flush=True)
            return
        self._cc(out, f"-I{headers}", f"-I{REPOSITORY / 'cbindings'}", str(HERE / "ringbatch" / "_quick.c"))

    def _cc(self, out: Path, *arguments: str) -> None:
        compiler = os.environ.get("CC", "cc").split()
        flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-fvisibility=hidden", "-shared", "-pthread", "-s"]
        self._run([*compiler, *flags, "-o", str(out), *arguments])

    def _go(self, out: Path, package: str) -> None:
        self._run(["go", "build", "-trimpath", "-ldflags=-s -w", "-o", str(out), package], CGO_ENABLED="0")

    def _run(self, command: list[str], **env: str) -> None:
        print(" ".join(command), flush=True)
        subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **env}, check=True)


class PlatformWheel(bdist_wheel):
    """One wheel for every Python 3 of this platform: the extension has the limited API, and is not needed."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple:
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildNative, "bdist_wheel": PlatformWheel})
