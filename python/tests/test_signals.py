# SPDX-License-Identifier: Apache-2.0
"""Signal handlers that raise anywhere, Ctrl-C, a broker that stands still, and closed event loops."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import SIXTEEN, Load, broker_at, eventually, go_worker, python, rb_wait, serving

import ringbatch as rb

x = np.zeros(16, "f4")


STEPPED = {
    "connect": "rb.connect('echo', window=1).close()",
    "call": "m(x)",
    "rows": "m(np.zeros((3, 16), 'f4'))",
    "priority": "m(x, priority=0)",
    "request": "with m.request() as req: req.inputs['x'][...] = x; req.run().outputs['y']",
    "request of rows": "with m.request(rows=3) as req: req.inputs['x'][...] = 1; req.commit().wait()",
    "submit": "m.submit(x)",
    "submit with priority": "m.submit(x, priority=0)",
    "ainfer": "asyncio.run(m.ainfer(x))",
    "ainfer with priority": "asyncio.run(m.ainfer(x, priority=0))",
}


# Raises at every step: CPython runs signal handlers when a Python function begins and when a C
# function returns. In other processes, since the handler would interrupt pytest too.
STEPS = """
import asyncio, concurrent.futures, itertools, logging, sys, threading

logging.disable()  # messages of asyncio

class Interrupted(KeyboardInterrupt):
    pass

left = 0  # steps until the exception; 0: no exception
main = threading.get_ident()

def step(frame, event, _what):
    global left
    if left and event in ("call", "c_return") and (not only_ours or f"{os.sep}ringbatch{os.sep}" in frame.f_code.co_filename):
        left -= 1
        if not left:
            raise Interrupted

class Library:
    '''Calls step() for functions of ctypes, which a profiler does not see.'''

    def __init__(self, library):
        self._library = library

    def __getattr__(self, name):
        function = getattr(self._library, name)

        def call(*arguments):
            result = function(*arguments)
            if threading.get_ident() == main:
                step(sys._getframe(1), "c_return", call)
            return result

        setattr(self, name, call)
        return call

from ringbatch.binding import library as _library
_library._library = Library(_library.load())
sys.unraisablehook = lambda *_: None  # exceptions in destructors

def interrupted(use, at):
    '''Raises at this step of use(); returns whether use() has as many steps.'''
    global left
    left = at
    try:
        sys.setprofile(step)
        use()
    except (Interrupted, RuntimeError):  # asyncio raises RuntimeError after an interruption
        pass
    finally:
        sys.setprofile(None)
        it_was, left = not left, 0
    return it_was
