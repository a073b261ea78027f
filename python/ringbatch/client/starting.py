# SPDX-License-Identifier: Apache-2.0
"""A broker that clients start when they need one."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from typing import Callable, TypeVar

from .. import errors
from ..binding.library import Duration, Pauses, Process, binary_path, not_negative, seconds

_LOOK_S = 0.5  # how long an attempt to connect waits for a broker, which may have just ended
_START_S = 60.0

T = TypeVar("T")


def _not_started(within: float) -> errors.NoBroker:
    return errors.NoBroker(f"the broker has not started in {within:.1f} s")


class Starter:
    def __init__(self, socket: str | os.PathLike[str] | None, idle: Duration) -> None:
        if seconds(idle) < 1:
            raise errors.Invalid(f"start is True, or how long the broker stays without clients, 1 s or more; got {idle!r}")
        self._command = [binary_path(), "broker", "--detach", "--idle", f"{seconds(idle):.9f}s", "--log-level", "warn"]
        if socket is not None:
            self._command += ["--socket", os.fspath(socket)]
        self._generation, self._lock, self._started = Process.generation, threading.Lock(), 0.0

    def start(self, within: float = _START_S) -> None:
        """Returns when a broker runs. Of threads that call it at once, one starts it for all."""
        if self._generation != Process.generation:  # another thread may have held the lock at the fork
            self._generation, self._lock = Process.generation, threading.Lock()
        called, within = time.monotonic(), min(within, _START_S)
        if not self._lock.acquire(timeout=within):
            raise _not_started(within)
        try:
            if self._started < called:
                self._run(called + within - time.monotonic())
                self._started = time.monotonic()
        finally:
            self._lock.release()

    def _run(self, within: float) -> None:
        try:
            p = subprocess.run(self._command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=within)
        except subprocess.TimeoutExpired:
            raise _not_started(within) from None
        if p.returncode:
            raise errors.NoBroker(p.stderr.strip().removeprefix("ringbatch: "))

    def connected(self, connect: Callable[[float], T], wait: Duration) -> T:
        """connect takes how long it may wait. A broker that ends meanwhile is replaced."""
        deadline, pauses = time.monotonic() + not_negative("wait", wait), Pauses()
        while True:
            self.start()
            left = max(0.0, deadline - time.monotonic())
            try:
                return connect(min(left, _LOOK_S))
            except errors.Error as e:
                if not e.retry_attach or (pause := pauses.next(deadline)) is None:
                    raise
            time.sleep(pause)
