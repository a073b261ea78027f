# SPDX-License-Identifier: Apache-2.0
"""Workers that are coroutine functions: several batches in flight, and models that call models."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import FOUR, broker_at, rb_wait, serving

import ringbatch as rb


def full(value: float) -> np.ndarray:
    return np.full(4, value, "float32")


def test_a_process_has_as_many_batches_in_flight_as_its_concurrency(socket):
    running, most, together = 0, 0, None

    @rb.worker("meet", **FOUR, max_batch_size=1, wait_time=0, concurrency=3)
    async def meet(batch):
        nonlocal running, most, together
        together = together or asyncio.Event()
        running, most = running + 1, max(most, running + 1)
        if running == 3:
            together.set()
        await together.wait()  # until three batches run
        await asyncio.sleep(0)
        running -= 1
        return 2 * batch.inputs["x"]

    with serving(meet, socket), rb.connect("meet", socket=socket, wait=60, window=32) as m:
        futures = [m.submit(full(i)) for i in range(30)]
        assert [float(f.result(60)[0]) for f in futures] == [2.0 * i for i in range(30)]
    assert most == 3


def test_crops_of_different_requests_share_the_batches_of_the_second_model(socket):
    sizes = []

    @rb.worker("reader", **FOUR, max_batch_size=16, wait_time=0)
    def reader(batch):
        sizes.append((len(batch.requests), len(batch)))
        return batch.inputs["x"] + 1

    class Finder:
        """Makes as many crops of each request as its first number says, and returns their sum."""

        async def setup(self):
            self.reader = rb.connect("reader", socket=socket, wait=60)

        async def __call__(self, batch):
            return np.stack(await asyncio.gather(*map(self.read, batch.inputs["x"].copy())))

        async def read(self, x):
            crops = np.repeat(x[None], int(x[0]), 0)
            return (await self.reader.ainfer(crops)).sum(0) if len(crops) else np.zeros(4, "float32")

    finder = rb.worker("finder", **FOUR, max_batch_size=4, wait_time=0, concurrency=4)(Finder)
    with serving(reader, socket), serving(finder, socket), rb.connect("finder", socket=socket, wait=60, window=32) as m:
        futures = [(i, m.submit(full(i % 5))) for i in range(60)]
        for i, f in futures:
            assert (f.result(60) == (i % 5) * (i % 5 + 1)).all()
    assert any(requests > 1 for requests, _ in sizes)


def test_a_coroutine_that_raises_fails_its_batch_and_others_go_on(socket):
    @rb.worker("moody", **FOUR, max_batch_size=1, concurrency=2)
    async def moody(batch):
        await asyncio.sleep(0)
        x = batch.inputs["x"]
        if x[0, 0] < 0:
            raise ValueError("negative input")
        if x[0, 0] == 7:
            asyncio.current_task().cancel()
            await asyncio.sleep(0)
        if x[0, 0] == 8:
            batch.fail(0, rb.QueueFull("not now"))
            return None
        batch.outputs["y"][...] = x

    with serving(moody, socket), rb.connect("moody", socket=socket, wait=60) as m:
        good = [m.submit(full(i)) for i in range(5)]
        for bad, error, says in ((-1, rb.Failed, "ValueError: negative input"), (7, rb.Failed, "Cancelled"), (8, rb.QueueFull, "full")):
            with pytest.raises(error, match=says):
                m(full(bad))
        assert [f.result(60)[0] for f in good] == [0, 1, 2, 3, 4]
        assert m(full(3))[0] == 3


def test_views_of_a_batch_are_over_when_its_coroutine_is(socket):
    kept = []

    @rb.worker("kept", **FOUR, concurrency=2)
    async def keep(batch):
        kept.append(batch.input_run("x", 0))
        return batch.inputs["x"]

    with serving(keep, socket), rb.connect("kept", socket=socket, wait=60) as m:
        m(full(1))
        with pytest.raises(rb.Error):
            kept[0] + 1


def test_a_coroutine_whose_broker_is_gone_is_canceled_and_the_worker_attaches_again(at):
    began, canceled = threading.Event(), threading.Event()

    @rb.worker("long", **FOUR, max_batch_size=1, concurrency=2)
    async def long(batch):
        if batch.inputs["x"][0, 0] == 0:
            return batch.inputs["x"]
        began.set()
        try:
            await asyncio.Event().wait()  # until it is canceled
        except asyncio.CancelledError:
            canceled.set()
            raise

    with serving(long, at):
        with broker_at(at) as broker, rb.connect("long", socket=at, wait=60) as m:
            lost = m.submit(full(1))
            assert began.wait(60)
            broker.kill()
            with pytest.raises(rb.BrokerGone):
                lost.result(60)
            assert canceled.wait(60)
        with broker_at(at), rb.connect("long", socket=at, wait=60) as m:
            assert (m(full(0)) == 0).all()


def test_a_coroutine_is_canceled_when_all_requests_of_its_batch_are(socket):
    began, canceled = threading.Semaphore(0), threading.Semaphore(0)

    @rb.worker("second", **FOUR, max_batch_size=1, concurrency=4)
    async def second(batch):
        began.release()
        try:
            await asyncio.Event().wait()  # until it is canceled
        except asyncio.CancelledError:
            canceled.release()
            raise

    @rb.worker("first", **FOUR, max_batch_size=2, wait_time=60, concurrency=2)
    async def first(batch):
        assert len(batch.requests) == 2
        try:
            await inner.ainfer(batch.inputs["x"][0])
        except asyncio.CancelledError:
            canceled.release()
            raise

    with contextlib.ExitStack() as ends:
        ends.enter_context(serving(second, socket))
        inner = ends.enter_context(rb.connect("second", socket=socket, wait=60))
        ends.enter_context(serving(first, socket))
        # Two clients: the broker waits for a request of each.
        clients = [ends.enter_context(rb.connect("first", socket=socket, wait=60, window=1)) for _ in range(2)]
        with clients[0].request() as a, clients[1].request() as b:
            a.commit()
            b.commit()
            assert began.acquire(timeout=60)
            a.cancel()
            with pytest.raises(rb.Canceled):
                a.wait(60)
            assert not canceled.acquire(timeout=0.2)  # the other request still waits
            b.cancel()
            for _ in range(2):  # the batch, and its request to the second model
                assert canceled.acquire(timeout=60)
        for seconds in (0.5, 2, 8, 32):  # on a busy machine requests may expire before the batch begins
            with clients[0].request() as a, clients[1].request() as b:
                a.commit(seconds)
                b.commit(seconds)
                for request in (a, b):
                    with pytest.raises((rb.Expired, rb.Failed)):
                        request.wait()
            if began.acquire(timeout=1):
                break
        else:
            pytest.fail("no batch has begun")
        for _ in range(2):
            assert canceled.acquire(timeout=60)


PROGRAM = """
import asyncio, os
import ringbatch as rb

