# SPDX-License-Identifier: Apache-2.0
"""What arrives at the wrong moment: a broker that lies, signals whose handlers raise, forks after a close."""

from __future__ import annotations

import array
import contextlib
import gc
import os
import signal
import socket as sockets
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import numpy as np
import pytest
from conftest import broker_at, eventually, go_worker, in_threads, serving

import ringbatch as rb


class Ding(BaseException):  # as KeyboardInterrupt
    pass


armed = True


def _ding(_number, _frame) -> None:
    if armed:
        raise Ding


@contextlib.contextmanager
def dinging():
    global armed
    armed = True
    before = signal.signal(signal.SIGALRM, _ding)
    try:
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def struck(after: float, use) -> None:
    """Uses it until the handler has raised in the midst of it (in a destructor nobody hears of that)."""
    global armed
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, after)
        until = time.monotonic() + after + 0.01
        while time.monotonic() < until:
            use()
        signal.setitimer(signal.ITIMER_REAL, 0)
        armed = False  # it strikes here at the latest: not outside, whichever thread is given the signal, and when
    except Ding:
        pass


def python(code: str, *args: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code), *args], capture_output=True, text=True, timeout=timeout)


def _frame(connection: sockets.socket) -> tuple[bytes, list[int]]:
    data, fds = b"", array.array("i")
    while len(data) < 4 or len(data) < 4 + struct.unpack("<I", data[:4])[0]:
        part, ancillary, _, _ = connection.recvmsg(1 << 20, sockets.CMSG_SPACE(64))
        if not part:
            raise ConnectionError("it has hung up")
        data += part
        for _, _, more in ancillary:
            fds.frombytes(more)
    return data, list(fds)


@contextlib.contextmanager
def between(broker: str, change):
    """A broker in the middle, which changes what the real one answers."""
    with tempfile.TemporaryDirectory(prefix="rb") as folder, sockets.socket(sockets.AF_UNIX) as listener, contextlib.ExitStack() as open_:
        path = os.path.join(folder, "b.sock")
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    ours = open_.enter_context(listener.accept()[0])
                except OSError:
                    return  # the end
                with contextlib.suppress(OSError):  # a client that would not wait
                    theirs = open_.enter_context(sockets.socket(sockets.AF_UNIX))
                    theirs.connect(broker)
                    theirs.sendall(_frame(ours)[0])
                    change(ours, *_frame(theirs))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield path
        finally:
            listener.shutdown(sockets.SHUT_RDWR)
            thread.join(60)


def test_a_doorbell_that_is_a_pipe_is_refused(echo):
    """Ringing it would end the process: SIGPIPE."""

    def change(ours: sockets.socket, data: bytes, fds: list[int]) -> None:
        read, write = os.pipe()
        os.close(read)
        sockets.send_fds(ours, [data], [*fds[:3], write])
        os.close(write)
        for fd in fds:
            os.close(fd)

    code = """
        import signal, sys
        import numpy as np, ringbatch as rb
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        from ringbatch.client import connection
        connection._CONNECT_TIMEOUT_NS = 60_000_000_000
        try:
            m = rb.connect("echo", socket=sys.argv[1])
            m(np.zeros(16, "f4"), timeout=1)
        except rb.Error as e:
            print(type(e).__name__, "doorbell" in str(e))
    """
    with between(echo, change) as path:
        p = python(code, path)
    assert (p.returncode, p.stdout) == (0, "Layout True\n"), p


def test_a_reply_that_stops_in_its_midst_does_not_outlast_the_timeout(echo):
    def change(ours: sockets.socket, data: bytes, fds: list[int]) -> None:
        ours.sendall(data[:10])  # and it stays open
        for fd in fds:
            os.close(fd)

    code = """
        import sys, time
        from ringbatch.binding.library import load
        from ringbatch.binding import structs as c
        from ctypes import addressof, c_uint64, sizeof
        lib, out = load(), c_uint64()
        o = c.ConnectOptions(sizeof(c.ConnectOptions), 1, sys.argv[1].encode(), None, 200_000_000)
        quickest = 10  # seconds, what it takes without the timeout
        for _ in range(3):  # in a machine that stands still, longer
            start = time.monotonic()
            status = lib.rb_connect(b"echo", addressof(o), addressof(out))
            quickest = min(quickest, time.monotonic() - start)
            if quickest < 9:
                break
        print(status, quickest < 9)
    """
    with between(echo, change) as path:
        p = python(code, path)
    assert (p.returncode, p.stdout) == (0, f"{rb.Timeout.status} True\n"), p


