"""``serve``: a broker if there is none, worker processes, and their end.

Each worker is a Python process of its own that imports the script anew: it
has its own GIL, its own model and its own CUDA context, and nothing that the
parent did can be in its way.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import Any

from . import errors
from ._library import binary_path
from ._worker import Worker

log = logging.getLogger("ringbatch")

CHILD = "RINGBATCH_CHILD"  # set in worker processes
_STOP_S = 30.0  # how long a process may take to finish its work at the end
_QUICK_DEATH_S, _QUICK_DEATHS = 2.0, 5  # a worker that keeps dying at once is not restarted for ever


def serve(run: Worker, *, processes: int = 1, socket: str | None = None, broker: bool = True) -> None:
    """Serves a model until Ctrl-C or SIGTERM, then stops everything it started.

    processes: worker processes; 0 serves in this process and thread.
    socket: the broker's; default $RINGBATCH_SOCKET or the user's runtime folder.
    broker: start one if none runs. It ends with serve.

    Worker processes import the module that defines the worker, or run the
    script again up to this call. A worker that dies is started again.
    """
    if os.environ.get(CHILD):
        raise Reached(run)
    if not isinstance(run, Worker):
        raise errors.Invalid(f"serve wants a function decorated with @ringbatch.worker, got {run!r}")
    target = _target(run) if processes > 0 else ""
    stop = threading.Event()
    restore = _stop_on_signals(stop)
    started: list[Process] = []
    try:
        if broker and not broker_runs(socket):
            started.append(Process("broker", ["broker"], socket))
            _wait_for_broker(started[0], socket, stop)
        if processes == 0:
            run.run(socket=socket, stop=stop, wait=5.0)
            return
        workers = [Process(f"worker {i}", ["worker", target], socket) for i in range(processes)]
        started += workers
        while not stop.wait(0.1):
            for p in started:
                p.revive()
    finally:
        for p in reversed(started):  # workers finish what they have, then the broker
            if p.name != "broker":
                p.terminate()
        for p in reversed(started):
            p.stop()
        restore()


class Reached(BaseException):
    """A worker process that runs the script again has come to serve: far enough."""

    def __init__(self, run: Worker) -> None:
        super().__init__("serve is not for worker processes")
        self.run = run


def broker_runs(socket: str | None) -> bool:
    """Whether a broker answers. Asks by the command: this process stays free to fork."""
    command = [binary_path(), "models"] + (["--socket", socket] if socket else [])
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


def _wait_for_broker(p: Process, socket: str | None, stop: threading.Event) -> None:
    deadline = time.monotonic() + 10
    while not stop.is_set() and not broker_runs(socket):
        if p.ended() or time.monotonic() > deadline:
            if broker_runs(socket):  # somebody else was quicker
                return
            raise errors.NoBroker("the broker did not start; see its message above")
        stop.wait(0.02)


def _stop_on_signals(stop: threading.Event) -> Any:
    """Ctrl-C and SIGTERM set stop; gives the function that undoes this."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def handle(signum: int, frame: FrameType | None) -> None:
        stop.set()

    old = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    return lambda: [signal.signal(s, h) for s, h in old.items()]


class Process:
    """A process that is started again when it dies, and dies with this one."""

    def __init__(self, name: str, role: list[str], socket: str | None) -> None:
        self.name = name
        self._command = [sys.executable, "-m", "ringbatch._child", str(os.getpid()), socket or "", *role]
        self._deaths = 0
        self._proven = False  # it has lived for a while before: what kills it now are requests, not its script
        self._start()

    def _start(self) -> None:
        env = {**os.environ, CHILD: "1", "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        self._born = time.monotonic()
        self._p = subprocess.Popen(self._command, env=env, start_new_session=True)

    def ended(self) -> bool:
        return self._p.poll() is not None

    def revive(self) -> None:
        if not self.ended():
            return
        code = self._p.returncode
        quick = time.monotonic() - self._born < _QUICK_DEATH_S
        self._deaths = self._deaths + 1 if quick else 1
        self._proven = self._proven or not quick
        if self._deaths >= _QUICK_DEATHS and not self._proven:
            raise errors.WorkerDied(f"{self.name} died {self._deaths} times right after its start (exit status {code})")
        log.warning("%s ended with status %s, starting it again", self.name, code)
        time.sleep(min(0.05 * self._deaths, 1.0))
        self._start()

    def terminate(self) -> None:
        if not self.ended():
            self._p.terminate()

    def stop(self) -> None:
        self.terminate()
        try:
            self._p.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._p.kill()
            self._p.wait()


def _target(run: Worker) -> str:
    """How a new process finds the worker: file or module, and name."""
    name: str | None = getattr(run, "__qualname__", None)
    module = sys.modules.get(run.__module__)
    if name is None or "<" in name or getattr(module, name, None) is not run:
        raise errors.Invalid(
            f"worker processes must be able to import {name!r}: define it at the top of a module, or serve with processes=0"
        )
    if run.__module__ != "__main__":
        return f"module:{run.__module__}:{name}"
    path = getattr(module, "__file__", None)
    if path is None:
        raise errors.Invalid("a worker of an interactive session has no file to import: serve with processes=0")
    return f"file:{os.path.abspath(path)}:{name}"
