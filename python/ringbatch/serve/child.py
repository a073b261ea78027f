# SPDX-License-Identifier: Apache-2.0
"""A worker process: ``python -m ringbatch.serve.child TARGET... -- ARGUMENTS...``.

The broker's supervisor starts it, or serve itself if it joined a running broker.
ARGUMENTS are those of the script that called serve.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys

from ..worker.refusal import LASTING, refused
from ..worker.signals import StopEvent, stop_on_signals
from . import targets
from .supervisor import CHILD, PARENT

_PDEATHSIG = 1
_WAIT_S = 60.0  # for the broker


def die_with(parent: int) -> None:
    """Lets the kernel end this process with its parent."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone")


def main(arguments: list[str]) -> None:
    if parent := os.environ.get(PARENT):
        die_with(int(parent))
    at = arguments.index("--")
    sys.argv = arguments[at + 1 :]  # the arguments of the script
    stop = StopEvent()
    stop_on_signals(stop)
    pipeline = arguments[1:3] if arguments[0] == "stage" else []  # its name and declaration
    worker = targets.find(*arguments[3 if pipeline else 0 : at])
    if pipeline:
        worker = worker.as_stage(*pipeline)
    stop_on_signals(stop)  # once more: the script may have installed its own
    for name in (CHILD, PARENT):  # not for processes that the worker starts
        os.environ.pop(name, None)
    worker._serve(None, stop, _WAIT_S)


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        main(sys.argv[1:])
    except LASTING as e:
        if not refused(e):
            raise
        sys.exit(1)
