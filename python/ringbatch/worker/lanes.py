# SPDX-License-Identifier: Apache-2.0
"""Several lanes that take turns at computing batches.

There are as many threads as lanes. While one computes, another answers the batch
before and gathers the rows of the next:

    thread 1    gather A │ compute A │ compute B         │ compute C …
    thread 2             │ gather B  │ answer A, gather C│ answer B, gather D …

Full batches compute one at a time: two would share the same cores, and both would be late.
Of batches that are not, which leave cores idle, several may. Who computes goes on
with the next batch at once, and leaves what it has computed to the thread that has
gathered that one: no thread has to be woken in between.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..binding.library import SLICE_NS
from .lost_gpu import end_if_lost
from .ring import Ring, RingBatch, Stop

log = logging.getLogger("ringbatch")


class Lane(Protocol):
    """Room for one batch. What it raises fails the batch."""

    def gather(self, batch: RingBatch) -> None:
        """Takes a batch and makes ready what it is computed from."""

    def compute(self) -> None:
        """Computes it, without the interpreter's lock for most of the time."""

    def write(self) -> np.ndarray | None:
        """Puts the results into the ring; gives the sizes of the outputs' variable dimensions for each row."""


def run_in_turns(ring: Ring, lanes: Sequence[Lane], stop: Stop, at_once: int = 1) -> None:
    """Serves until stop is set, and what was taken by then is answered; also when the broker goes, which raises BrokerGone.

    at_once: so many lanes may compute at the same time.
    """
    _Turns(ring, stop, at_once).run(lanes)


class _Job:
    """A batch on a lane."""

    def __init__(self, lane: Lane, batch: RingBatch) -> None:
        self.lane, self.batch = lane, batch
        self.failure: BaseException | None = None

    def failed(self, e: BaseException) -> None:
        self.failure = e
        if isinstance(e, Exception):
            log.exception("a batch of %d rows failed", self.batch.rows)
            end_if_lost(e)


class _Turns:
    def __init__(self, ring: Ring, stop: Stop, at_once: int) -> None:
        self._ring, self._stop, self._at_once = ring, stop, at_once
        self._waiting = threading.Lock()  # for the next batch
        self._using = threading.Lock()  # the ring, which takes one thread at a time
        self._taken = 0  # batches that were not answered yet; it grows under _waiting, and changes under _using
        self._turn = threading.Lock()  # guards the next two
        self._computing = 0  # threads
        self._gathered: deque[_Job] = deque()  # while as many compute as may
        self._computed: queue.SimpleQueue[_Job] = queue.SimpleQueue()  # one for each that was in _gathered
        self._ended: BaseException | None = None  # why there will be no more batches
        self._broken = False  # a thread ended in the midst of a batch

    def run(self, lanes: Sequence[Lane]) -> None:
        others = [threading.Thread(target=self._serve, args=(lane,), name="ringbatch lane", daemon=True) for lane in lanes[1:]]
        for t in others:
            t.start()
        self._serve(lanes[0])
        for t in others:
            t.join()
        if self._ended is not None:
            raise self._ended

    def _serve(self, lane: Lane) -> None:
        amidst = False
        try:
            while (batch := self._take()) is not None:
                amidst = True
                job = self._run(_Job(lane, batch))
                if job is None:
                    return
                self._answer(job)
                lane, amidst = job.lane, False
        except BaseException as e:  # the other threads finish what they have
            self._ended = self._ended or e
            self._broken = self._broken or amidst

    def _take(self) -> RingBatch | None:
        """The next batch; None when there will be none."""
        while True:
            with self._waiting:
                if self._ended is not None or self._stop.is_set():
                    return None
                batch = self._next()
                if batch is not None:
                    return batch

    def _next(self) -> RingBatch | None:
        if not self._taken:  # nobody else uses the ring: this may spin for a moment before it sleeps
            batch = self._ring.next(SLICE_NS)
            self._taken += batch is not None
            return batch
        if not self._ring.wait(SLICE_NS):
            return None
        with self._using:
            batch = self._ring.next(0)
            self._taken += batch is not None
            return batch

    def _run(self, job: _Job) -> _Job | None:
        """Has the job computed; gives one that is to be answered, which may be another. None: there will be none."""
        try:
            with self._using:
                job.lane.gather(job.batch)
        except BaseException as e:
            job.failed(e)
            return job
        with self._turn:
            lead = self._computing < self._at_once
            if lead:
                self._computing += 1
            else:
                self._gathered.append(job)
        return self._lead(job) if lead else self._follow()

    def _lead(self, job: _Job) -> _Job:
        """Computes until nothing more was gathered."""
        while True:
            try:
                job.lane.compute()
            except BaseException as e:
                job.failed(e)
            with self._turn:
                if not self._gathered:
                    self._computing -= 1
                    return job
                following = self._gathered.popleft()
            self._computed.put(job)
            job = following

    def _follow(self) -> _Job | None:
        while True:
            try:
                return self._computed.get(timeout=SLICE_NS / 1e9)
            except queue.Empty:
                if self._broken:
                    return None

    def _answer(self, job: _Job) -> None:
        try:
            dims = job.lane.write() if job.failure is None else None
            if dims is not None:
                with self._using:
                    job.batch.set_rows_dims(dims)
        except BaseException as e:
            job.failed(e)
        with self._using:
            if job.failure is not None:
                job.batch.fail_all(job.failure)
            job.batch.complete()
            self._taken -= 1  # not before: who sees none uses the ring without asking
        if job.failure is not None and not isinstance(job.failure, Exception):
            raise job.failure