"""

@pytest.mark.parametrize("name", STEPPED)
def test_an_exception_at_any_step_leaves_no_slot_behind(echo, name):
    use = STEPPED[name] if STEPPED[name].startswith("with") else "return " + STEPPED[name]
    code = f"""
        only_ours = "asyncio" in {use!r}  # asyncio itself does not survive everything

        def use():
            {use}

        for at in itertools.count(1):
            with rb.connect("echo", window={3 if "rows" in name else 1}) as m:
                more = interrupted(use, at)
                after = use()  # needs all of the window
                if isinstance(after, concurrent.futures.Future):
                    after.result(60)
            if not more:
                break
        print("fine")
    """
    assert python(STEPS + textwrap.dedent(code), socket=echo) == "fine"


def test_submit_has_one_thread_and_so_has_ainfer(echo):
    code = """
        import asyncio
        def threads():
            return len(os.listdir("/proc/self/task"))
        before = threads()  # NumPy's may be among them
        with rb.connect("echo") as m:
            m(x)
            with m.request() as req:
                req.run()
            assert threads() == before, threads()
            m.submit(x).result(60)
            assert threads() == before + 1, threads()
        end = time.monotonic() + 60
        while threads() != before and time.monotonic() < end:
            time.sleep(0.001)  # the kernel lists a thread for a moment after it was joined
        assert threads() == before, threads()
        with rb.connect("echo") as m:
            asyncio.run(m.ainfer(x))
            assert threads() == before + 1, threads()
        print("fine")
    """
    assert python(code, socket=echo) == "fine"


@pytest.fixture
def still(at):
    """A broker with the model echo, which stands still."""
    with broker_at(at) as broker, go_worker(at, "echo", "--wait-time", "0s"):
        rb_wait(at, "echo")
        with rb.connect("echo", socket=at, window=8, wait=60) as m:
            m(x)
            m.submit(x).result(60)
            broker.send_signal(signal.SIGSTOP)
            eventually(lambda: " T " in Path(f"/proc/{broker.pid}/stat").read_text())
            try:
                yield m
            finally:
                broker.send_signal(signal.SIGCONT)


def _wait(m: rb.Model) -> None:
    with m.request() as req:
        req.commit().wait(0.2)


def _run(m: rb.Model) -> None:
    with m.request() as req:
        req.run(0.2)


TIMEOUTS = {
    "call": lambda m: m(x, timeout=0.2),
    "rows": lambda m: m(np.zeros((2, 16), "f4"), timeout=0.2),
    "priority": lambda m: m(x, timeout=0.2, priority=0),
    "run": _run,
    "wait": _wait,
    "submit": lambda m: m.submit(x, timeout=0.2).result(60),
    "ainfer": lambda m: asyncio.run(m.ainfer(x, timeout=0.2)),
}


def test_timeouts_end_at_their_time_while_the_broker_stands_still(still):
    for name, use in TIMEOUTS.items():
        start = time.monotonic()
        with pytest.raises((rb.Expired, rb.Timeout)):
            use(still)
        assert 0.19 < time.monotonic() - start, name


async def _answer(m):
    return await asyncio.wait_for(m.ainfer(x), 60)


NEXT = {
    "ainfer": lambda m: asyncio.run(_answer(m)),
    "call": lambda m: m(x),
    "submit": lambda m: m.submit(x).result(60),
    "request": lambda m: claimed(m),
}


def claimed(m):
    with m.request(timeout=60) as r:
        return r.inputs["x"].copy()


@pytest.mark.parametrize("use", NEXT)
def test_a_closed_event_loop_gives_its_slots_back(socket, use):
    go_on = threading.Event()

    @rb.worker(f"slowly_{use}", **SIXTEEN, wait_time=0)
    def slowly(batch):
        go_on.wait(120)
        return batch.inputs["x"]

    with serving(slowly, socket), rb.connect(slowly.model, socket=socket, window=4, wait=60) as m:
        loop = asyncio.new_event_loop()
        tasks = [loop.create_task(m.ainfer(x)) for _ in range(4)]
        loop.run_until_complete(asyncio.sleep(0.05))
        for t in tasks:
            t._log_destroy_pending = False
        loop.close()
        go_on.set()
        assert NEXT[use](m).shape == (16,)
        with m.request(rows=4, timeout=60):
            pass


def test_a_coroutine_that_is_closed_gives_its_slot_back(echo):
    with rb.connect("echo", socket=echo, window=1) as m:
        loop = asyncio.new_event_loop()

        async def begin() -> None:
            coroutine = m.ainfer(x)
            coroutine.send(None)  # sends the request and waits
            coroutine.close()  # GeneratorExit

        for _ in range(5):
            loop.run_until_complete(begin())
        loop.close()
        with m.request(timeout=60):
            pass


# A handler that raises inside of Condition.__enter__, called by result() or by wait(), leaves the lock taken.
LEFT = {
    "result": "model.submit(x), lambda f: f._condition.acquire()",
    "result of a retrying model": "retrying.submit(x), lambda f: f._condition.acquire()",
    "result of many rows": "model.submit(np.stack([x] * 20)), lambda f: f._condition.acquire()",
    "wait": "model.submit(x), interrupted_wait",
}


@pytest.mark.parametrize("left", LEFT)
def test_a_lock_that_a_handler_left_in_a_future_stops_nothing(left, at):
    code = f"""
        import concurrent.futures, threading
        go = threading.Event()

        @rb.worker("gated", inputs={{"x": ("float32", (16,))}}, outputs={{"y": ("float32", (16,))}}, wait_time=0, max_batch_size=8)
        def gated(batch):
            go.wait()
            return batch.inputs["x"]

        def interrupted_wait(future):
            waiter = concurrent.futures._base._FirstCompletedWaiter()
            future._waiters.append(waiter)
            waiter.event._cond.acquire()

        stop = threading.Event()
        thread = threading.Thread(target=gated.run, kwargs=dict(stop=stop, wait=60))
        thread.start()
        model, retrying = rb.connect("gated", wait=60, window=20), rb.connect("gated", wait=60, retry=True)
        future, leave = {LEFT[left]}
        leave(future)
        go.set()
        for m in (model, retrying):
            assert (m.submit(x).result(60) == x).all()
            m.close()
        stop.set()
        thread.join()
        print("ended")
    """
    with broker_at(at):
        assert python(code, socket=at, timeout=60) == "ended"


def test_a_callback_that_exits_does_not_end_the_others(socket, caplog):
    go_on = threading.Event()  # the callbacks must be added before the futures end

    @rb.worker("leaving", **SIXTEEN, wait_time=0)
    def worker(batch):
        go_on.wait(120)
        return batch.inputs["x"]

    def leave(_future) -> None:
        raise SystemExit(3)

    with serving(worker, socket), rb.connect("leaving", socket=socket, window=8, wait=60) as m:
        for _ in range(5):
            m.submit(x).add_done_callback(leave)
        go_on.set()
        assert m.submit(x).result(60).shape == (16,)
        eventually(lambda: "SystemExit" in caplog.text)


WORKER = """
import sys, time
import ringbatch as rb

