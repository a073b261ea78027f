# SPDX-License-Identifier: Apache-2.0
"""A broker and workers as processes of their own, for the tests."""

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

# A shell that runs this in the background leaves Ctrl-C ignored, and children
# inherit that; the tests of Ctrl-C need what a terminal gives.
signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parents[2]


# The tests fail by what is wrong, not because the machine was busy: what they wait for they wait a minute for,
# and a broker that stands still for seconds has not gone.
connection._CONNECT_TIMEOUT_NS = 60_000_000_000
rb.stats.__defaults__ = (None, 60.0)


def eventually(condition) -> None:
    """Waits for what happens soon, but not at once: elsewhere, or in the kernel."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it has not come to be"
        time.sleep(0.005)


@contextlib.contextmanager
def running(*args: str):
    """The ringbatch command beside the tests."""
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

    before = listens_at()  # a broker that was killed has left it
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
    """A folder of this user's alone."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def at(home):
    """Where a test starts a broker of its own."""
    return str(home / "b.sock")


@pytest.fixture
def env(at):
    """The environment of programs that start a broker of their own."""
    return {**os.environ, "RINGBATCH_SOCKET": at}


@contextlib.contextmanager
def program(env, *command, how: int = signal.SIGTERM, **more):
    """A Python program that serves, until it is told to end."""
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
    """Runs them beside the block; they have ended when it has."""
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
    """Runs code in a fresh interpreter and gives what it printed."""
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
    """For a server that cannot be given a socket. Below the ports that the kernel gives away: nobody gets it before the server does."""
    while True:
        port = random.randrange(20_000, 32_000)
        with sockets.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
