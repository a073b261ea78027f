# SPDX-License-Identifier: Apache-2.0
"""Many Python producer processes on ringbatch, each with one request at a time or a few."""

from __future__ import annotations

import collections
import multiprocessing as mp
import time

import numpy as np
import ringbatch as rb
from busy import cores_for


MEAN = np.float32(0.5)


def given_model(model: rb.Model, frame: np.ndarray, _made: np.ndarray) -> None:
    model(frame)


def given_request(model: rb.Model, frame: np.ndarray, _made: np.ndarray) -> None:
    """The input exists already: it is copied once this way too."""
    with model.request() as req:
        req.inputs["x"][...] = frame
        req.run().outputs["y"]


def made_model(model: rb.Model, frame: np.ndarray, made: np.ndarray) -> None:
    np.subtract(frame, MEAN, out=made)
    model(made)


def made_request(model: rb.Model, frame: np.ndarray, _made: np.ndarray) -> None:
    """The input is made (here: normalised) where the worker reads it: no copy."""
    with model.request() as req:
        np.subtract(frame, MEAN, out=req.inputs["x"])
        req.run().outputs["y"]


WAYS = {"model": given_model, "request": given_request, "made model": made_model, "made request": made_request}


def one_at_a_time(model: rb.Model, way: str, frame: np.ndarray, end: float) -> int:
    made, run, n = np.empty_like(frame), WAYS[way], 0
    while time.monotonic() < end:
        run(model, frame, made)
        n += 1
    return n


def several_at_once(model: rb.Model, in_flight: int, frame: np.ndarray, end: float) -> int:
    """The next input is written while the ones before it are on their way."""
    sent: collections.deque[rb.Request] = collections.deque()
    n = 0
    while sent or time.monotonic() < end:
        if len(sent) == in_flight or time.monotonic() >= end:
            with sent.popleft() as first:
                first.wait().outputs["y"].copy()
            n += time.monotonic() < end
            continue
        req = model.request()
        req.inputs["x"][...] = frame
        sent.append(req.commit())
    return n


def producer(model_name: str, seconds: float, way: str, in_flight: int, ready, start, total, cpu) -> None:
    with rb.connect(model_name, window=in_flight, wait=20) as model:
        frame = np.random.rand(*model.inputs[0].shape).astype(np.float32)
        ready.release()
        start.wait()
        before, end = time.process_time(), time.monotonic() + seconds
        n = one_at_a_time(model, way, frame, end) if in_flight == 1 else several_at_once(model, in_flight, frame, end)
        with total.get_lock():
            total.value += n
            cpu.value += time.process_time() - before


def measure(model_name: str, producers: int, seconds: float, way: str = "model", in_flight: int = 1) -> dict[str, float]:
    """Requests per second, by one of WAYS: model(x) (a copy in and a copy out) or request(), of inputs that are given or made;
    the producers' CPU time a request, without what they take to start; and how many cores were busy."""
    context = mp.get_context("fork")
    ready, start = context.Semaphore(0), context.Event()
    total, cpu = context.Value("q", 0), context.Value("d", 0.0, lock=False)
    processes = [context.Process(target=producer, args=(model_name, seconds, way, in_flight, ready, start, total, cpu)) for _ in range(producers)]
    for p in processes:
        p.start()
    for _ in processes:
        while not ready.acquire(timeout=1):
            if not all(p.is_alive() for p in processes):
                for p in processes:
                    p.terminate()
                raise SystemExit("a producer ended before it was ready; its error is above")
    start.set()
    cores = cores_for(seconds)
    for p in processes:
        p.join()
    # Each counted for so long by its own clock; how long 64 processes take to end does not count.
    return {"requests_per_s": total.value / seconds, "producer_cpu_us": 1e6 * cpu.value / max(1, total.value), "cores_busy": cores}
