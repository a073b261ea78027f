# SPDX-License-Identifier: Apache-2.0
"""The broker of a socket: another process's, or one that serve starts and ends."""

from __future__ import annotations

import contextlib
import json
import os
import socket as sockets
import subprocess
import sys
import threading
import time
from typing import Any

from .. import errors
from ..binding.library import binary_path

DRAIN_S = 30.0  # for accepted requests at the end
_HURRY_S = 10.0  # for a broker after a second signal; its workers have two of them
_INSIST_S = 0.3  # between two signals to a broker
START_S = 60.0  # the machine may be busy; a broker that fails is seen at once
_ASK_S = 5.0  # for a broker's answer


def socket_path(given: str | os.PathLike[str] | None) -> str:
    """As docs/protocol.md says."""
    if given or os.environ.get("RINGBATCH_SOCKET"):
        return os.path.abspath(os.fspath(given) if given else os.environ["RINGBATCH_SOCKET"])
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return os.path.join(runtime, "ringbatch", "broker.sock")
    return os.path.join(os.environ.get("TMPDIR") or "/tmp", f"ringbatch-{os.getuid()}", "broker.sock")


def broker_runs(socket: str) -> bool:
    """Whether a broker listens. By a plain socket: this process stays free to fork."""
    with sockets.socket(sockets.AF_UNIX) as s:
        s.settimeout(5.0)
        try:
            s.connect(socket)
        except BlockingIOError:  # its queue of connections is full
            return True
        except OSError:
            return False
        return True


def ask_broker(command: str, socket: str) -> Any:
    """The answer of a command, None if there is none. As a process: this one stays without a connection, free to fork."""
    try:
        asked = [binary_path(), command, "--json", "--socket", socket]
        answer = subprocess.run(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False, timeout=_ASK_S)
    except subprocess.TimeoutExpired:
        return None
    return json.loads(answer.stdout) if answer.returncode == 0 and answer.stdout else None


# -- our own


# Has the kernel end the process with us, then becomes the command.
_DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)


def _with_us(*command: str) -> list[str]:
    """The command, for a process that the kernel ends with this one."""
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]


def start_broker(config: str, socket: str, env: dict[str, str], *flags: str) -> subprocess.Popen:
    """The configuration is a memory file, which goes with its last process."""
    fd = os.memfd_create("ringbatch-serve")
    try:
        os.write(fd, config.encode())
        return subprocess.Popen(
            _with_us(
                binary_path(), "broker", "--socket", socket, "--config", f"/proc/self/fd/{fd}", "--drain-time", f"{DRAIN_S:g}s", *flags
            ),
            env=env,
            pass_fds=[fd],
            start_new_session=True,  # the terminal's Ctrl-C is for us only
        )
    finally:
        os.close(fd)


def wait_for_broker(p: subprocess.Popen, socket: str, stop: threading.Event) -> bool:
    """False if another broker has taken the socket."""
    deadline = time.monotonic() + START_S
    while not stop.is_set():
        if p.poll() is not None:
            if broker_runs(socket):
                return False
            raise errors.NoBroker("the broker did not start; see its message above")
        if broker_runs(socket):
            return True
        if time.monotonic() > deadline:
            raise errors.NoBroker(f"the broker does not answer at {socket}")
        stop.wait(0.02)
    return True


def hurry(p: subprocess.Popen) -> None:
    """Signals a broker until it ends. It ignores a signal that follows another too soon."""
    for _ in range(int(_HURRY_S / _INSIST_S)):
        p.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            p.wait(_INSIST_S)
            return
    p.kill()
    p.wait()
