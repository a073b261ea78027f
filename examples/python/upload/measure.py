# SPDX-License-Identifier: Apache-2.0
"""Measures app.py with one model process, then with a copy of the model in every web worker.

    pip install fastapi "uvicorn>=0.37" pillow         # and ringbatch
    python measure.py [--workers 4] [--clients 16] [--seconds 5] [--rounds 3] [--json]

The two take turns, and the table shows medians. Each client sends one picture at a time. Every process computes with one thread, both ways. Memory is the
proportional set size of all server processes after the load.
"""

import argparse
import contextlib
import http.client
import io
import json
import operator
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import create_server
from statistics import median

import numpy as np
from PIL import Image


@contextlib.contextmanager
def running(*command: str, **options):
    p = subprocess.Popen([sys.executable, *command], cwd=Path(__file__).parent, **options)
    try:
        yield p.pid
    finally:
        p.terminate()
        p.wait(60)


@contextlib.contextmanager
def served(copies: bool, workers: int):
    """Starts the servers; yields the port and the process ids."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack, create_server(("127.0.0.1", 0), backlog=1024) as s:
        env = {**os.environ, "RINGBATCH_SOCKET": f"{folder}/b.sock", "OPENBLAS_NUM_THREADS": "1", "MODEL_COPIES": "1" * copies}
        pids = [] if copies else [stack.enter_context(running("net.py", env=env))]
        flags = ("--workers", str(workers), "--fd", str(s.fileno()), "--log-level", "error", "--timeout-worker-healthcheck", "60")
        pids.append(stack.enter_context(running("-m", "uvicorn", *flags, "app:app", env=env, pass_fds=[s.fileno()])))
        yield s.getsockname()[1], pids


def memory_mb(pids: list[int]) -> float:
    """Of these processes and all their children."""
    total = 0.0
    for pid in pids:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) / 1024
        total += memory_mb([int(child) for f in Path(f"/proc/{pid}/task").glob("*/children") for child in f.read_text().split()])
    return total


def post(connection: http.client.HTTPConnection, body: bytes) -> float:
    start = time.monotonic()
    connection.request("POST", "/classify", body)
    answer = connection.getresponse()
    text = answer.read().decode()
    if answer.status != 200:
        raise SystemExit(f"status {answer.status}: {text}")
    return time.monotonic() - start


def measure(copies: bool, a: argparse.Namespace) -> dict:
    Image.effect_noise((640, 480), 60).convert("RGB").save(buffer := io.BytesIO(), "JPEG")
    body = buffer.getvalue()
    with served(copies, a.workers) as (port, pids), ThreadPoolExecutor(a.clients) as pool:
        connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=120) for _ in range(a.clients)]
        list(pool.map(lambda c: post(c, body), connections))  # the servers are up
        start = time.monotonic()

        def load(connection) -> list[float]:
            took = []
            while time.monotonic() < start + a.seconds:
                took.append(post(connection, body))
            return took

        took = [t for some in pool.map(load, connections) for t in some]
        seconds, memory = time.monotonic() - start, memory_mb(pids)
    p50, p99 = (round(1e3 * float(np.percentile(took, p))) for p in (50, 99))
    return {"requests_per_s": round(len(took) / seconds, 1), "p50_ms": p50, "p99_ms": p99, "memory_mb": round(memory)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    a = parser.parse_args()
    rounds = [{"one model process": measure(False, a), "a copy in every worker": measure(True, a)} for _ in range(a.rounds)]
    results = {way: {k: median(r[way][k] for r in rounds) for k in of} for way, of in rounds[0].items()}
    ratios = [operator.truediv(*(r["requests_per_s"] for r in way.values())) for way in rounds]
    if a.json:
        print(json.dumps(results | {"ratios": [round(r, 2) for r in ratios]}))
        return
    print(f"{'':24}{'requests/s':>12}{'p50 ms':>9}{'p99 ms':>9}{'memory MB':>11}")
    for way, r in results.items():
        print(f"{way:24}{r['requests_per_s']:12.1f}{r['p50_ms']:9}{r['p99_ms']:9}{r['memory_mb']:11}")
    print(f"requests/s, one process ÷ copies: {', '.join(f'{r:.2f}' for r in ratios)}")


if __name__ == "__main__":
    main()
