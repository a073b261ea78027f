# SPDX-License-Identifier: Apache-2.0
"""Builds the wheels that people install without a compiler.

    wheels.py FOLDER

For x86-64 and arm64, for glibc 2.17 (2012) and later: zig's compiler links
against the symbols of that glibc on any machine. Each comes twice: cp39-abi3
with the extension for CPython 3.9 and later, and py3-none without it for the
others (free-threaded CPython, PyPy). auditwheel judges the result.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
GLIBC = "2.17"
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}  # as wheels call them, and as Go does


def main() -> int:
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    for machine, goarch in MACHINES.items():
        for abi in "abi3", "none":
            wheel = build(machine, goarch, abi, out)
            judge(wheel, machine)
    return 0


def build(machine: str, goarch: str, abi: str, out: Path) -> Path:
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{machine}.manylinux2014_{machine}"
    env = {
        **os.environ,
        "CC": f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.{GLIBC}",
        "GOARCH": goarch,
        "GOAMD64": "v1",
        "GOARM64": "v8.0",
        "RINGBATCH_WHEEL_PLATFORM": tag,
        "RINGBATCH_WHEEL_ABI": abi,
        "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH") or commit_time(),
        "PYTHONHASHSEED": "0",
    }
    os.umask(0o022)  # the modes of files are in the wheel
    print(f"wheel for {machine}, {abi}", flush=True)
    with tempfile.TemporaryDirectory() as tmp:
        run = subprocess.run(
            [sys.executable, "setup.py", "--quiet", "build", "--build-base", f"{tmp}/build", "egg_info", "--egg-base", tmp, "bdist_wheel",
                "--bdist-dir", f"{tmp}/wheel", "--dist-dir", f"{tmp}/dist"],
            cwd=REPOSITORY / "python", env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        if run.returncode:
            sys.exit(f"{run.stdout}\nbuilding the wheel: exit status {run.returncode}")
        (built,) = Path(tmp, "dist").glob("*.whl")
        wheel = out / built.name
        wheel.write_bytes(built.read_bytes())
    return wheel


def commit_time() -> str:
    return subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=REPOSITORY, text=True).strip()


def judge(wheel: Path, machine: str) -> None:
    """Checks that the wheel needs no newer glibc than its name says, and no other library."""
    shown = subprocess.run([sys.executable, "-m", "auditwheel", "show", str(wheel)], check=True, stdout=subprocess.PIPE, text=True).stdout
    policy = f"manylinux_2_17_{machine}"
    if f'"{policy}"' not in shown.replace("\n", " "):
        sys.exit(f"{wheel.name}: auditwheel does not find it consistent with {policy}:\n{shown}")
    with zipfile.ZipFile(wheel) as z:
        names = set(z.namelist())
    files = ("libringbatch.so", "ringbatch", "ringbatch.h", "ringbatch_weights.h", "ringbatch_cuda.h", "move.ptx")
    wanted = {f"ringbatch/_native/{f}" for f in files}
    if "-abi3-" in wheel.name:
        wanted.add("ringbatch/_quick.abi3.so")
    if wanted - names:
        sys.exit(f"{wheel.name} has no {', '.join(sorted(wanted - names))}")
    print(f"  {wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, auditwheel: {policy}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
