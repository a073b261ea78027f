"""Many Python producer processes on ringbatch, each one request at a time."""

from __future__ import annotations

import multiprocessing as mp
import time

import numpy as np
import ringbatch as rb


def producer(model_name: str, seconds: float, ready, start, total) -> None:
    with rb.connect(model_name, window=1, wait=20) as model:
        frame = np.random.rand(*model.inputs[0].shape).astype(np.float32)
        ready.release()
        start.wait()
        n, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            model(frame)  # one copy in, one out
            n += 1
        with total.get_lock():
            total.value += n


def measure(model_name: str, producers: int, seconds: float) -> float:
    """Requests per second."""
    context = mp.get_context("fork")
    ready, start = context.Semaphore(0), context.Event()
    total = context.Value("q", 0)
    processes = [context.Process(target=producer, args=(model_name, seconds, ready, start, total)) for _ in range(producers)]
    for p in processes:
        p.start()
    for _ in processes:
        while not ready.acquire(timeout=1):
            if not all(p.is_alive() for p in processes):
                for p in processes:
                    p.terminate()
                raise SystemExit("a producer ended before it was ready; its error is above")
    began = time.monotonic()
    start.set()
    for p in processes:
        p.join()
    return total.value / (time.monotonic() - began)
