# SPDX-License-Identifier: Apache-2.0
"""The processes of the GPU benchmarks: a broker, workers, clients."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = Path(os.environ.get("BUNDLE", ROOT / "build" / "gpu"))
BINARY = os.environ.get("RINGBATCH_BINARY", str(BUNDLE / "ringbatch"))
TICK = os.sysconf("SC_CLK_TCK")


class Process:
    """A process that prints "ready", and after a line "stop" a line of JSON."""

    def __init__(self, *command: str, **env: str) -> None:
        self.p = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env={**os.environ, **env})

    def wait_for(self, *words: str) -> str:
        for line in self.p.stdout:
            if line.startswith(words):
                return line
        raise RuntimeError(f"{self.p.args} ended with status {self.p.wait()}")

    def tell(self, text: str) -> None:
        self.p.stdin.write(text)
        self.p.stdin.flush()

    def cpu(self) -> float:
        return cpu_of(self.p.pid)

    def end(self) -> None:
        self.p.terminate()
        try:
            self.p.wait(20)
        except subprocess.TimeoutExpired:
            self.p.kill()
            self.p.wait()


def cpu_of(pid: int) -> float:
    """Seconds, of all its threads."""
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


@contextlib.contextmanager
def processes():
    """Ends every process that it started, the last one first."""
    started: list[Process] = []

    def start(*command: str, **env: str) -> Process:
        started.append(Process(*command, **env))
        return started[-1]

    try:
        yield start
    finally:
        for p in reversed(started):
            p.end()


def start_broker(start, folder: str, *flags: str) -> Process:
    socket = os.path.join(folder, "b.sock")
    os.environ["RINGBATCH_SOCKET"] = socket
    broker = start(BINARY, "broker", "--socket", socket, "--log-level", "error", "--drain-time", "1s", *flags)
    while not os.path.exists(socket):
        if broker.p.poll() is not None:
            raise RuntimeError("the broker did not start")
        time.sleep(0.01)
    return broker


def start_workers(start, count: int, module: str, name: str, memory: str, *flags: str) -> list[Process]:
    """Workers of one model; the first one declares it."""
    command = [sys.executable, "-m", "ringbatch.torch", module, "--name", name, "--memory", memory, *flags]
    return [start(*command, OMP_NUM_THREADS="1") for _ in range(count)]


def wait_for_all(started: list[Process]) -> None:
    for p in started:
        p.wait_for("serving", "ready")
