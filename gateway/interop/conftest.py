# SPDX-License-Identifier: Apache-2.0
"""A broker with workers and a gateway, each in its own process."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
RINGBATCH = ROOT / "bin" / "ringbatch"
PERF = ROOT / "build" / "interop" / "perf"
SUM = ROOT / "build" / "interop" / "sum"


@dataclass
class Gateway:
    """The gateway's addresses, its output at the start, and the broker's socket."""

    http: str
    grpc: str
    greeting: str
    socket: str


class Processes:
    """The started processes, all ended by end()."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.env = {**os.environ, "RINGBATCH_SOCKET": f"{folder}/broker.sock"}
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *args: str, program: pathlib.Path = RINGBATCH) -> pathlib.Path:
        log = pathlib.Path(self.folder) / f"{name}.log"
        with log.open("wb") as out:
            self.running.append(subprocess.Popen([program, *args], env=self.env, stdout=out, stderr=subprocess.STDOUT))
        return log

    def end(self) -> None:
        for p in reversed(self.running):
            p.send_signal(signal.SIGTERM)
        for p in reversed(self.running):
            try:
                p.wait(60)
            except subprocess.TimeoutExpired:
                p.kill()


def wait_for(log: pathlib.Path, pattern: str, seconds: float = 120) -> re.Match[str]:
    """Wait until a process has written something."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := re.search(pattern, log.read_text()):
            return found
        time.sleep(0.05)
    raise TimeoutError(f"no {pattern!r} in {log}: {log.read_text()}")


@pytest.fixture(scope="session")
def gateway() -> Iterator[Gateway]:
    with tempfile.TemporaryDirectory() as folder:
        p = Processes(folder)
        try:
            config = pathlib.Path(folder) / "ringbatch.toml"
            config.write_text('[[model]]\nname = "nap"\ninputs = ["x:f32[16]"]\noutputs = ["y:f32[16]"]\nwait_time = 0\n'
                f'[[model.worker]]\ncommand = ["{RINGBATCH}", "worker", "affine", "--scale", "3"]\n')  # fmt: skip
            p.start("broker", "broker", "--log-level", "warn", "--config", str(config))
            worker = ("worker", "--wait", "120s", "--wait-time", "0")
            p.start("affine", *worker, "affine", "--scale", "2", "--offset", "1", "--max-batch-size", "8")
            p.start("image", *worker, "echo", "--name", "image", "--input", "x:f32[3,64,64]")
            p.start("text", *worker, "echo", "--name", "text", "--input", "ids:i64[<=128]", "--input", "mask:bool[<=128]")
            types = [f"--input={d}:{d}[3]" for d in ("bool", "u8", "i8", "i16", "i32", "i64", "f16", "f32", "f64")]
            p.start("types", *worker, "echo", "--name", "types", *types)
            p.start("sum", program=SUM)
            subprocess.run([RINGBATCH, "ready", "affine", "image", "letters", "sum", "text", "types", "--wait", "2m"], env=p.env, check=True)
            log = p.start("gateway", "gateway", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--system-shared-memory")
            wait_for(log, r"try: .*\n")
            text = log.read_text()
            yield Gateway(
                http=re.search(r"^http (\S+)$", text, re.M)[1],  # type: ignore[index]
                grpc=re.search(r"^grpc (\S+)$", text, re.M)[1],  # type: ignore[index]
                greeting=text,
                socket=p.env["RINGBATCH_SOCKET"],
            )
        finally:
            p.end()
