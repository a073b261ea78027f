"""The well-known Python way, for comparison.

Every producer has a block of multiprocessing.shared_memory for its input and
its output. It writes the input, puts its number into a Queue and waits for the
answer in a Queue of its own (or, with --answers semaphore, which is quicker and
less usual, for a semaphore). The model process takes numbers from the Queue until it has a batch
or the wait time is over, concatenates the inputs, runs the model, and writes
each output back. Small, and as quick as this design allows: one process
batches and computes, nothing but the number is pickled, and no block is copied
more often than np.concatenate needs. With --answers none nothing is sent: what
writing the inputs alone, in turns, takes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import queue
import time
from multiprocessing import shared_memory

import numpy as np


def arrays(block: shared_memory.SharedMemory, elements: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.ndarray((1, elements), np.float32, block.buf)
    y = np.ndarray((1, outputs), np.float32, block.buf, offset=4 * elements)
    return x, y


def producer(i: int, name: str, elements: int, outputs: int, seconds: float, tasks, done, start, counts) -> None:
    block = shared_memory.SharedMemory(name)
    x, y = arrays(block, elements, outputs)
    frame = np.random.rand(elements).astype(np.float32)
    start.wait()
    wait = getattr(done, "get", None) or getattr(done, "acquire", None)
    n, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        x[0] = frame
        if done is None:
            os.sched_yield()
        else:
            tasks.put(i)
            wait()
            y[0].copy()
        n += 1
    counts[i] = n
    del x, y
    block.close()


def model_process(names: list[str], elements: int, outputs: int, max_batch: int, wait: float, tasks, done, stop) -> None:
    blocks = [shared_memory.SharedMemory(name) for name in names]
    pairs = [arrays(b, elements, outputs) for b in blocks]
    result = np.zeros((max_batch, outputs), np.float32)
    tell = [(lambda d=d: d.put(True)) if hasattr(d, "put") else d.release for d in done if d]
    while True:
        try:
            batch = [tasks.get(timeout=0.5)]
        except queue.Empty:
            if stop.is_set():
                break
            continue
        deadline = time.monotonic() + wait
        while len(batch) < max_batch:
            left = deadline - time.monotonic()
            try:
                batch.append(tasks.get(timeout=left) if left > 0 else tasks.get_nowait())
            except queue.Empty:
                break
        np.concatenate([pairs[i][0] for i in batch])  # what the model, which does nothing, would be given
        for row, i in enumerate(batch):
            pairs[i][1][0] = result[row]
            tell[i]()
    del pairs
    for b in blocks:
        b.close()


def measure(producers: int, elements: int, outputs: int, max_batch: int, wait: float, seconds: float, answers: str) -> float:
    """Requests per second."""
    context = mp.get_context("fork")
    tasks, start, stop = context.Queue(), context.Event(), context.Event()
    make = {"queue": context.Queue, "semaphore": lambda: context.Semaphore(0), "none": lambda: None}[answers]
    done = [make() for _ in range(producers)]
    counts = context.Array("q", producers, lock=False)
    blocks = [shared_memory.SharedMemory(create=True, size=4 * (elements + outputs)) for _ in range(producers)]
    names = [b.name for b in blocks]
    processes = [
        context.Process(target=producer, args=(i, names[i], elements, outputs, seconds, tasks, done[i], start, counts)) for i in range(producers)
    ]
    model = context.Process(target=model_process, args=(names, elements, outputs, max_batch, wait, tasks, done, stop))
    model.start()
    for p in processes:
        p.start()
    time.sleep(0.5)
    began = time.monotonic()
    start.set()
    for p in processes:
        p.join()
    took = time.monotonic() - began
    stop.set()
    model.join()
    for b in blocks:
        b.close()
        b.unlink()
    return sum(counts) / took


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--producers", type=int, default=64)
    parser.add_argument("--elements", type=int, default=3 * 224 * 224)
    parser.add_argument("--outputs", type=int, default=1000)
    parser.add_argument("--max_batch_size", type=int, default=32)
    parser.add_argument("--wait_time", type=float, default=0.002)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--answers", choices=("queue", "semaphore", "none"), default="queue")
    a = parser.parse_args()
    rate = measure(a.producers, a.elements, a.outputs, a.max_batch_size, a.wait_time, a.seconds, a.answers)
    print(json.dumps({"requests_per_s": rate}))
