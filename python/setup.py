# SPDX-License-Identifier: Apache-2.0
"""Builds the shared library, the extension and the ringbatch command into the package.

The library and the extension are C, the command is Go. At run time the wheel needs
only NumPy. Without the extension (no Python headers) the package uses ctypes. Without Go
the package has clients and workers, and no command. Without a C compiler it uses a
libringbatch.so.1 of the system.

deploy/packaging/wheels.py builds the released wheels with these variables:

    CC                        a compiler for the machine and the glibc that the wheel is for
    GOARCH                    the same machine, for Go
    RINGBATCH_WHEEL_PLATFORM  the platform in the wheel's name
    RINGBATCH_WHEEL_ABI=none  leave the extension out: for Pythons without the stable ABI

The same sources give the same bytes, in any folder.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

if sys.version_info < (3, 9):
    sys.exit(f"ringbatch needs Python 3.9 or later, this is {sys.version.split()[0]}")

from setuptools import Distribution, setup  # noqa: E402 - after the check
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build_py import build_py  # noqa: E402

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
VERSION = REPOSITORY / "VERSION"
EXTENSION = "_quick.abi3.so"
NEEDS = "building ringbatch needs the whole repository: pip install ./python from its root"


class Progress:
    """Shows progress on the terminal: pip hides the output of a build without -v."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        try:
            self.terminal = None if sys.stderr.isatty() else open("/dev/tty", "w")  # noqa: SIM115 - open until the end
        except OSError:  # no terminal
            self.terminal = None

    def say(self, text: str, end: str = "\n") -> None:
        line = f"ringbatch: {text}, {time.monotonic() - self.began:.0f} s"
        if end == "\n":
            print(line, flush=True)
        if self.terminal:
            self.terminal.write(f"\r\033[K  {line}{end}")
            self.terminal.flush()


class BuildNative(build_py):
    def run(self) -> None:
        super().run()
        native = Path(self.build_lib, "ringbatch", "_native").resolve()
        native.mkdir(parents=True, exist_ok=True)
        if not (REPOSITORY / "go.mod").exists():
            sys.exit(NEEDS)
        self.progress = Progress()
        if shutil.which(shlex.split(os.environ.get("CC", "cc"))[0]):
            self._library(native / "libringbatch.so")
            self._extension(native.parent / EXTENSION)
        else:
            self.progress.say("no C compiler: the package will look for libringbatch.so.1 or $RINGBATCH_LIBRARY")
        if shutil.which("go"):
            self._go(native / "ringbatch", "./cmd/ringbatch")
        else:
            self.progress.say("no Go: clients and workers without the ringbatch command and ringbatch.serve")
        for copied in (*(REPOSITORY / "cbindings").glob("ringbatch*.h"), REPOSITORY / "worker" / "cuda" / "kernels" / "move.ptx"):
            shutil.copy(copied, native)
        self.progress.say("built")

    def _library(self, out: Path) -> None:
        self.progress.say("C library")
        self._cc(out, *sorted(str(c.relative_to(REPOSITORY)) for c in (REPOSITORY / "cbindings" / "src").glob("*.c")))

    def _extension(self, out: Path) -> None:
        """Builds one extension for every CPython from 3.9 on (the limited API)."""
        out.unlink(missing_ok=True)
        if sysconfig.get_config_var("Py_GIL_DISABLED") or os.environ.get("RINGBATCH_WHEEL_ABI") == "none":
            return  # has no limited API
        headers = sysconfig.get_paths()["include"]
        if not Path(headers, "Python.h").exists():
            self.progress.say(f"no Python.h in {headers}: building without the extension, the package will use ctypes")
            return
        self.progress.say("extension")
        self._cc(out, f"-I{headers}", "-Icbindings", *sorted(str(c.relative_to(REPOSITORY)) for c in (HERE / "quick").glob("*.c")))

    def _cc(self, out: Path, *arguments: str) -> None:
        compiler = shlex.split(os.environ.get("CC", "cc"))
        flags = ["-std=c11", "-Werror=implicit", "-D_GNU_SOURCE", "-O2", "-fPIC", "-fvisibility=hidden", "-shared", "-pthread", "-s"]
        flags.append("-Wl,--build-id=none")
        command = [*compiler, *flags, f"-ffile-prefix-map={REPOSITORY}=.", "-o", str(out), *arguments, "-ldl"]
        print(" ".join(command), flush=True)
        subprocess.run(command, check=True, cwd=REPOSITORY)

    def _go(self, out: Path, package: str) -> None:
        env = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": ""}
        listed = subprocess.run(["go", "list", "-deps", package], cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, check=False)
        packages = listed.stdout.count(b"\n")
        self.progress.say(f"the command, {packages} Go packages (minutes the first time, seconds later)")
        command = ["go", "build", "-v", "-trimpath", "-buildvcs=false", "-ldflags=-s -w -buildid=", "-o", str(out), package]
        print(" ".join(command), flush=True)
        with subprocess.Popen(command, cwd=REPOSITORY, env=env, stderr=subprocess.PIPE, text=True) as go:
            assert go.stderr
            for done, line in enumerate(go.stderr, 1):
                print(line, end="", flush=True)
                self.progress.say(f"compiled {done} of at most {packages} Go packages", end="")
        if go.returncode:
            sys.exit(f"{' '.join(command)}: exit status {go.returncode}")


class NativeDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True  # the wheel is for one kind of machine


class PlatformWheel(bdist_wheel):
    """One wheel for every CPython of this platform from 3.9 on, or for every Python 3 if the extension is left out."""

    def get_tag(self) -> tuple[str, str, str]:
        platform = os.environ.get("RINGBATCH_WHEEL_PLATFORM") or super().get_tag()[2]
        if Path(self.bdist_dir, "ringbatch", EXTENSION).exists():
            return "cp39", "abi3", platform
        return "py3", "none", platform


if not VERSION.exists():
    sys.exit(NEEDS)
setup(
    version=VERSION.read_text(encoding="utf-8").strip(),
    distclass=NativeDistribution,
    cmdclass={"build_py": BuildNative, "bdist_wheel": PlatformWheel},
)
