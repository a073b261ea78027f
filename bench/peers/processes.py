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


def adopt() -> None:
    """Whatever our children leave behind becomes our child, so that it is found and ended."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it ended
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, look = [], [os.getpid()]
    while look:
        mine = children.get(look.pop(), [])
        found += mine
        look += mine
    return found


def end_all(grace: float = 5.0) -> None:
    """SIGTERM, and after the grace SIGKILL, to all that we started and all that that started."""
    end = time.monotonic() + grace
    told: set[int] = set()
    while left := descendants():
        late = time.monotonic() > end
        for pid in left:
            if late or pid not in told:
                told.add(pid)
                try:
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                except ProcessLookupError:
                    pass
        time.sleep(0.05)
        reap()
    reap()


def same_priority() -> None:
    """Servers that start sessions of their own have them ranked as ours is, where that was raised."""
    try:
        mine = Path("/proc/self/autogroup").read_text().split()[-1]
    except OSError:
        return  # this kernel has none
    for pid in descendants():
        try:
            Path(f"/proc/{pid}/autogroup").write_text(mine)
        except OSError:
            pass  # it ended; or only root may raise it, and then it is 0 for all


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def start(arguments: list[str], environment: dict[str, str], out: object, err: object) -> subprocess.Popen:
    """In a process group of its own, so that Ctrl-C reaches us and we end it; not in a
    session of its own: Linux shares the cores out between sessions first (autogroup), and
    a peer of many sessions would have more of them than one of few."""
    return subprocess.Popen(arguments, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, preexec_fn=os.setpgrp, text=True)
