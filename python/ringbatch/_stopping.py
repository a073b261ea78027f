# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM, for what serves: it finishes what it has accepted, or not if it is told again."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Callable

from ._worker import wait_without_lock

log = logging.getLogger("ringbatch")

_ONE_PRESS_S = 0.5  # a terminal and what runs in it may both send the signal of one Ctrl-C
_TOLD_AFTER_S = 2.0
_LOOK_S = 0.02


class StopEvent(threading.Event):
    """An event that a signal's handler may set. That runs in the main thread, also in the midst of a wait there: so there is no lock to wait for."""

    _is_set = False
    again = False  # nobody waits any longer for what is under way
    told = False  # that this can be had

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def wait(self, timeout: float | None = None) -> bool:
        return wait_without_lock(self.is_set, timeout)

    def hurry(self, signum: int) -> None:
        """The second signal. The next ends this process, and the kernel what it has started."""
        self.again = True
        for s in (signal.SIGINT, signal.SIGTERM):
            signal.signal(s, signal.SIG_DFL)


def ends(p: subprocess.Popen, seconds: float, stop: StopEvent | None = None) -> bool:
    """Whether a process that was told to end does so in time, and before stop is set again."""
    began = time.monotonic()
    while p.poll() is None:
        took = time.monotonic() - began
        if took > seconds or (stop is not None and stop.again):
            return False
        if stop is not None and took > _TOLD_AFTER_S and not stop.told:
            stop.told = True
            log.warning("stopping: what was accepted is being finished; press Ctrl-C again to end at once")
        time.sleep(_LOOK_S)
    return True


@contextlib.contextmanager
def stopping() -> Iterator[StopEvent]:
    """An event that Ctrl-C and SIGTERM set. By a second one it says that nobody waits any longer; a third ends this process."""
    stop = StopEvent()
    restore = stop_on_signals(stop, stop.hurry)
    try:
        yield stop
    finally:
        restore()


def end_at_once(signum: int) -> None:
    """For a worker. Only by Ctrl-C: SIGTERM may come from several, who all want it to finish its batch."""
    if signum == signal.SIGINT:
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)


def stop_on_signals(stop: StopEvent, hurry: Callable[[int], None] = end_at_once) -> Any:
    """Ctrl-C and SIGTERM set stop, and later ones call hurry; gives the function that undoes this."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    first: float | None = None

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal first
        stop.set()
        if first is None:
            first = time.monotonic()
        elif time.monotonic() - first >= _ONE_PRESS_S:
            hurry(signum)

    old = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    return lambda: [signal.signal(s, h) for s, h in old.items()]
