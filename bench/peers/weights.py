# SPDX-License-Identifier: Apache-2.0
"""Live weights beside clients: how soon after `publish` each client has an answer with the new version, and what updates cost.

    python bench/peers/weights.py [--clients 8] [--rounds 3] [--seconds 3] [--every 0.1] [--json FILE]

The interpreter has ringbatch, and torch for the second worker. The net has two layers of 384 (0.6 MB in float32). Clients are
processes that send one request at a time. They run for --seconds without updates and for --seconds with one every --every;
the rounds take turns.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import busy
import numpy as np
import processes
import ringbatch as rb

HERE = Path(__file__).resolve().parent
WIDTH, HIDDEN = 32, 384
SHAPES = {"0.weight": (HIDDEN, WIDTH), "0.bias": (HIDDEN,), "2.weight": (HIDDEN, HIDDEN), "2.bias": (HIDDEN,)}


def net(fill: float) -> dict[str, np.ndarray]:
    return {name: np.full(shape, fill, "float32") for name, shape in SHAPES.items()}


def closed_loop(call: Callable[[], int], end: float) -> dict:
    """Calls until end, on the clock time.monotonic. call returns the version of its answer."""
    first: dict[int, float] = {}
    count, gap, before = 0, 0.0, time.monotonic()
    while before < end:
        version = call()
        now = time.monotonic()
        count, gap, before = count + 1, max(gap, now - before), now
        first.setdefault(version, now)
    return {"answers": count, "gap_s": gap, "first": first}


def delays(begun: dict[int, float], first: dict[int, float]) -> list[float]:
    """From the begin of each publish to a client's first answer with that version or a later one, in seconds."""
    return [min(times) - at for version, at in begun.items() if (times := [t for v, t in first.items() if v >= version])]


def quantiles(values: list[float]) -> dict[str, float]:
    """In milliseconds."""
    v = sorted(1000 * x for x in values)
    return {"median_ms": statistics.median(v), "p99_ms": v[int(0.99 * (len(v) - 1))], "worst_ms": v[-1]} if v else {}


def ringbatch_client(name: str, i: int) -> Callable[[], int]:
    model, x = rb.connect(name, wait=60), np.full(WIDTH, i, "float32")

    def call() -> int:
        return model(x, version=True)[1]

    return call


def play(make: Callable[[str, int], Callable[[], int]], name: str, i: int, pipe: Connection) -> None:
    call = make(name, i)
    call()
    pipe.send(None)
    while (end := pipe.recv()) is not None:
        pipe.send(closed_loop(call, end))


@contextlib.contextmanager
def clients(make: Callable[[str, int], Callable[[], int]], name: str, n: int) -> Iterator[list[Connection]]:
    """Starts client processes. Each takes the time at which it ends a measurement, and answers with the result of closed_loop."""
    context, pipes = mp.get_context("spawn"), []
    for i in range(n):
        mine, theirs = context.Pipe()
        pipes.append(mine)
        context.Process(target=play, args=(make, name, i, theirs), daemon=True).start()
        theirs.close()
    for p in pipes:
        p.recv()
    yield pipes
    for p in pipes:
        p.send(None)


def measure(pipes: list[Connection], publish: Callable[[], int] | None, seconds: float, every: float) -> dict:
    """One measurement, with an update every so often, or without. publish returns the version."""
    end = time.monotonic() + seconds
    begun: dict[int, float] = {}
    for p in pipes:
        p.send(end)
    while publish and (at := time.monotonic()) < end - every:
        begun[publish()] = at
        time.sleep(max(0.0, at + every - time.monotonic()))
    found = [p.recv() for p in pipes]
    late = [d for r in found for d in delays(begun, r["first"])]
    rate = sum(r["answers"] for r in found) / seconds
    return {"requests_per_s": rate, "gap_ms": 1000 * max(r["gap_s"] for r in found), "updates": len(begun), **quantiles(late)}


def table(rows: dict[str, list[dict]]) -> str:
    head = "| worker | updates | requests/s | longest gap, ms | publish → each client: median, ms | p99, ms | worst, ms |"
    lines = [head, "|---" * 7 + "|"]
    for name, turns in rows.items():
        updates, figures = sum(t["updates"] for t in turns), ("requests_per_s", "gap_ms", "median_ms", "p99_ms", "worst_ms")
        cells = (f"{statistics.median(t[key] for t in turns):,.1f}" if key in turns[0] else "" for key in figures)
        lines.append(f"| {name} | {updates} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = busy.flags(__doc__, 3.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--every", type=float, default=0.1, help="seconds between two updates")
    a = parser.parse_args()
    kinds = ["numpy", *(["torch"] if rb_torch() else [])]
    rows: dict[str, list[dict]] = {}
    worker = str(HERE / "servers" / "ringbatch_weights.py")
    with busy.rings(a.build, lambda python: [[python, worker, kind] for kind in kinds]) as started, contextlib.ExitStack() as stack:
        os.environ["RINGBATCH_SOCKET"] = started["ringbatch"][1]["RINGBATCH_SOCKET"]
        ready = []
        for kind in kinds:
            publisher = stack.enter_context(rb.publisher(kind, net(0), wait=60))
            publisher.publish(net(0))
            ready.append((kind, publisher, stack.enter_context(clients(ringbatch_client, kind, a.clients))))
        processes.same_priority()
        for _ in range(a.rounds):
            for kind, publisher, pipes in ready:
                for updates in (False, True):
                    publish = functools.partial(publisher.publish, net(1)) if updates else None
                    turn = measure(pipes, publish, a.seconds, a.every)
                    rows.setdefault(f"{kind}, {f'an update each {a.every:g} s' if updates else 'no updates'}", []).append(turn)
    print(table(rows))
    if a.json:
        Path(a.json).write_text(json.dumps({"clients": a.clients, "bytes": sum(v.nbytes for v in net(0).values()), "rows": rows}))


def rb_torch() -> bool:
    try:
        import torch  # noqa: F401
    except ImportError:
        print("no torch here: only the NumPy worker is measured", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    main()
