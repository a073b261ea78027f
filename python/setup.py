"""Builds the shared library and the ringbatch command into the package.

What the wheel then needs at run time is NumPy; Go is needed only here.
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


class BuildWithGo(build_py):
    def run(self) -> None:
        super().run()
        native = Path(self.build_lib, "ringbatch", "_native").resolve()
        native.mkdir(parents=True, exist_ok=True)
        if not shutil.which("go") or not (REPOSITORY / "go.mod").exists():
            sys.exit("building ringbatch needs Go and the whole repository: pip install ./python from its root")
        self._go(native / "libringbatch.so", "./cbindings", "-buildmode=c-shared", cgo="1")
        self._go(native / "ringbatch", "./cmd/ringbatch", cgo="0")
        (native / "libringbatch.h").unlink()  # cgo's own; ours is the contract
        shutil.copy(REPOSITORY / "cbindings" / "ringbatch.h", native)

    def _go(self, out: Path, package: str, *flags: str, cgo: str) -> None:
        command = ["go", "build", "-trimpath", "-ldflags=-s -w", "-o", str(out), *flags, package]
        print(" ".join(command), flush=True)
        subprocess.run(command, cwd=REPOSITORY, env={**os.environ, "CGO_ENABLED": cgo}, check=True)


class PlatformWheel(bdist_wheel):
    """One wheel for every Python 3 of this platform: nothing is compiled against Python."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple:
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithGo, "bdist_wheel": PlatformWheel})