def test_a_signal_ends_connecting_to_a_broker_that_stands_still(echo):
    go_on = threading.Event()

    def change(ours: sockets.socket, data: bytes, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        go_on.wait(60)

    with between(echo, change) as path, dinging():
        with pytest.raises(Ding):  # without it there is a Timeout
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            rb.connect("echo", socket=path)
        go_on.set()


def _clients(socket: str, model: str) -> int:
    return next(m["clients"] for m in rb.stats(socket)["models"] if m["name"] == model)


def test_no_exception_from_a_signals_handler_loses_a_connection(echo):
    before = _clients(echo, "echo")

    def connect() -> None:
        with rb.connect("echo", socket=echo, window=1):
            pass

    with dinging():
        for step in range(100):
            struck(1e-5 * (step + 1), connect)
    gc.collect()
    rb.connect("echo", socket=echo, window=1).close()  # ctypes: closes what a destructor was kept from closing
    eventually(lambda: _clients(echo, "echo") <= before)  # those of a test before may have gone only now


def test_every_future_ends_although_a_signals_handler_raises_in_submit(echo):
    x = np.zeros(16, "f4")
    futures = []
    with rb.connect("echo", socket=echo, window=4) as m:
        m.submit(x).result(60)
        with dinging():
            for step in range(300):
                struck(1e-5 * (step % 50 + 10), lambda: futures.append(m.submit(x)))
        # An answer that was just being read may be lost, but nobody waits for ever.
        assert {type(f.exception(60)) for f in futures} <= {type(None), rb.Released, Ding}


def test_closing_is_possible_in_the_midst_of_what_holds_the_lock(echo):
    """As a signal's handler or the garbage collector would."""
    code = """
        import sys
        import numpy as np, ringbatch as rb
        m = rb.connect("echo", socket=sys.argv[1])
        m.submit(np.zeros(16, "f4")).result(60)
        c = m._completions
        c._thread.join(0)
        with c._lock:
            m.close()
        print("ok")
    """
    p = python(code, echo)
    assert p.stdout == "ok\n", p


def test_a_child_forked_after_the_close_does_not_unmap_what_is_not_its_own(echo):
    """Its parent's arrays outlive the client; where they lay the child may have mapped something else."""
    code = """
        import ctypes, mmap, os, sys
        import numpy as np, ringbatch as rb
        m = rb.connect("echo", socket=sys.argv[1])
        with m.request() as req:
            plain = np.asarray(req.inputs["x"])
        mapping = req._mapping
        base, size = mapping.base, mapping.bytes
        m.close()
        del req, mapping
        fds = len(os.listdir("/proc/self/fd"))
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                assert (plain == 0).all()                       # zeros, no crash
                assert len(os.listdir("/proc/self/fd")) < fds   # the session's socket is the parent's alone
                del plain, m
                import gc; gc.collect()
                code = 0
            finally:
                os._exit(code)
        print(os.waitpid(pid, 0)[1])
    """
    p = python(code, echo)
    assert (p.returncode, p.stdout) == (0, "0\n"), p


def test_a_worker_forks_and_its_child_may_look_at_the_batch(socket):
    seen: list[int] = []

    @rb.worker("forker", inputs={"x": ("float32", (4,))}, outputs={"y": ("float32", (4,))}, wait_time=0)
    def forker(batch) -> None:
        plain = np.asarray(batch.input_run("x", 0))
        pid = os.fork()
        if pid == 0:
            os._exit(int(plain.sum()))  # zeros, and no crash
        seen.append(os.waitpid(pid, 0)[1])
        batch.outputs["y"][...] = batch.inputs["x"]

    with serving(forker, socket), rb.connect("forker", socket=socket, wait=60) as m:
        m(np.ones(4, "f4"))
    assert seen == [0]


def test_a_claim_that_no_longer_fits_the_restarted_model_says_so(at):
    """It would wait for ever for room that there cannot be."""
    outcome: list[BaseException | None] = []
    with contextlib.ExitStack() as first:
        first.enter_context(broker_at(at))
        first.enter_context(go_worker(at, "--model", "echo", "--max_batch_size", "8"))
        m = rb.connect("echo", socket=at, window=8, wait=60)
        held = m.request(rows=8)
    assert not os.path.exists(at)

    def claim() -> None:
        try:
            while True:
                try:
                    m.request(rows=8, timeout=60)
                    outcome.append(None)
                    return
                except (rb.BrokerGone, rb.NoBroker):
                    time.sleep(0.001)
        except BaseException as e:
            outcome.append(e)

    with broker_at(at), go_worker(at, "--model", "echo", "--max_batch_size", "2"):
        with in_threads(claim):
            pass
        held.release()
        m.close()
    assert isinstance(outcome[0], rb.TooLarge), outcome
