# SPDX-License-Identifier: Apache-2.0
"""Calls that go without Go, through a slot that the client lends to C.

After a first call of one row a slot is lent. These tests look at what happens
around it: others want the slot, the request fails or takes long, the broker
goes.
"""

from __future__ import annotations

import functools
import signal
import threading
import time

import numpy as np
import pytest
from conftest import in_threads, serving

import ringbatch as rb


def item(n: float) -> np.ndarray:
    return np.full(16, n, "float32")


go_on = threading.Event()


@rb.worker("slow", inputs={"x": ("float32", (16,))}, outputs={"y": ("float32", (16,))}, wait_time=0)
def slow(batch):
    """Takes as many seconds as its input says; -1: until it may go on."""
    seconds = float(batch.inputs["x"][0, 0])
    if seconds < 0:
        go_on.wait(120)
    else:
        time.sleep(seconds)
    batch.outputs["y"][...] = batch.inputs["x"] + 1


def test_the_only_slot_is_taken_back_when_it_is_needed(echo):
    with rb.connect("echo", socket=echo, window=1) as m:
        for n in range(200):
            assert (m(item(n)) == n).all()  # lends
            with m.request(timeout=60) as req:  # takes back
                req.inputs["x"][...] = item(-n)
                assert (req.run(timeout=60).outputs["y"] == -n).all()
            assert (m.submit(item(n + 0.5)).result(60) == n + 0.5).all()


def test_threads_share_a_small_window(echo):
    wrong: list[object] = []

    def use(m: rb.Model, k: int) -> None:
        try:
            for n in range(300):
                v = 1000 * k + n
                if (n + k) % 7 == 0:
                    with m.request(timeout=60) as req:
                        req.inputs["x"][...] = item(v)
                        good = (req.run(timeout=60).outputs["y"] == v).all()
                elif (n + k) % 5 == 0:
                    good = (m(np.stack([item(v), item(v)]), timeout=60) == v).all()
                else:
                    good = (m(item(v)) == v).all()
                if not good:
                    wrong.append(v)
        except Exception as e:
            wrong.append(e)

    for window in (2, 3, 8):
        with rb.connect("echo", socket=echo, window=window) as m:
            with in_threads(*(functools.partial(use, m, k) for k in range(4))):
                pass
    assert not wrong, wrong[:5]


def test_a_request_that_takes_long_goes_on_as_any_other(socket):
    with serving(slow, socket), rb.connect("slow", socket=socket, window=1, wait=60) as m:
        for seconds in (0, 0.25, 0, 0, 0.35, 0):
            assert (m(item(seconds)) == np.float32(seconds) + 1).all()
        m(item(0))  # a slot is lent
        go_on.clear()
        with pytest.raises(rb.Expired):
            m(item(-1), timeout=0.05)
        go_on.set()  # the worker has it until then
        assert (m(item(0)) == 1).all()


def test_a_signals_handler_calls_in_the_midst_of_a_call(echo):
    answers: list[bool] = []
    depth = 0
    over = False  # a handler that runs after the timer was stopped must not start it again, for whose handler is next
    with rb.connect("echo", socket=echo) as m:

        def handler(_number, _frame) -> None:
            nonlocal depth
            if over:
                return
            depth += 1
            if depth < 3:  # in the midst of a handler's call too; not without end where calls take longer than that
                signal.setitimer(signal.ITIMER_REAL, 0.0007)
            v = -1 - len(answers)
            answers.append((m(item(v)) == v).all())
            depth -= 1
            signal.setitimer(signal.ITIMER_REAL, 0.0007)

        before = signal.signal(signal.SIGALRM, handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            for n in range(4000):
                assert (m(item(n)) == n).all()
        finally:
            over = True
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert answers and all(answers)


def test_a_timeout_counts_while_the_window_is_full(echo):
    with rb.connect("echo", socket=echo, window=1) as m, m.request():
        took = []
        while len(took) < 10 or (min(took) >= 0.05 and len(took) < 300):  # a busy machine may need many
            start = time.monotonic()
            with pytest.raises(rb.Full):
                m(item(1), timeout=0.001)
            took.append(time.monotonic() - start)
        assert 0.001 <= min(took) < 0.05, took  # not a whole slice, let alone two


def test_what_is_no_plain_array_goes_the_long_way(echo):
    class Own(np.ndarray):
        pass

    fixed = item(3)
    fixed.flags.writeable = False
    with rb.connect("echo", socket=echo) as m:
        for _ in range(3):
            assert (m(fixed) == 3).all()
            assert (m(np.repeat(item(4), 2)[::2]) == 4).all()
            assert (m(item(5).view(Own)) == 5).all()
            with pytest.raises(rb.DType):
                m(item(6).astype(">f4"))
            with pytest.raises(rb.Shape):
                m(np.float32(7))


def test_who_waits_for_the_slot_gets_it(socket):
    with serving(slow, socket), rb.connect("slow", socket=socket, window=1, wait=60) as m:
        for _ in range(10):
            m(item(0))  # lends
            with in_threads(lambda: m(item(0.05))):
                time.sleep(0.02)  # it is on its way through the lent slot
                m.request(timeout=60).release()
