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

_ONE_PRESS_S = 0.5  # a terminal and what runs in it may both send the signal of one Ctrl-C
_TOLD_AFTER_S = 2.0
_LOOK_S = 0.02


class StopEvent(threading.Event):
    """An event that a signal's handler may set. That runs in the main thread, also in the midst of a wait there: so there is no lock to
    wait for."""

    _is_set = False
    listens = False  # to signals
    presses, _last_press = 0, -math.inf
    told = False  # that one more would do something

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def wait(self, timeout: float | None = None) -> bool:
        return wait_without_lock(self.is_set, timeout)

    def press(self) -> None:
        """What Ctrl-C does."""
        self.set()
        now = time.monotonic()
        if now - self._last_press >= _ONE_PRESS_S:
            self.presses, self._last_press = self.presses + 1, now


def ends(is_over: Callable[[], bool], seconds: float, stop: StopEvent) -> bool:
    """Whether what was told to end does so in time, and before Ctrl-C is pressed meanwhile: nobody waits for it then."""
    began, enough = time.monotonic(), 2 if stop.presses else 1
    while not is_over():
        took = time.monotonic() - began
        if took > seconds or stop.presses >= enough:
            return False
        if took > _TOLD_AFTER_S and stop.listens and not stop.told:
            stop.told = True
            log.warning("stopping: what was accepted is being finished; press Ctrl-C once more to end at once")
        time.sleep(_LOOK_S)
    return True


@contextlib.contextmanager
def stopping() -> Iterator[StopEvent]:
    """An event that Ctrl-C and SIGTERM set; by another one nobody waits any longer."""
    stop = StopEvent()
    restore = stop_on_signals(stop, lambda signum: None)
    try:
        yield stop
    finally:
        restore()


def end_at_once(signum: int) -> None:
    """For a worker. Only by Ctrl-C: SIGTERM may come from several, who all want it to finish its batch."""
    if signum == signal.SIGINT:
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)


def stop_on_signals(stop: StopEvent, again: Callable[[int], None] = end_at_once) -> Any:
    """Ctrl-C and SIGTERM set stop, and later ones call again; gives the function that undoes this."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def handle(signum: int, frame: FrameType | None) -> None:
        stop.press()
        if stop.presses > 1:
            again(signum)

    stop.listens = True
    old = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    return lambda: [signal.signal(s, h) for s, h in old.items()]
