# SPDX-License-Identifier: Apache-2.0
"""Brokers, workers and programs as processes, for the tests."""

from __future__ import annotations

import contextlib
import functools
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

import numpy as np
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
    with running("broker", "--socket", socket, "--log-level", "error", "--drain-time", "1s", *flags) as p:
        deadline = time.monotonic() + 60
        while listens_at() in (0, before):
            assert p.poll() is None and time.monotonic() < deadline, "the broker did not start"
            time.sleep(0.005)
        yield p


def go_worker(socket: str, *flags: str):
    return running("worker", "--socket", socket, *flags)


def serving(worker: rb.Worker, socket: str):
    """A Python worker in a thread of this process."""
    return until_stopped(worker.run, socket=socket, wait=60)


@contextlib.contextmanager
def until_stopped(serve, *args, **options):
    """Runs a serving function in a thread of this process, until the block ends."""
    stop, failures = threading.Event(), []

    def run() -> None:
        try:
            serve(*args, stop=stop, **options)
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
def at(tmp_path):
    """The socket of a test's own broker. The folder is private."""
    return str(tmp_path / "b.sock")


@pytest.fixture
def served(at):
    """A function that serves a torch module in a thread and returns the socket."""
    rt = pytest.importorskip("ringbatch.torch")
    with broker_at(at), contextlib.ExitStack() as stack:

        def start(module, model, **options) -> str:
            stack.enter_context(until_stopped(rt.serve, module, model, socket=at, **options))
            return at

        yield start


def answer(socket: str, model: str, x) -> np.ndarray:
    """The numbers that a model answers."""
    with rb.connect(model, socket=socket, wait=60) as c:
        return np.array(c.infer(np.asarray(x, "float32"))).reshape(-1)


def ask_at_once(socket: str, model: str, rows) -> list:
    """From one client, all in flight: they share batches."""
    with rb.connect(model, socket=socket, wait=60) as c:
        return [r.result() for r in [c.submit(x) for x in rows]]


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
        p.communicate(timeout=60)
        assert p.returncode == 0


class Proxy:
    """A socket in front of the broker's, whose answers to new connections wait while ``answers`` is cleared.

    change: makes other bytes and descriptors of the broker's answers.
    """

    def __init__(self, broker: str, change=lambda data, fds: (data, fds)) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rb")
        self.path = os.path.join(self._folder.name, "b.sock")
        self.connections = 0
        self._clients: list[sockets.socket] = []
        self.answers = threading.Event()
        self.answers.set()
        self._broker, self._change = broker, change
        self._listener = sockets.socket(sockets.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, broker = self._listener.accept()[0], sockets.socket(sockets.AF_UNIX)
                broker.connect(self._broker)
                self._clients.append(client)
                self.connections += 1
                for way in ((client, broker, False), (broker, client, True)):
                    threading.Thread(target=self._pass_on, args=way, daemon=True).start()

    def _pass_on(self, a: sockets.socket, b: sockets.socket, answers: bool) -> None:
        if answers:
            self.answers.wait()
        with contextlib.suppress(OSError):
            while True:
                data, fds, _, _ = sockets.recv_fds(a, 1 << 16, 8)
                if not data:
                    break
                if answers:
                    data, fds = self._change(data, fds)
                sockets.send_fds(b, [data], fds)
                for fd in fds:
                    os.close(fd)
        with contextlib.suppress(OSError):
            b.shutdown(sockets.SHUT_RDWR)

    def hang_up(self) -> None:
        """Closes all present connections."""
        for client in list(self._clients):  # without new connections
            client.shutdown(sockets.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(sockets.SHUT_RDWR)
        self._listener.close()
        self._folder.cleanup()


class Load:
    """Threads that make calls without a pause until the block ends. A call that raises fails the test."""

    def __init__(self, *calls) -> None:
        self.answers, self.failures = 0, []
        self._stop = threading.Event()
        self._threads = in_threads(*(functools.partial(self._run, call) for call in calls))

    def _run(self, call) -> None:
        try:
            while not self._stop.is_set():
                call()
                self.answers += 1
        except BaseException as e:
            self.failures.append(e)

    def wait_for(self, condition) -> None:
        eventually(lambda: condition() or self.failures)

    def wait_for_answers(self, more: int) -> None:
        upto = self.answers + more
        self.wait_for(lambda: self.answers >= upto)

    def __enter__(self) -> Load:
        self._threads.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._threads.__exit__(None, None, None)
        assert not self.failures, self.failures[:3]


@pytest.fixture(scope="module")
def socket():
    with tempfile.TemporaryDirectory(prefix="rb") as folder:
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
    with go_worker(socket, "echo", "--wait-time", "200us"):
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
