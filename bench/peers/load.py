# SPDX-License-Identifier: Apache-2.0
"""Clients of one server: processes that each send one request at a time.

    python load.py KIND ADDRESS --bytes 64 --clients 8 --seconds 2

Runs in the environment of the peer whose server it calls. Every client has its
own input and checks every answer: the model sums its input, and all sums are
whole numbers that float32 holds exactly. The clients begin together, after a few
answers each. Neither the first half second nor answers after the end count.
Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import random
import time

import numpy as np

WARM_UP = 5  # uncounted answers of each client
LEAD_IN_S = 0.5  # load before the clock starts: some servers adapt their wait
SAMPLES = 2000  # random latencies of each client that are kept


class Failed(Exception):
    pass


def payload(client: int, size: int) -> np.ndarray:
    """Small whole numbers, so that every order of adding them has the same sum."""
    return np.random.default_rng(client).integers(0, 16, size // 4).astype(np.float32)


def compute(seconds: float) -> None:
    """Takes CPU time, as a client that decodes or simulates does."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def client(i: int, make, size: int, seconds: float, computes: float, ready, start, end, answers) -> None:
    # A client that fails reports it: the others must not wait for its start.
    is_ready = False
    try:
        x = payload(i, size)
        want = float(x.sum(dtype=np.float64))
        call = make(i, x)
        for _ in range(WARM_UP):
            if call() != want:
                raise ValueError("a wrong sum")
        ready.release()
        is_ready = True
        start.wait()
        took, first, last = [], end.value - seconds, end.value
        while True:
            if computes:
                compute(computes)
            begin = time.monotonic()
            got = call()
            now = time.monotonic()
            if got != want:
                raise ValueError(f"a wrong sum: {got}, not {want}")
            if now > last:
                break
            if now > first:
                took.append(now - begin)
        kept = took if len(took) <= SAMPLES else random.sample(took, SAMPLES)
        answers.put((len(took), kept, None))
    except BaseException as e:
        answers.put((0, [], f"{type(e).__name__}: {e}"[:300]))
        if not is_ready:
            ready.release()
    finally:
        answers.close()
        answers.join_thread()
        os._exit(0)  # some client libraries have threads that do not end well in a forked process


def measure(make, size: int, clients: int, seconds: float, computes: float = 0.0) -> dict:
    context = mp.get_context("fork")
    ready, start, answers = context.Semaphore(0), context.Event(), context.Queue()
    end = context.Value("d", 0.0, lock=False)
    shared = make, size, seconds, computes, ready, start, end, answers
    processes = [context.Process(target=client, args=(i, *shared), daemon=True) for i in range(clients)]
    for p in processes:
        p.start()
    for _ in processes:
        if not ready.acquire(timeout=60):
            raise Failed("a client was not answered within a minute")
    end.value = time.monotonic() + LEAD_IN_S + seconds
    start.set()
    found = [answers.get(timeout=LEAD_IN_S + seconds + 60) for _ in processes]
    for p in processes:
        p.join(10)
    errors = [e for _, _, e in found if e]
    if errors:
        raise Failed(f"{len(errors)} of {clients} clients failed: {errors[0]}")
    took = np.array([t for _, kept, _ in found for t in kept] or [float("nan")])
    # Every client keeps at most SAMPLES latencies, so that all clients count alike.
    rate = sum(n for n, _, _ in found) / seconds
    return {
        "requests_per_s": rate,
        "p50_ms": float(np.percentile(took, 50)) * 1e3,
        "p99_ms": float(np.percentile(took, 99)) * 1e3,
    }


def tell(measured) -> None:
    """Prints the measurement, or the reason why there is none."""
    try:
        print(json.dumps(measured()))
    except Failed as e:
        print(json.dumps({"error": str(e)}))


def flags(doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=64)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--compute_ms", type=float, default=0.0)
    return parser


def main() -> None:
    import calls

    parser = flags(__doc__)
    parser.add_argument("kind")
    parser.add_argument("address")
    a = parser.parse_args()
    make = calls.KINDS[a.kind](a.address, a.bytes)
    tell(lambda: measure(make, a.bytes, a.clients, a.seconds, a.compute_ms / 1e3))


if __name__ == "__main__":
    main()
