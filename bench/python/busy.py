# SPDX-License-Identifier: Apache-2.0
"""How busy the machine is while producers run."""

from __future__ import annotations

import os
import time


def cores_for(seconds: float) -> float:
    """Waits for so long; gives how many cores were busy meanwhile, with whatever runs on this machine."""
    before, start = _busy_seconds(), time.monotonic()
    time.sleep(seconds)
    return (_busy_seconds() - before) / (time.monotonic() - start)


def _busy_seconds() -> float:
    """CPU time of everything, since the machine started."""
    with open("/proc/stat") as f:
        user, nice, system, _idle, _iowait, irq, softirq = map(int, f.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
