# SPDX-License-Identifier: Apache-2.0
"""Processes that serve watches itself: the gateway, and workers if serve joined a running broker."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import time

from .. import errors
from ..worker.refusal import ATTACHED_FD, Refusals
from ..worker.signals import StopEvent, ends

log = logging.getLogger("ringbatch")

_STOP_S = 30.0  # for a process to finish its work at the end
_FAILED_STARTS = 5
_LAST_BACKOFF_S = 5.0


class WatchedProcess:
    """A process that is started again when it dies: at once if it had attached, otherwise with a back-off."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], ready_s: float | None = None,
            refusals: Refusals | None = None) -> None:
        self.name, self._refusals = name, refusals
        self._command, self._env = command, env
        self._ready_s = ready_s  # None: the process says when it has attached; otherwise it counts as attached after this time
        self._failed_starts, self._proven, self._again_at = 0, False, 0.0
        self._start()

    def _start(self) -> None:
        self._born = time.monotonic()
        self._attached = False
        self._pipe, told = os.pipe()
        os.set_blocking(self._pipe, False)
        env = {**self._env, "RINGBATCH_PARENT": str(os.getpid()), ATTACHED_FD: str(told)}
        try:
            self._p: subprocess.Popen | None = subprocess.Popen(self._command, env=env, pass_fds=[told], start_new_session=True)
        finally:
            os.close(told)

    def revive(self) -> None:
        if self._p is None:
            if time.monotonic() >= self._again_at:
                self._start()
            return
        if self._p.poll() is None:
            return
        status, pid = self._p.returncode, self._p.pid
        attached = self.has_attached()
        os.close(self._pipe)
        self._p = None
        refusals = self._refusals.take(pid) if self._refusals is not None else []
        refused = refusals[0].text if refusals else ""
        told = attached and self._ready_s is None  # otherwise it may only have taken long to fail
        if refused and not (self._proven or told):
            raise errors.Invalid(refused)
        self._proven = self._proven or attached
        self._failed_starts = 0 if attached else self._failed_starts + 1
        if self._failed_starts >= _FAILED_STARTS and not self._proven:
            raise errors.WorkerDied(f"{self.name} ended {self._failed_starts} times before it was ready (exit status {status}); see its "
                "messages above")
        delay = 0.0 if attached else min(0.1 * 2 ** (self._failed_starts - 1), _LAST_BACKOFF_S)
        log.warning("%s ended with status %s, starting it again%s", self.name, status, f": {refused}" if refused else "")
        self._again_at = time.monotonic() + delay

    def has_attached(self) -> bool:
        """Whether its present life has."""
        if self._p is not None and not self._attached:
            if self._ready_s is not None:
                return time.monotonic() - self._born > self._ready_s
            with contextlib.suppress(BlockingIOError):
                self._attached = bool(os.read(self._pipe, 1))
        return self._p is not None and self._attached

    def terminate(self) -> None:
        if self._p is not None and self._p.poll() is None:
            self._p.terminate()

    def stop(self, stop: StopEvent) -> None:
        self.terminate()
        p = self._p
        if p is None:
            return
        if not ends(lambda: p.poll() is not None, _STOP_S, stop):
            p.kill()
            p.wait()
        os.close(self._pipe)
        self._p = None
