# SPDX-License-Identifier: Apache-2.0
"""The well-known Python way, for comparison.

Every producer has a block of multiprocessing.shared_memory for its input. It
writes the input, puts its number into a Queue and waits for the answer. The
model process takes numbers from the Queue until it has a batch or the wait time
is over, concatenates the inputs, runs the model, and answers each:

--answers queue      the output goes through a Queue of the producer's: the usual way
--answers token      the output goes into the block too, and a token through the Queue
--answers semaphore  the output goes into the block, and a semaphore is released: the quickest
--answers none       nothing is sent: what writing the inputs alone, in turns, takes
--answers full       nothing is sent: a producer sleeps until a batch is full, and who fills it wakes the others:
                     what producers that wait for a batch can reach if it costs nothing
--answers gather     nothing is sent, and every producer also copies another one's input to memory
                     of its own: what writing the inputs and gathering them once takes

Small, and as quick as each design allows: one process batches and computes, no
input is pickled, and none is copied more often than np.concatenate needs.
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
from busy import cores_for


def arrays(block: shared_memory.SharedMemory, elements: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.ndarray((1, elements), np.float32, block.buf)
    y = np.ndarray((1, outputs), np.float32, block.buf, offset=4 * elements)
    return x, y


def producer(i: int, name: str, next_name: str, elements: int, outputs: int, seconds: float, answers: str, max_batch: int, queued, tasks, done, start, counts, cpu) -> None:
    block = shared_memory.SharedMemory(name)
    x, y = arrays(block, elements, outputs)
    frame = np.random.rand(elements).astype(np.float32)
    other = shared_memory.SharedMemory(next_name)
    theirs, _ = arrays(other, elements, outputs)
    gathered = np.zeros_like(theirs)
    start.wait()
    wait = None if answers in ("none", "gather", "full") else done[i].acquire if answers == "semaphore" else done[i].get
    before, n, end = time.process_time(), 0, time.monotonic() + seconds
    while time.monotonic() < end:
        x[0] = frame
        if answers == "gather":
            gathered[0] = theirs[0]
        if answers == "full":
            with queued.get_lock():
                batch = fill(queued, i, max_batch)
            for other_one in batch:
                done[other_one].release()
            done[i].acquire(timeout=max(0.0, end - time.monotonic()))
        elif wait is None:
            os.sched_yield()
        else:
            tasks.put(i)
            wait()
            if answers != "queue":
                y[0].copy()
        n += 1
    counts[i], cpu[i] = n, time.process_time() - before
    del x, y, theirs
    block.close()
    other.close()


def fill(queued, i: int, max_batch: int) -> list[int]:
    """Who is to be woken now: the whole batch, if this one fills it. queued[0] counts those behind it."""
    queued[0] += 1
    queued[queued[0]] = i
    if queued[0] < max_batch:
        return []
    queued[0] = 0
    return queued[1 : max_batch + 1]


def model_process(names: list[str], elements: int, outputs: int, max_batch: int, wait: float, answers: str, tasks, done, stop) -> None:
    blocks = [shared_memory.SharedMemory(name) for name in names]
    pairs = [arrays(b, elements, outputs) for b in blocks]
    result = np.zeros((max_batch, outputs), np.float32)
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
            if answers == "queue":
                done[i].put(result[row])
                continue
            pairs[i][1][0] = result[row]
            if answers == "token":
                done[i].put(True)
            else:
                done[i].release()
    del pairs
    for b in blocks:
        b.close()


def measure(producers: int, elements: int, outputs: int, max_batch: int, wait: float, seconds: float, answers: str) -> dict[str, float]:
    """Requests per second, the producers' CPU time a request, and how many cores were busy."""
    context = mp.get_context("fork")
    tasks, start, stop = context.Queue(), context.Event(), context.Event()
    make = {"queue": context.Queue, "token": context.Queue, "semaphore": lambda: context.Semaphore(0), "full": lambda: context.Semaphore(0), "none": lambda: None, "gather": lambda: None}[answers]
    done = [make() for _ in range(producers)]
    counts, cpu = context.Array("q", producers, lock=False), context.Array("d", producers, lock=False)
    queued = context.Array("q", max_batch + 1)
    blocks = [shared_memory.SharedMemory(create=True, size=4 * (elements + outputs)) for _ in range(producers)]
    names = [b.name for b in blocks]
    processes = [
        context.Process(target=producer, args=(i, names[i], names[(i + 1) % producers], elements, outputs, seconds, answers, max_batch, queued, tasks, done, start, counts, cpu))
        for i in range(producers)
    ]
    model = context.Process(target=model_process, args=(names, elements, outputs, max_batch, wait, answers, tasks, done, stop))
    model.start()
    for p in processes:
        p.start()
    time.sleep(0.5)
    start.set()
    cores = cores_for(seconds)
    for p in processes:
        p.join()
    stop.set()
    model.join()
    for b in blocks:
        b.close()
        b.unlink()
    # Each counted for so long by its own clock.
    return {"requests_per_s": sum(counts) / seconds, "producer_cpu_us": 1e6 * sum(cpu) / max(1, sum(counts)), "cores_busy": cores}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--producers", type=int, default=64)
    parser.add_argument("--elements", type=int, default=3 * 224 * 224)
    parser.add_argument("--outputs", type=int, default=1000)
    parser.add_argument("--max_batch_size", type=int, default=32)
    parser.add_argument("--wait_time", type=float, default=0.002)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--answers", choices=("queue", "token", "semaphore", "none", "full", "gather"), default="queue")
    a = parser.parse_args()
    print(json.dumps(measure(a.producers, a.elements, a.outputs, a.max_batch_size, a.wait_time, a.seconds, a.answers)))
