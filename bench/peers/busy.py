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
CELLS = {"quiet": (False, 0.0), "loops": (True, 0.0), "compute": (False, 1.0), "both": (True, 1.0)}  # busy loops?, ms of each client
FIGURES = ("requests_per_s", "p50_ms", "p99_ms")


@contextlib.contextmanager
def rings(builds: list[str], sizes: list[int]):
    """Starts a broker and a worker for each size, of each build; yields the interpreter and the environment of its clients, by name."""
    started = {}
    processes.adopt()
    with contextlib.ExitStack() as stack:
        stack.callback(processes.end_all)
        for name, python in [("ringbatch", sys.executable), *(b.split("=", 1) for b in builds)]:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="busy"))
            env = {**os.environ, **processes.ONE_THREAD, "RINGBATCH_SOCKET": f"{folder}/broker.sock"}
            where = subprocess.check_output([python, "-c", "import ringbatch; print(ringbatch.__path__[0])"], text=True, cwd="/").strip()
            workers = ([python, str(HERE / "servers" / "ringbatch_worker.py"), str(size)] for size in sizes)
            for command in [[f"{where}/_native/ringbatch", "broker"], *workers]:
                processes.start(command, env, subprocess.DEVNULL, subprocess.DEVNULL)
            started[name] = python, env
        yield started


def measured(command: list[str], env: dict[str, str]) -> dict:
    found = json.loads(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout)
    if "error" in found:
        raise SystemExit(f"{' '.join(command)}: {found['error']}")
    return found


def medians(turns: list[dict]) -> dict:
    return {k: statistics.median(t[k] for t in turns) for k in turns[0]}


@contextlib.contextmanager
def busy_loops(n: int):
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for p in loops:
            p.kill()
            p.wait()


def run(a: argparse.Namespace, programs: dict[str, tuple[list[str], dict[str, str]]]) -> list[dict]:
    found: dict[tuple, list[dict]] = {}
    for r in range(a.rounds):
        for cell in a.cells:
            loops, compute = CELLS[cell]
            with busy_loops(os.cpu_count() or 1) if loops else contextlib.nullcontext():
                for size in a.bytes:
                    load = {"bytes": size, "clients": a.clients, "seconds": a.seconds, "compute_ms": compute}
                    for name, (command, env) in programs.items():
                        turn = measured([*command, *(f"--{k}={v}" for k, v in load.items())], env)
                        found.setdefault((cell, size, name), []).append(turn)
        print(f"round {r + 1} of {a.rounds}", file=sys.stderr, flush=True)
    rows = []
    for (cell, size, name), turns in found.items():
        rows.append({"cell": cell, "bytes": size, "program": name, "turns": turns, **medians(turns)})
    return rows


def table(rows: list[dict]) -> str:
    plain = {(r["cell"], r["bytes"]): r for r in rows if r["program"] == "plain"}
    columns = ["cores", "bytes", "program", "requests/s", "p50 ms", "p99 ms", "requests/s ÷ plain", "p50 ÷ plain", "p99 ÷ plain"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for r in rows:
        figures = [f"{r['requests_per_s']:,.0f}", f"{r['p50_ms']:.2f}", f"{r['p99_ms']:.2f}"]
        ratios = [f"{r[k] / plain[r['cell'], r['bytes']][k]:.2f}" for k in FIGURES]
        lines.append(f"| {' | '.join([r['cell'], format(r['bytes'], ','), r['program'], *figures, *ratios])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="append", default=[], metavar="NAME=PYTHON", help="another build, by its interpreter")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--cells", type=lambda s: s.split(","), default=list(CELLS))
    parser.add_argument("--bytes", type=lambda s: [int(n) for n in s.split(",")], default=SIZES)
    a = parser.parse_args()
    programs = {"plain": ([sys.executable, str(HERE / "plain.py")], {**os.environ, **processes.ONE_THREAD})}
    with rings(a.build, a.bytes) as started:
        for name, (python, env) in started.items():
            programs[name] = [python, str(HERE / "load.py"), "ringbatch", env["RINGBATCH_SOCKET"]], env
        time.sleep(3)  # workers come up; clients wait for them anyway
        processes.same_priority()
        rows = run(a, programs)
        print(table(rows))
        if a.json:
            Path(a.json).write_text(json.dumps({"cores": os.cpu_count(), "clients": a.clients, "rows": rows}))


if __name__ == "__main__":
    main()
