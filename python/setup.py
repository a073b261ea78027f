"""Builds the shared library and the ringbatch command into the package.

The library is C, the command is Go. What the wheel then needs at run time is
NumPy; the compilers are needed only here.
"""

import os
import shutil
import subprocess
import sys
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
        self._go(native / "ringbatch", "./cmd/ringbatch")
        shutil.copy(REPOSITORY / "cbindings" / "ringbatch.h", native)

    def _library(self, out: Path) -> None:
        sources = sorted(map(str, (REPOSITORY / "cbindings" / "src").glob("*.c")))
        compiler = os.environ.get("CC", "cc").split()
        flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-fvisibility=hidden", "-shared", "-pthread", "-s"]
        self._run([*compiler, *flags, "-o", str(out), *sources])

    def _go(self, out: Path, package: str) -> None:
        self._run(["go", "build", "-trimpath", "-ldflags=-s -w", "-o", str(out), package], CGO_ENABLED="0")

    def _run(self, command: list[str], **env: str) -> None:
        print(" ".join(command), flush=True)
        subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **env}, check=True)


class PlatformWheel(bdist_wheel):
    """One wheel for every Python 3 of this platform: nothing is compiled against Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple:
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildNative, "bdist_wheel": PlatformWheel})
