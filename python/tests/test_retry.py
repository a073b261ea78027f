# SPDX-License-Identifier: Apache-2.0
"""connect(retry=…): a restart of the broker is a pause."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import signal
import time

import numpy as np
import pytest
from conftest import Load, Proxy, broker_at, go_worker

import ringbatch as rb

SHAPE = ("--model", "m", "--input", "x:f32[4]", "--output", "y:f32[4]", "--max-batch-size", "8", "--wait-time", "0")


def test_a_killed_broker_is_a_pause_for_a_model_that_retries(at):
    x = np.arange(4, dtype="float32")
    with broker_at(at, *SHAPE) as first, go_worker(at, "echo", "--name", "m", "--input", "x:f32[4]"):
        m = rb.connect("m", socket=at, wait=60, retry=60.0)
        plain = rb.connect("m", socket=at, wait=60)

        def calls() -> None:
            assert (m(x) == x).all()
            assert (m.submit(x).result(60) == x).all()
            assert (asyncio.run(m.ainfer(x)) == x).all()

        with contextlib.ExitStack() as until_answered, Load(calls, calls, calls) as load:
            load.wait_for_answers(10)
            first.send_signal(signal.SIGKILL)
            first.wait()
            with pytest.raises((rb.BrokerGone, rb.NoBroker)):  # without retry
                while True:
                    plain(x)
            until_answered.enter_context(broker_at(at, *SHAPE))
            load.wait_for_answers(10)
        m.close()
        plain.close()


def test_a_lasting_error_is_not_retried(at):
    with broker_at(at, *SHAPE, "--no-worker", "refuse"):
        m = rb.connect("m", socket=at, wait=60, retry=True)
        with pytest.raises(rb.NoWorker):
            for seconds in (0.2, 2, 20):  # a slow broker may need longer to refuse
                with contextlib.suppress(rb.Expired):
                    m(np.zeros(4, "float32"), timeout=seconds)
        with pytest.raises(ValueError):
            m(np.zeros(5, "float32"))
        m.close()


ONE = np.ones(16, "float32")
CALLS = {
    "call": lambda m: m(ONE),
    "call with priority": lambda m: m(ONE, priority=0),
    "submit": lambda m: m.submit(ONE).result(60),
    "submit with priority": lambda m: m.submit(ONE, priority=0).result(60),
    "ainfer": lambda m: asyncio.run(m.ainfer(ONE)),
    "ainfer with priority": lambda m: asyncio.run(m.ainfer(ONE, priority=0)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_call_waits_for_a_slow_broker_after_its_restart(echo, call):
    with contextlib.closing(Proxy(echo)) as slow:
        with rb.connect("echo", socket=slow.path) as m, concurrent.futures.ThreadPoolExecutor(1) as pool:
            call(m)
            slow.answers.clear()
            before = slow.connections
            slow.hang_up()
            while slow.connections == before:  # until the client attaches again
                with contextlib.suppress(rb.Error):
                    m.request(timeout=0.01).release()
            answer = pool.submit(call, m)
            time.sleep(0.05)  # mostly enough to send the request
            slow.answers.set()
            assert (answer.result(60) == ONE).all()
