"""Many Python producer processes on ringbatch, each one request at a time."""

from __future__ import annotations

import multiprocessing as mp
import time

import numpy as np
import ringbatch as rb


def without_copies(model: rb.Model, frame: np.ndarray) -> None:
    """The frame is written where it is read: what a producer that makes its inputs there saves is not counted."""
    with model.request() as req:
        req.inputs["x"][...] = frame
        req.run().outputs["y"]


def producer(model_name: str, seconds: float, way: str, ready, start, total) -> None:
    with rb.connect(model_name, window=1, wait=20) as model:
        frame = np.random.rand(*model.inputs[0].shape).astype(np.float32)
        run = {"model": rb.Model.__call__, "request": without_copies}[way]
        ready.release()
        start.wait()
        n, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            run(model, frame)
            n += 1
        with total.get_lock():
            total.value += n


def measure(model_name: str, producers: int, seconds: float, way: str = "model") -> float:
    """Requests per second, by model(x) (a copy in and a copy out) or by request()."""
    context = mp.get_context("fork")
    ready, start = context.Semaphore(0), context.Event()
    total = context.Value("q", 0)
    processes = [context.Process(target=producer, args=(model_name, seconds, way, ready, start, total)) for _ in range(producers)]
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
