# SPDX-License-Identifier: Apache-2.0
"""Starting programs, and ending every one of them and of their children."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
# Each model process computes with one thread.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def adopt() -> None:
    """Makes this process the parent of orphaned descendants, so that end_all finds them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # the process ended
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, look = [], [os.getpid()]
    while look:
        mine = children.get(look.pop(), [])
        found += mine
        look += mine
    return found


def end_all(grace: float = 5.0) -> None:
    """Sends SIGTERM to all descendants, and SIGKILL after the grace."""
    end = time.monotonic() + grace
    signaled: set[int] = set()
    while left := descendants():
        late = time.monotonic() > end
        for pid in left:
            if late or pid not in signaled:
                signaled.add(pid)
                try:
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                except ProcessLookupError:
                    pass
        time.sleep(0.05)
        reap()
    reap()


def same_priority() -> None:
    """Gives all sessions of the servers the scheduling priority of ours."""
    try:
        mine = Path("/proc/self/autogroup").read_text().split()[-1]
    except OSError:
        return  # a kernel without autogroups
    for pid in descendants():
        try:
            Path(f"/proc/{pid}/autogroup").write_text(mine)
        except OSError:
            pass  # the process ended; or only root may raise the priority, and all have 0


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def start(arguments: list[str], environment: dict[str, str], out: object, err: object) -> subprocess.Popen:
    """Starts a program in its own process group: Ctrl-C reaches this process, which ends the others. It stays in our session:
    Linux divides the cores between sessions first (autogroup), so a peer with many sessions would get more."""
    return subprocess.Popen(arguments, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, preexec_fn=os.setpgrp, text=True)
