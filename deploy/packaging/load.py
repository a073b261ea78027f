# SPDX-License-Identifier: Apache-2.0
"""Callers that check every answer while a broker is upgraded beneath them.

    load.py SOCKET UID    until SIGTERM; prints the number of answers, exit status 1 if one was lost or wrong
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import numpy as np
import ringbatch as rb

CALLERS = 4


def call(socket: str, stop: threading.Event, counts: list[int], failures: list[str]) -> None:
    try:
        with rb.connect("echo", socket=socket, wait=60, retry=True) as model:
            while not stop.is_set():
                x = np.full(16, len(counts), np.float32)
                if not (model(x, timeout=120) == x).all():
                    failures.append("a wrong answer")
                counts.append(1)
                if len(counts) == CALLERS:
                    print("answers come", flush=True)
    except Exception as e:  # a request that was lost
        failures.append(f"{type(e).__name__}: {e}")


def main() -> int:
    socket, uid = sys.argv[1], int(sys.argv[2])
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    stop, counts, failures = threading.Event(), [], []
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    threads = [threading.Thread(target=call, args=(socket, stop, counts, failures)) for _ in range(CALLERS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    print(f"{len(counts)} requests answered, {len(failures)} lost: {failures}", flush=True)
    return 1 if failures or not counts else 0


if __name__ == "__main__":
    sys.exit(main())