@rb.worker("slow", inputs={"x": ("float32", (4,))}, outputs={"y": ("float32", (4,))}, max_batch_size=1, wait_time=0, concurrency=2)
async def slow(batch):
    x = batch.inputs["x"].copy()
    if x[0, 0] == 8:
        child = os.fork()
        return os.WEXITSTATUS(os.waitpid(child, 0)[1]) + 0 * x if child else x
    print("began", flush=True)
    if x[0, 0] == 6:
        await asyncio.Event().wait()
    await asyncio.get_running_loop().run_in_executor(None, os.read, 0, 1)
    return x

try:
    slow.run(wait=60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
except rb.Forked:
    os._exit(44)
"""


@pytest.fixture
def program(socket):
    p = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env={**os.environ, "RINGBATCH_SOCKET": socket}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    rb_wait(socket, "slow")
    yield p
    p.kill()
    p.communicate()


def test_ctrl_c_lets_batches_in_flight_finish(socket, program):
    with rb.connect("slow", socket=socket, wait=60) as m:
        first = [m.submit(full(i)) for i in (1, 2)]
        assert [program.stdout.readline() for _ in first] == ["began\n"] * 2
        program.send_signal(signal.SIGINT)
        program.stdin.write("..")
        program.stdin.flush()
        assert sorted(float(f.result(60)[0]) for f in first) == [1, 2]
        assert program.wait(60) == 0
        assert program.stdout.read() == "interrupted\n"


def test_a_second_ctrl_c_fails_batches_in_flight(socket, program):
    with rb.connect("slow", socket=socket, wait=60) as m:
        endless = m.submit(full(6))
        assert program.stdout.readline() == "began\n"
        for seconds in (0.2, 5, 5, 50):  # two signals at once count as one
            program.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(seconds)
                break
        with pytest.raises(rb.Error):
            endless.result(60)


def test_a_child_forked_in_a_coroutine_has_no_batch(socket, program):
    with rb.connect("slow", socket=socket, wait=60) as m:
        assert m(full(8))[0] == 44  # the exit status of the child, sent by the parent


@pytest.mark.parametrize(
    ("options", "function", "says"),
    [
        ({"concurrency": 2}, lambda batch: None, "for coroutine functions"),
        ({"concurrency": 65}, "async", "1..64"),
        ({"depth": 3}, "async", "leave depth out"),
    ],
)
def test_a_wrong_concurrency_is_refused(options, function, says):
    async def run(batch):
        pass

    with pytest.raises(rb.Invalid, match=says):
        rb.worker("m", **FOUR, **options)(run if function == "async" else function)
