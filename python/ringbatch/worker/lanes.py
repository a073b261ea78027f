# SPDX-License-Identifier: Apache-2.0
"""Several lanes that take turns at computing batches.

There are as many threads as lanes. While one computes, another answers the batch
before and gathers the rows of the next:

    thread 1    gather A │ compute A │ compute B         │ compute C …
    thread 2             │ gather B  │ answer A, gather C│ answer B, gather D …

Full batches compute one at a time: two would share the same cores, and both would be
late. Smaller batches leave cores idle, so several may compute at once. The computing
thread goes on with the next gathered batch at once. The thread that gathered it answers
the computed one: no thread is woken in between.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..binding.library import SLICE_NS
from .ring import Ring, RingBatch, Stop, fail


class Lane(Protocol):
    """Room for one batch. An exception fails the batch."""

    def gather(self, batch: RingBatch) -> None:
        """Takes a batch and gathers its inputs."""

    def compute(self) -> None:
        """Computes the batch, mostly without the GIL."""

    def write(self) -> np.ndarray | None:
        """Writes the results into the ring; returns the sizes of the outputs' variable dimensions for each row."""


def run_in_turns(ring: Ring, lanes: Sequence[Lane], stop: Stop, at_once: int = 1) -> None:
    """Serves until stop is set or the broker goes, which raises BrokerGone. Batches that were taken are answered.

    at_once: the lanes that may compute at the same time.
    """
    _Turns(ring, stop, at_once).run(lanes)


class _Job:
    """A batch on a lane."""

    def __init__(self, lane: Lane, batch: RingBatch) -> None:
        self.lane, self.batch = lane, batch
        self.failure: BaseException | None = None


class _Turns:
    def __init__(self, ring: Ring, stop: Stop, at_once: int) -> None:
        self._ring, self._stop, self._at_once = ring, stop, at_once
        self._waiting = threading.Lock()  # held by the thread that waits for the next batch
        self._using = threading.Lock()  # held while a thread uses the ring
        self._taken = 0  # batches that were not answered yet; it grows under _waiting, and changes under _using
        self._turn = threading.Lock()  # guards the next two
        self._computing = 0  # threads
        self._gathered: deque[_Job] = deque()  # batches that wait for a computing thread
        self._computed: queue.SimpleQueue[_Job] = queue.SimpleQueue()  # a batch for each one that left _gathered
        self._ended: BaseException | None = None  # the reason for the end
        self._broken = False  # a thread ended with a batch unanswered

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
        except BaseException as e:  # the other threads finish their batches
            self._ended = self._ended or e
            self._broken = self._broken or amidst

    def _take(self) -> RingBatch | None:
        """The next batch; None at the end."""
        while True:
            with self._waiting:
                if self._ended is not None or self._stop.is_set():
                    return None
                batch = self._next()
                if batch is not None:
                    return batch

    def _next(self) -> RingBatch | None:
        if not self._taken:  # no other thread uses the ring, so this call may spin before it sleeps
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
        """Computes the job, or leaves it to another thread; returns a job to answer, None at the end."""
        try:
            with self._using:
                job.lane.gather(job.batch)
        except BaseException as e:
            job.failure = e
            return job
        with self._turn:
            lead = self._computing < self._at_once
            if lead:
                self._computing += 1
            else:
                self._gathered.append(job)
        return self._lead(job) if lead else self._follow()

    def _lead(self, job: _Job) -> _Job:
        """Computes until no gathered batch is left."""
        while True:
            try:
                job.lane.compute()
            except BaseException as e:
                job.failure = e
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
            job.failure = e
        with self._using:
            try:
                if job.failure is None:
                    job.batch.complete()
                else:
                    fail(job.batch, job.failure, lambda: None)
            finally:
                self._taken -= 1  # last: at 0 a thread uses the ring without _using
