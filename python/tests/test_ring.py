# SPDX-License-Identifier: Apache-2.0
"""The runtime under every worker: attaching, lanes, answers."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import threading

import numpy as np
import pytest
from conftest import FOUR, broker_at, eventually

import ringbatch as rb
from ringbatch.worker import worker
from ringbatch.worker.ring import Ring, RingBatch, keep_attached, run, run_one, worker_options

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


def test_a_batch_that_is_done_at_once_is_answered_before_the_next_is_waited_for():
    log, stop = [], threading.Event()

    class Fake:
        rows = 1

        def next(self, timeout_ns):
            log.append("next")
            return self

        def __getattr__(self, name):
            return lambda *_: log.append(name) or name == "done"

    def is_over():
        return log.count("complete") == 2

    stop.is_set = is_over  # type: ignore[method-assign]
    run(Fake(), [Fake(), Fake()], stop)
    assert log == ["next", "submit", "done", "release", "complete"] * 2


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


class FakeBatch:
    """Records all calls of all batches in one list."""

    _gathered = 0

    def __init__(self, ring, buffers, raw, debug):
        self._raw, self._buffers, self._log = raw, buffers, ring.log

    def __getattr__(self, name):
        return lambda *_: self._log.append((name, self._raw))


class FakeRing:
    """Has an endless number of batches: 1, 2, 3, …"""

    def __init__(self):
        self.log: list[tuple[str, int]] = []
        self._numbers = itertools.count(1)

    def next(self, wait):
        return FakeRaw(next(self._numbers), self.log)


class FakeRaw(int):
    def __new__(cls, number, log):
        self = super().__new__(cls, number)
        self.log = log
        return self

    rows = 1

    def complete(self):
        self.log.append(("complete", self))


@pytest.fixture
def lane(monkeypatch):
    monkeypatch.setattr(worker, "Batch", FakeBatch)
    ring = FakeRing()
    ran = []
    stop = threading.Event()

    def function(batch):
        ran.append(batch)
        ring.log.append(("run", batch._raw))
        if len(ran) == 4:
            stop.set()

    made = worker.FunctionLane(ring, function, False)
    return made, ring, ran, stop


def test_the_next_batch_is_gathered_ahead_into_arrays_of_its_own(lane):
    made, ring, ran, stop = lane
    run_one(ring, made, stop)
    assert [b._raw for b in ran] == [1, 2, 3, 4, 5]  # the last batch was taken before the stop
    for b, following in zip(ran, ran[1:]):
        assert b._buffers is not following._buffers, "two batches in a row share arrays"
    for n in (2, 3, 4, 5):
        begun = ring.log.index(("_prefetch", n))
        assert begun < ring.log.index(("complete", n - 1)), "not gathered ahead"
        if n > 2:
            assert begun > ring.log.index(("complete", n - 2)), "the batch before the last still uses the arrays"


def test_a_worker_that_is_to_stop_takes_no_further_batch(lane):
    made, ring, ran, stop = lane
    run_one(ring, made, stop)
    assert ring.next(0) == len(ran) + 1
    assert [n for what, n in ring.log if what == "complete"] == [b._raw for b in ran]


def test_a_batch_that_ran_is_answered_though_the_next_cannot_be_gathered_ahead(lane, monkeypatch, caplog):
    made, ring, ran, stop = lane

    def no_memory(self, k):
        raise MemoryError

    monkeypatch.setattr(FakeBatch, "_prefetch", no_memory, raising=False)
    run_one(ring, made, stop)
    assert [n for what, n in ring.log if what == "complete"] == [1, 2, 3, 4, 5]
    assert "could not be gathered ahead" in caplog.text
