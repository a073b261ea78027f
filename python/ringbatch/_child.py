"""What runs in the processes that serve starts: a worker, or the broker."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import runpy
import signal
import sys
import threading

from ._library import binary_path
from ._serve import Reached, _stop_on_signals
from ._worker import Worker

_PDEATHSIG = 1


def find(target: str) -> Worker:
    """The worker that _serve._target named."""
    kind, rest = target.split(":", 1)
    where, name = rest.rsplit(":", 1)
    if kind == "module":
        return getattr(importlib.import_module(where), name)
    try:
        return runpy.run_path(where, run_name="__ringbatch_worker__")[name]
    except Reached as reached:
        return reached.run


def die_with(parent: int) -> None:
    """Has the kernel end this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone")


def main(parent: str, socket: str, role: str, target: str = "") -> None:
    die_with(int(parent))
    if role == "broker":
        os.execv(binary_path(), [binary_path(), "broker", *(["--socket", socket] if socket else [])])
    stop = threading.Event()
    _stop_on_signals(stop)
    find(target).run(socket=socket or None, stop=stop, wait=10.0)


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    main(*sys.argv[1:])