@rb.worker("steady", inputs={"x": ("float32", (16,))}, outputs={"y": ("float32", (16,))}, wait_time=0, max_batch_size=4)
def steady(batch):
    time.sleep(0.003)
    batch.outputs["y"][...] = batch.inputs["x"]

try:
    steady.run(socket=sys.argv[1], wait=60)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_on_a_worker_fails_no_request(socket):
    """The worker finishes its batch; the others run the rest."""

    def worker() -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-c", WORKER, socket], stdout=subprocess.PIPE, text=True)

    def attached() -> list[int]:
        return [w["pid"] for m in rb.stats(socket)["models"] if m["name"] == "steady" for w in m["workers"]]

    workers = [worker(), worker()]
    try:
        with rb.connect("steady", socket=socket, window=16, wait=120) as m:
            with Load(*[lambda: m(x)] * 12) as load:
                for _ in range(2):
                    load.wait_for_answers(40)
                    workers.append(worker())
                    first = workers.pop(0)
                    eventually(lambda first=first: first.pid in attached() and len(attached()) == 3)
                    first.send_signal(signal.SIGINT)
                    assert first.communicate(timeout=120)[0].endswith("interrupted\n")
    finally:
        for p in workers:
            p.kill()
            p.communicate()


# A thread holds an event's lock inside of wait(), and a signal handler may run in that thread.
HELD = """
import atexit, signal, threading
from ringbatch.worker.signals import StopEvent, stop_on_signals, stopping
from ringbatch.worker.worker import Ending

stop = threading.Event()
with stop._cond:  # a worker that waits for a broker must not take the lock of a user's event
    assert not Ending(stop).wait(0.1)
with stopping() as stop:
    with stop._cond:
        signal.raise_signal(signal.%s)
    assert stop.wait(60) and stop.is_set()
stop = StopEvent()
stop_on_signals(stop)
assert not stop.wait(0.1)

@atexit.register  # a second signal, when no thread can start any more
def over():
    signal.raise_signal(signal.%s)
    assert stop.is_set()
    print("over")
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_a_wait(name):
    assert subprocess.check_output([sys.executable, "-c", HELD % (name, name)], timeout=120) == b"over\n"


AGAIN = """
import signal
from ringbatch.worker import signals
from ringbatch.worker.signals import StopEvent, stop_on_signals

stop = StopEvent()
stop_on_signals(stop)
signal.raise_signal(signal.SIGINT)
signal.raise_signal(signal.SIGINT)  # the same press
assert stop.is_set()
signals._ONE_PRESS_S = 0
signal.raise_signal(signal.SIGTERM)  # from a supervisor
print("goes on", flush=True)
signal.raise_signal(signal.SIGINT)
print("still there")
"""


def test_a_second_ctrl_c_ends_a_worker_at_once():
    p = subprocess.run([sys.executable, "-c", AGAIN], stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (p.stdout, p.returncode) == ("goes on\n", -signal.SIGINT)
