# SPDX-License-Identifier: Apache-2.0
"""The runtime under every worker: attaching, lanes, answers."""

from __future__ import annotations

import concurrent.futures
import os
import threading

import numpy as np
import pytest
from conftest import FOUR, broker_at, eventually

import ringbatch as rb
from ringbatch.worker.ring import Ring, RingBatch, keep_attached, run, worker_options

TEXT = "x:f32[4] -> y:f32[4]"
DECLARED = ("--model", "m", "--input", "x:f32[4]", "--max-batch-size", "1", "--wait-time", "0s")


class Slow:
    """A lane that computes in a thread once the event is set."""

    def __init__(self, ring: Ring, open: threading.Event) -> None:
        self.ring, self.open = ring, open
        self.submitted = 0
        self.thread: threading.Thread | None = None

    def submit(self, batch: RingBatch) -> None:
        self.submitted += 1
        (x,), (y,) = self.ring.signature.inputs, self.ring.signature.outputs
        source = np.concatenate([self.ring.mapping.rows(x, slot, n, x.shape) for slot, _, n in batch.runs])

        def compute() -> None:
            self.open.wait(120)
            for slot, row, n in batch.runs:
                self.ring.mapping.rows(y, slot, n, y.shape)[...] = source[row : row + n] + 1

        self.thread = threading.Thread(target=compute)
        self.thread.start()

    def done(self) -> bool:
        return self.thread is not None and not self.thread.is_alive()

    def wait(self) -> None:
        assert self.thread is not None
        self.thread.join()

    def patience(self) -> int:
        return 100_000

    def release(self) -> None:
        self.thread = None


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor() as pool:
        yield pool


def x(v):
    return np.full(4, v, "float32")


def test_lanes_hold_several_batches_and_answer_them(at, pool):
    stop, open, lanes = threading.Event(), threading.Event(), []
    options = worker_options(depth=2, socket=at)

    def serve(ring: Ring) -> None:
        lanes.extend(Slow(ring, open) for _ in range(2))
        run(ring, lanes, stop)

    with broker_at(at, *DECLARED, "--output", "y:f32[4]"):
        served = pool.submit(keep_attached, lambda: Ring("m", TEXT, options), serve, stop)
        with rb.connect("m", socket=at, wait=60) as m:
            futures = [m.submit(x(i)) for i in range(6)]
            eventually(lambda: len(lanes) == 2 and all(lane.submitted for lane in lanes))  # both at once
            stop.set()  # batches on a lane finish first
            open.set()
            served.result(60)
            assert [(f.result(60) == i + 1).all() for i, f in enumerate(futures[:2])] == [True, True]


def test_a_permanent_error_ends_the_worker(at, pool):
    @rb.worker("m", **FOUR)
    def idle(batch):
        pass

    with broker_at(at) as broker:
        served = pool.submit(idle.run, socket=at, wait=60)
        rb.connect("m", socket=at, wait=60).close()
        broker.kill()
        broker.wait(60)
    os.unlink(at)
    with broker_at(at, *DECLARED, "--output", "z:f32[5]"):  # the same name, another signature
        assert type(served.exception(60)) is rb.SignatureMismatch


def test_a_worker_waits_for_its_broker_as_long_as_asked(at, pool):
    @rb.worker("m", **FOUR)
    def idle(batch):
        pass

    with pytest.raises(rb.NoBroker):
        idle.run(socket=at, wait=0.2)
    served = pool.submit(idle.run, socket=at, wait=60)
    with broker_at(at), rb.connect("m", socket=at, wait=60):
        assert not served.done()
    with broker_at(at, *DECLARED, "--output", "z:f32[5]"):  # another signature ends the worker
        assert served.exception(60)


# The loop that gathers the rows of the next batch while the function runs.
