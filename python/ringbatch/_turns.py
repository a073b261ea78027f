# SPDX-License-Identifier: Apache-2.0
"""Batches on several lanes that take turns at what computes.

Each lane has a thread of its own. While one computes, another answers the batch
before and gathers the rows of the next:

    lane 1    gather A │ compute A │ write A, answer it, gather C │ compute C …
    lane 2             │ gather B  │ compute B                    │ write B …

Only one computes at a time: two would share the same cores, and both would be late.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ._library import SLICE_NS
from ._ring import Ring, RingBatch, Stop

log = logging.getLogger("ringbatch")


class Lane(Protocol):
    """Room for one batch. What it raises fails the batch."""

    def gather(self, batch: RingBatch) -> None:
        """Takes a batch and makes ready what it is computed from."""

    def compute(self) -> None:
        """Computes it, without the interpreter's lock for most of the time."""

    def write(self) -> np.ndarray | None:
        """Puts the results into the ring; gives the sizes of the outputs' variable dimensions for each row."""


def run(ring: Ring, lanes: Sequence[Lane], stop: Stop) -> None:
    """Serves until stop is set, and what was taken by then is answered; also when the broker goes, which raises BrokerGone."""
    _Turns(ring, stop).run(lanes)


class _Turns:
    def __init__(self, ring: Ring, stop: Stop) -> None:
        self._ring, self._stop = ring, stop
        self._waiting = threading.Lock()  # for the next batch
        self._using = threading.Lock()  # the ring, which takes one thread at a time
        self._computing = threading.Lock()
        self._taken = 0  # batches that were not answered yet; it grows under _waiting, and changes under _using
        self._ended: BaseException | None = None

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
        try:
            while (batch := self._take()) is not None:
                self._one(lane, batch)
        except BaseException as e:  # the other lanes finish what they have
            self._ended = self._ended or e

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

    def _one(self, lane: Lane, batch: RingBatch) -> None:
        failure: BaseException | None = None
        try:
            with self._using:
                lane.gather(batch)
            with self._computing:
                lane.compute()
            dims = lane.write()
            if dims is not None:
                with self._using:
                    batch.set_rows_dims(dims)
        except BaseException as e:
            failure = e
            if isinstance(e, Exception):
                log.exception("a batch of %d rows failed", batch.rows)
        with self._using:
            if failure is not None:
                batch.fail_all(failure)
            batch.complete()
            self._taken -= 1  # not before: who sees none uses the ring without asking
        if failure is not None and not isinstance(failure, Exception):
            raise failure
