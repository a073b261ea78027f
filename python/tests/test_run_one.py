# SPDX-License-Identifier: Apache-2.0
"""The loop of a worker whose next batch's rows are gathered while this one's function runs."""

from __future__ import annotations

import itertools
import threading

import pytest

from ringbatch.worker import worker
from ringbatch.worker.ring import run_one


class FakeBatch:
    """Writes down what is done with a batch, in one list for all."""

    _gathered = 0

    def __init__(self, ring, buffers, raw, debug):
        self._raw, self._buffers, self._log = raw, buffers, ring.log

    def __getattr__(self, name):
        return lambda *_: self._log.append((name, self._raw))


class FakeRing:
    """There is always another batch: 1, 2, 3, …"""

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
    assert [b._raw for b in ran] == [1, 2, 3, 4, 5]  # the last was taken before the stop
    for b, following in zip(ran, ran[1:]):
        assert b._buffers is not following._buffers, "the arrays of one that is not answered yet are used again"
    for n in (2, 3, 4, 5):  # the first batch had nobody look ahead
        begun = ring.log.index(("_prefetch", n))
        assert begun < ring.log.index(("complete", n - 1)), "nobody looked ahead"
        if n > 2:
            assert begun > ring.log.index(("complete", n - 2)), "its arrays are those of the one before the last"


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
