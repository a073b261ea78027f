# SPDX-License-Identifier: Apache-2.0
"""Quick calls: after a first call of one row, the extension keeps a slot for the next. Others may want the slot back, and a
request may take long.
"""

from __future__ import annotations

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
    """Takes the seconds of its input; -1 waits for go_on."""
    seconds = float(batch.inputs["x"][0, 0])
    if seconds < 0:
        go_on.wait(120)
    else:
        time.sleep(seconds)
    batch.outputs["y"][...] = batch.inputs["x"] + 1


def test_a_claim_takes_the_only_slot_back(echo):
    with rb.connect("echo", socket=echo, window=1) as m:
        for n in range(200):
            assert (m(item(n)) == n).all()  # keeps a slot
            with m.request(timeout=60) as req:  # takes the slot
                req.inputs["x"][...] = item(-n)
                assert (req.run(timeout=60).outputs["y"] == -n).all()
            assert (m.submit(item(n + 0.5)).result(60) == n + 0.5).all()


def test_a_quick_call_may_take_long(socket):
    with serving(slow, socket), rb.connect("slow", socket=socket, window=1, wait=60) as m:
        for seconds in (0, 0.25, 0, 0, 0.35, 0):
            assert (m(item(seconds)) == np.float32(seconds) + 1).all()
        m(item(0))  # keeps a slot
        go_on.clear()
        with pytest.raises(rb.Expired):
            m(item(-1), timeout=0.05)
        go_on.set()
        assert (m(item(0)) == 1).all()


def test_a_signal_handler_calls_during_a_call(echo):
    answers: list[bool] = []
    depth = 0
    over = False  # a late handler must not start the timer again
    with rb.connect("echo", socket=echo) as m:

        def handler(_number, _frame) -> None:
            nonlocal depth
            if over:
                return
            depth += 1
            if depth < 3:  # interrupts the handler's call, too
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
        assert 0.001 <= min(took) < 0.05, took  # less than a slice of sleep


def test_a_waiting_claim_gets_the_slot(socket):
    with serving(slow, socket), rb.connect("slow", socket=socket, window=1, wait=60) as m:
        for _ in range(10):
            m(item(0))  # keeps a slot
            with in_threads(lambda: m(item(0.05))):
                time.sleep(0.02)  # the call uses the slot
                m.request(timeout=60).release()
