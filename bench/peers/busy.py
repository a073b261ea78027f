# SPDX-License-Identifier: Apache-2.0
"""ringbatch against the plain multiprocessing way where the cores are full.

    python3 bench/peers/busy.py                                  # with this interpreter's ringbatch
    python3 bench/peers/busy.py --build old=venv/bin/python      # and another build of it
            [--clients 8] [--rounds 5] [--seconds 2] [--cells quiet,loops,compute,both] [--json FILE]

Cells: quiet; loops (a busy loop for each core beside the clients); compute (every
client computes 1 ms before each request); both. Each with 64 and 602,112 bytes.
The model sums its input, and every answer is checked. The programs take turns in
every round; the table shows medians, and ratios of the medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import processes

HERE = Path(__file__).resolve().parent
SIZES = [64, 602112]
ENV = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
CELLS = {"quiet": (False, 0.0), "loops": (True, 0.0), "compute": (False, 1.0), "both": (True, 1.0)}  # busy loops?, ms of each client


class Ring:
    """A broker and workers of one build."""

    def __init__(self, python: str, folder: Path, workers: list[list[str]]) -> None:
        self.python, self.socket = python, str(folder / "broker.sock")
        self.env = {**os.environ, **ENV, "RINGBATCH_SOCKET": self.socket}
        where = subprocess.check_output([python, "-c", "import ringbatch; print(ringbatch.__path__[0])"], text=True, cwd="/").strip()
        for c in [[f"{where}/_native/ringbatch", "broker"], *workers]:
            processes.start(c, self.env, subprocess.DEVNULL, subprocess.DEVNULL)

    def measure(self, flags: list[str]) -> dict:
        return measured([self.python, str(HERE / "load.py"), "ringbatch", self.socket, *flags], self.env)


class Plain:
    def measure(self, flags: list[str]) -> dict:
        return measured([sys.executable, str(HERE / "plain.py"), *flags], {**os.environ, **ENV})


def measured(command: list[str], env: dict[str, str]) -> dict:
    found = json.loads(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout)
    if "error" in found:
        raise SystemExit(f"{' '.join(command)}: {found['error']}")
    return found


@contextlib.contextmanager
def busy_loops(n: int):
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for p in loops:
            p.kill()
            p.wait()


def run(a: argparse.Namespace, programs: dict) -> list[dict]:
    found: dict[tuple, list[dict]] = {}
    for r in range(a.rounds):
        for cell in a.cells:
            loops, compute = CELLS[cell]
            with busy_loops(os.cpu_count() or 1) if loops else contextlib.nullcontext():
                for size in a.bytes:
                    flags = ["--bytes", str(size), "--clients", str(a.clients), "--seconds", str(a.seconds), "--compute_ms", str(compute)]
                    for name, p in programs.items():
                        found.setdefault((cell, size, name), []).append(p.measure(flags))
        print(f"round {r + 1} of {a.rounds}", file=sys.stderr, flush=True)
    rows = []
    for (cell, size, name), turns in found.items():
        rows.append({"cell": cell, "bytes": size, "program": name, "turns": turns, **{k: statistics.median(t[k] for t in turns) for k in turns[0]}})
    return rows


def table(rows: list[dict]) -> str:
    plain = {(r["cell"], r["bytes"]): r for r in rows if r["program"] == "plain"}
    lines = ["| cores | bytes | program | requests/s | p50 ms | p99 ms | requests/s ÷ plain | p50 ÷ plain | p99 ÷ plain |", "|---|---|---|---|---|---|---|---|---|"]
    for r in rows:
        p = plain[r["cell"], r["bytes"]]
        ratios = " | ".join(f"{r[k] / p[k]:.2f}" for k in ("requests_per_s", "p50_ms", "p99_ms"))
        lines.append(f"| {r['cell']} | {r['bytes']:,} | {r['program']} | {r['requests_per_s']:,.0f} | {r['p50_ms']:.2f} | {r['p99_ms']:.2f} | {ratios} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="append", default=[], metavar="NAME=PYTHON", help="another build, by its interpreter")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--cells", type=lambda s: s.split(","), default=list(CELLS))
    parser.add_argument("--bytes", type=lambda s: [int(n) for n in s.split(",")], default=SIZES)
    parser.add_argument("--json", metavar="FILE")
    a = parser.parse_args()
    processes.adopt()
    with contextlib.ExitStack() as stack:
        stack.callback(processes.end_all)
        programs: dict = {"plain": Plain()}
        for name, python in [("ringbatch", sys.executable), *(b.split("=", 1) for b in a.build)]:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="busy")))
            folder.chmod(0o700)
            workers = [[python, str(HERE / "servers" / "ringbatch_worker.py"), str(size)] for size in SIZES]
            programs[name] = Ring(python, folder, workers)
        time.sleep(3)  # workers come up; clients wait for them anyway
        processes.same_priority()
        rows = run(a, programs)
        print(table(rows))
        if a.json:
            Path(a.json).write_text(json.dumps({"cores": os.cpu_count(), "clients": a.clients, "rows": rows}))


if __name__ == "__main__":
    main()
