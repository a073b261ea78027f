# SPDX-License-Identifier: Apache-2.0
"""A worker process: ``python -m ringbatch.serve.child TARGET... -- ARGUMENTS...``.

The broker's supervisor starts it. ARGUMENTS are those of the script that called serve.
"""

from __future__ import annotations

import logging
import os
import sys

from ..worker.refusal import LASTING, refused
from ..worker.signals import StopEvent, stop_on_signals
from . import targets
from .supervisor import CHILD

_WAIT_S = 60.0  # for the broker


def main(arguments: list[str]) -> None:
    at = arguments.index("--")
    sys.argv = arguments[at + 1 :]  # the arguments of the script
    stop = StopEvent()
    stop_on_signals(stop)
    pipeline = arguments[1:3] if arguments[0] == "stage" else []  # its name and declaration
    worker = targets.find(*arguments[3 if pipeline else 0 : at])
    if pipeline:
        worker = worker.as_stage(*pipeline)
    stop_on_signals(stop)  # once more: the script may have installed its own
    os.environ.pop(CHILD, None)  # not for processes that the worker starts
    worker._serve(None, stop, _WAIT_S)


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        main(sys.argv[1:])
    except LASTING as e:
        if not refused(e):
            raise
        sys.exit(1)
