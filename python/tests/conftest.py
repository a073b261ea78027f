# SPDX-License-Identifier: Apache-2.0
"""Brokers, workers and programs as processes, for the tests."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket as sockets
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

import ringbatch as rb
from ringbatch.client import connection

# A shell starts background jobs with Ctrl-C ignored, and children inherit it. The tests of Ctrl-C need the default.
signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parents[2]

# The tensors of most test models.
FOUR = {"inputs": {"x": ("float32", (4,))}, "outputs": {"y": ("float32", (4,))}}
SIXTEEN = {"inputs": {"x": ("float32", (16,))}, "outputs": {"y": ("float32", (16,))}}

# On a busy machine a broker may stand still for seconds: the tests wait a minute.
connection._CONNECT_TIMEOUT_NS = 60_000_000_000
rb.stats.__defaults__ = (None, 60.0)


def eventually(condition) -> None:
    """Waits until the condition holds."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold within 120 s"
        time.sleep(0.005)


@contextlib.contextmanager
def running(*args: str):
    """Runs the ringbatch command."""
    p = subprocess.Popen([rb.binary_path(), *args], stdout=subprocess.DEVNULL)
    try:
        yield p
    finally:
        p.terminate()
        p.wait(60)


@contextlib.contextmanager
def broker_at(socket: str, *flags: str):
    def listens_at() -> int:
        try:
            return os.stat(socket).st_ino
        except FileNotFoundError:
            return 0

    before = listens_at()  # the socket file of a killed broker
    with running("broker", "--socket", socket, "--log_level", "error", "--drain_time", "1s", *flags) as p:
        deadline = time.monotonic() + 60
        while listens_at() in (0, before):
            assert p.poll() is None and time.monotonic() < deadline, "the broker did not start"
            time.sleep(0.005)
        yield p


def go_worker(socket: str, *flags: str):
    return running("worker", "--socket", socket, *flags)


@contextlib.contextmanager
def serving(worker: rb.Worker, socket: str):
    """A Python worker in a thread of this process."""
    stop, failures = threading.Event(), []

    def run() -> None:
        try:
            worker.run(socket=socket, stop=stop, wait=60)
        except BaseException as e:
            failures.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()
        assert not failures, failures


@pytest.fixture
def home(tmp_path):
    """A private folder."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def at(home):
    """The socket of a test's own broker."""
    return str(home / "b.sock")


@pytest.fixture
def env(at):
    """The environment of programs that start a broker."""
    return {**os.environ, "RINGBATCH_SOCKET": at}


@contextlib.contextmanager
def program(env, *command, how: int = signal.SIGTERM, **more):
    """Runs a Python program until the block ends."""
    p = subprocess.Popen([sys.executable, *map(str, command)], env=env, **more)
    try:
        yield p
    finally:
        p.send_signal(how)
        assert p.wait(60) == 0


@pytest.fixture(scope="module")
def socket():
    with tempfile.TemporaryDirectory(prefix="rb") as folder:
        os.chmod(folder, 0o700)
        path = os.path.join(folder, "b.sock")
        with broker_at(path):
            yield path


@contextlib.contextmanager
def in_threads(*calls):
    """Runs the calls in threads beside the block, and joins them."""
    threads = [threading.Thread(target=call) for call in calls]
    for t in threads:
        t.start()
    try:
        yield
    finally:
        for t in threads:
            t.join(120)
    assert not any(t.is_alive() for t in threads)


@pytest.fixture(scope="module")
def echo(socket):
    """The socket of a broker with the model echo: x:f32[16] -> y:f32[16]."""
    with go_worker(socket, "--model", "echo", "--wait_time", "200us"):
        rb_wait(socket, "echo")
        yield socket


@pytest.fixture
def model(echo):
    with rb.connect("echo", socket=echo, window=32) as m:
        yield m


def rb_wait(socket: str, model: str) -> None:
    """Waits for a model without loading the library into this process."""
    command = [rb.binary_path(), "models", "--socket", socket]
    eventually(lambda: model.encode() in subprocess.run(command, capture_output=True).stdout)


def python(code: str, *, socket: str = "", timeout: float = 240, **env: str) -> str:
    """Runs code in a fresh interpreter and returns its output."""
    prologue = "import os, sys, time\nimport numpy as np\nimport ringbatch as rb\nfrom ringbatch.client import connection\n"
    prologue += "x = np.arange(16, dtype='float32')\n"
    prologue += "connection._CONNECT_TIMEOUT_NS, rb.stats.__defaults__ = 60_000_000_000, (None, 60.0)\n"  # as above
    p = subprocess.run(
        [sys.executable, "-c", prologue + textwrap.dedent(code)],
        env={**os.environ, "RINGBATCH_SOCKET": socket, **env},
        capture_output=True,
        timeout=timeout,
        text=True,
    )
    assert p.returncode == 0, f"exit status {p.returncode}\n{p.stdout}\n{p.stderr}"
    return p.stdout.strip()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def free_port() -> int:
    """A port for a server that cannot inherit a socket. It lies below the ports that the kernel hands out."""
    while True:
        port = random.randrange(20_000, 32_000)
        with sockets.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
