#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles CUDA C to PTX with NVRTC; needs no GPU.

    ptx.py [--check] TOOLCHAIN FOLDER…

The first lines of each .cu file name its PTX files and the targets:

    // ptx: move.ptx compute_75 [-DNAME…]

With --check nothing is written, and exit status 1 means that a PTX file differs from
its compiled source. Either way ptxas must accept the result for a few GPUs.
"""

import ctypes
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TARGETS = {"compute_75": ["sm_75", "sm_80", "sm_90"], "compute_80": ["sm_80", "sm_90"]}


class Nvrtc:
    def __init__(self, toolchain: Path) -> None:
        folder = toolchain / "nvrtc"
        for builtins in folder.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins.resolve()), mode=ctypes.RTLD_GLOBAL)
        (lib,) = folder.glob("libnvrtc.so.*")
        self.lib = ctypes.CDLL(str(lib.resolve()))
        self.lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *args: object) -> None:
        code = getattr(self.lib, name)(*args)
        if code != 0:
            raise RuntimeError(f"{name}: {self.lib.nvrtcGetErrorString(code).decode()}")

    def text(self, what: str, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", program, buffer)
        return buffer.value.decode()

    def compile(self, source: Path, options: list[str]) -> str:
        program = ctypes.c_void_p()
        self.call("nvrtcCreateProgram", ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None)
        given = [o.encode() for o in options]
        try:
            self.call("nvrtcCompileProgram", program, len(given), (ctypes.c_char_p * len(given))(*given))
        except RuntimeError as e:
            raise SystemExit(f"{source}: {e}\n{self.text('ProgramLog', program)}") from e
        return self.text("PTX", program)


def assemble(toolchain: Path, ptx: str, arch: str) -> None:
    with tempfile.TemporaryDirectory() as tmp:
        path = Path(tmp) / "x.ptx"
        path.write_text(ptx, encoding="utf-8")
        for target in TARGETS[arch]:
            subprocess.run([str(toolchain / "bin" / "ptxas"), f"-arch={target}", "-o", "/dev/null", str(path)], check=True)


def main() -> int:
    args = [a for a in sys.argv[1:] if a != "--check"]
    check = len(args) < len(sys.argv) - 1
    toolchain, folders = Path(args[0]), [Path(a) for a in args[1:]]
    nvrtc, differ = Nvrtc(toolchain), 0
    for source in sorted(s for folder in folders for s in folder.glob("*.cu")):
        for name, arch, extra in re.findall(r"^// ptx: (\S+) (\S+)(.*)$", source.read_text(encoding="utf-8"), re.M):
            options = [f"--gpu-architecture={arch}", f"-I{source.parent}", f"-I{toolchain / 'include'}", "--std=c++17", *extra.split()]
            ptx = nvrtc.compile(source, options)
            assemble(toolchain, ptx, arch)
            target = source.parent / name
            same = target.exists() and target.read_text(encoding="utf-8") == ptx
            if not check:
                target.write_text(ptx, encoding="utf-8")
            elif not same:
                differ += 1
            print(f"{target}: {'same' if same else 'differs from its source' if check else 'written'}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
