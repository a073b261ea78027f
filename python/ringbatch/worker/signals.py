# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM: the first lets accepted requests finish, a second Ctrl-C does not."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Callable

from .worker import wait_without_lock

log = logging.getLogger("ringbatch")

_ONE_PRESS_S = 0.5  # a terminal and its program may both send the signal of one Ctrl-C
_TOLD_AFTER_S = 2.0
_LOOK_S = 0.02


class StopEvent(threading.Event):
    """An event without a lock: a signal handler may set it while the same thread waits for it."""

    _is_set = False
    listens = False  # to signals
    presses, _last_press = 0, -math.inf
    told = False  # the user knows that one more press ends at once

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def wait(self, timeout: float | None = None) -> bool:
        return wait_without_lock(self.is_set, timeout)

    def press(self) -> None:
        """Handles a Ctrl-C."""
        self.set()
        now = time.monotonic()
        if now - self._last_press >= _ONE_PRESS_S:
            self.presses, self._last_press = self.presses + 1, now


def ends(is_over: Callable[[], bool], seconds: float, stop: StopEvent) -> bool:
    """Waits for an end; False after some seconds, or at the next Ctrl-C."""
    began, enough = time.monotonic(), 2 if stop.presses else 1
    while not is_over():
        took = time.monotonic() - began
        if took > seconds or stop.presses >= enough:
            return False
        if took > _TOLD_AFTER_S and stop.listens and not stop.told:
            stop.told = True
            log.warning("stopping: accepted requests are being finished; press Ctrl-C once more to end at once")
        time.sleep(_LOOK_S)
    return True


@contextlib.contextmanager
def stopping() -> Iterator[StopEvent]:
    """An event that Ctrl-C and SIGTERM set. A second press ends all waits."""
    stop = StopEvent()
    restore = stop_on_signals(stop, lambda signum: None)
    try:
        yield stop
    finally:
        restore()


def end_at_once(signum: int) -> None:
    """Ends a worker at a second Ctrl-C. SIGTERM may come from several processes, which all let it finish its batch."""
    if signum == signal.SIGINT:
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)


def stop_on_signals(stop: StopEvent, again: Callable[[int], None] = end_at_once) -> Any:
    """Lets Ctrl-C and SIGTERM set stop; later ones call again. Returns the function that undoes this."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def handle(signum: int, frame: FrameType | None) -> None:
        stop.press()
        if stop.presses > 1:
            again(signum)

    stop.listens = True
    old = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    return lambda: [signal.signal(s, h) for s, h in old.items()]
