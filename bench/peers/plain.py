# SPDX-License-Identifier: Apache-2.0
"""The plain multiprocessing way: a block of shared memory for every client, a Queue
to the model process, a semaphore back.

    python plain.py --bytes 64 --clients 8 --seconds 2 --wait_ms 2

A client writes its input into its block, puts its number into the Queue and waits
for its semaphore. The model process takes numbers until it has 32 or the wait is
over, concatenates, sums, writes each sum into its client's block and releases its
semaphore. This was the quickest of several ways. Model and clients are those of all peers.
"""

from __future__ import annotations

import multiprocessing as mp
import queue
import time

import numpy as np
import load

MOST = 32


def take(tasks, wait: float) -> list[int]:
    """The numbers of the clients in the next batch."""
    batch = [tasks.get()]
    deadline = time.monotonic() + wait
    while len(batch) < MOST:
        left = deadline - time.monotonic()
        try:
            batch.append(tasks.get(timeout=left) if left > 0 else tasks.get_nowait())
        except queue.Empty:
            break
    return batch


def model(pairs: list, tasks, done: list, wait: float) -> None:
    while True:
        batch = take(tasks, wait)
        sums = np.concatenate([pairs[i][0] for i in batch]).sum(axis=1)
        for i, y in zip(batch, sums):
            pairs[i][1][0] = y
            done[i].release()


def block(context, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Shared memory of one client: a row of input, and its sum."""
    b = np.frombuffer(context.RawArray("B", size + 4), np.uint8)
    return b[:size].view(np.float32)[None], b[size:].view(np.float32)


def measure(size: int, clients: int, seconds: float, wait: float, computes: float = 0.0) -> dict:
    context = mp.get_context("fork")
    tasks, done = context.Queue(), [context.Semaphore(0) for _ in range(clients)]
    pairs = [block(context, size) for _ in range(clients)]
    m = context.Process(target=model, args=(pairs, tasks, done, wait), daemon=True)
    m.start()

    def make(i: int, x: np.ndarray):
        mine, answer = pairs[i]

        def call() -> float:
            mine[0] = x
            tasks.put(i)
            done[i].acquire()
            return answer[0]

        return call

    try:
        return load.measure(make, size, clients, seconds, computes)
    finally:
        m.kill()
        m.join()


def arguments(doc: str, measure) -> None:
    parser = load.flags(doc)
    parser.add_argument("--wait_ms", type=float, default=0.0)
    a = parser.parse_args()
    load.tell(lambda: measure(a.bytes, a.clients, a.seconds, a.wait_ms / 1e3, a.compute_ms / 1e3))


if __name__ == "__main__":
    arguments(__doc__, measure)
