# SPDX-License-Identifier: Apache-2.0
"""A broker that lies, signal handlers that raise, and forks after a close."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import time

import numpy as np
import pytest
from conftest import FOUR, Proxy, broker_at, eventually, go_worker, in_threads, python, serving

import ringbatch as rb
from ringbatch.binding import structs
from ringbatch.binding.library import load


class Interrupted(BaseException):  # as KeyboardInterrupt
    pass


armed = True


def _interrupt(_number, _frame) -> None:
    if armed:
        raise Interrupted


@contextlib.contextmanager
def interrupting():
    global armed
    armed = True
    before = signal.signal(signal.SIGALRM, _interrupt)
    try:
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupted_after(after: float, use) -> None:
    """Calls use() until the handler has raised inside of it. In a destructor the exception is lost."""
    global armed
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, after)
        until = time.monotonic() + after + 0.01
        while time.monotonic() < until:
            use()
        signal.setitimer(signal.ITIMER_REAL, 0)
        armed = False  # a later signal must not raise outside
    except Interrupted:
        pass


def test_a_doorbell_that_is_a_pipe_is_refused(echo):
    """A write to a pipe without a reader ends the process by SIGPIPE."""

    def change(data: bytes, fds: list[int]) -> tuple[bytes, list[int]]:
        read, write = os.pipe()
        os.close(read)
        os.close(fds[3])
        return data, [*fds[:3], write]

    code = """
        import signal
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        try:
            rb.connect("echo")(x, timeout=1)
        except rb.Error as e:
            print(type(e).__name__, "doorbell" in str(e))
    """
    with contextlib.closing(Proxy(echo, change)) as proxy:
        assert python(code, socket=proxy.path) == "Layout True"


def test_half_a_reply_does_not_outlast_the_timeout(echo):
    def change(data: bytes, fds: list[int]) -> tuple[bytes, list[int]]:
        for fd in fds:
            os.close(fd)
        return data[:10], []  # the connection stays open

    lib, out = load(), ctypes.c_uint64()
    with contextlib.closing(Proxy(echo, change)) as proxy:
        o = structs.ConnectOptions(ctypes.sizeof(structs.ConnectOptions), 1, proxy.path.encode(), None, 200_000_000)
        quickest = 10.0  # seconds of a call without the timeout
        for _ in range(3):  # a busy machine may need longer
            start = time.monotonic()
            assert lib.rb_connect(b"echo", ctypes.addressof(o), ctypes.addressof(out)) == rb.Timeout.status
            quickest = min(quickest, time.monotonic() - start)
            if quickest < 9:
                break
        assert quickest < 9


def test_a_signal_ends_connecting_to_a_broker_that_stands_still(echo):
    with contextlib.closing(Proxy(echo)) as proxy, interrupting():
        proxy.answers.clear()
        with pytest.raises(Interrupted):  # and not a Timeout
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            rb.connect("echo", socket=proxy.path)
        proxy.answers.set()


def _clients(socket: str, model: str) -> int:
    return next(m["clients"] for m in rb.stats(socket)["models"] if m["name"] == model)


def test_no_exception_from_a_signals_handler_loses_a_connection(echo):
    before = _clients(echo, "echo")

    def connect() -> None:
        with rb.connect("echo", socket=echo, window=1):
            pass

    with interrupting():
        for step in range(100):
            interrupted_after(1e-5 * (step + 1), connect)
    gc.collect()
    rb.connect("echo", socket=echo, window=1).close()  # ctypes: closes the connections whose destructor was interrupted
    eventually(lambda: _clients(echo, "echo") <= before)


def test_every_future_ends_although_a_signals_handler_raises_in_submit(echo):
    x = np.zeros(16, "f4")
    futures = []
    with rb.connect("echo", socket=echo, window=4) as m:
        m.submit(x).result(60)
        with interrupting():
            for step in range(300):
                interrupted_after(1e-5 * (step % 50 + 10), lambda: futures.append(m.submit(x)))
        # An answer may be lost while it is read, but every future ends.
        assert {type(f.exception(60)) for f in futures} <= {type(None), rb.Released, Interrupted}


def test_close_works_while_the_same_thread_holds_the_lock(echo):
    """A signal handler or the garbage collector may call close()."""
    code = """
        m = rb.connect("echo")
        m.submit(x).result(60)
        c = m._completions
        c._thread.join(0)
        with c._lock:
            m.close()
        print("ok")
    """
    assert python(code, socket=echo) == "ok"


def test_a_child_forked_after_the_close_unmaps_nothing(echo):
    """The parent's arrays outlive the client. In the child, other memory may be at their place."""
    code = """
        m = rb.connect("echo")
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
                assert len(os.listdir("/proc/self/fd")) < fds   # only the parent has the session's socket
                del plain, m
                import gc; gc.collect()
                code = 0
            finally:
                os._exit(code)
        print(os.waitpid(pid, 0)[1])
    """
    assert python(code, socket=echo) == "0"


def test_a_worker_forks_and_its_child_may_look_at_the_batch(socket):
    seen: list[int] = []

    @rb.worker("forker", **FOUR, wait_time=0)
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
    """Otherwise the claim would wait without end for room."""
    outcome: list[BaseException | None] = []
    with contextlib.ExitStack() as first:
        first.enter_context(broker_at(at))
        first.enter_context(go_worker(at, "echo", "--max-batch-size", "8"))
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

    with broker_at(at), go_worker(at, "echo", "--max-batch-size", "2"):
        with in_threads(claim):
            pass
        held.release()
        m.close()
    assert isinstance(outcome[0], rb.TooLarge), outcome
