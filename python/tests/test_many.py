# SPDX-License-Identifier: Apache-2.0
"""Threads, futures and asyncio on one connection."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
import time

import numpy as np
import pytest
from conftest import in_threads, serving

import ringbatch as rb


def row(i: int) -> np.ndarray:
    return np.full(16, i, "float32")


def test_submit_gives_futures(model):
    futures = [model.submit(row(i)) for i in range(200)]
    assert all(isinstance(f, concurrent.futures.Future) for f in futures)
    assert [f.result(60)[0] for f in futures] == list(range(200))
    done = concurrent.futures.wait([model.submit(np.stack([row(1), row(2)]))], 60).done
    assert done.pop().result().shape == (2, 16)


def test_submit_from_a_callback_of_a_full_window(echo):
    with rb.connect("echo", socket=echo, window=2) as m:
        finished, left = threading.Event(), [100]

        def again(future: concurrent.futures.Future) -> None:
            assert future.exception() is None
            left[0] -= 1
            if left[0] <= 0:
                finished.set()
            else:
                m.submit(row(left[0])).add_done_callback(again)

        for _ in range(2):
            m.submit(row(0)).add_done_callback(again)
        assert finished.wait(60)


def test_many_rows_are_answered_beside_threads_that_fill_the_window(socket):
    @rb.worker("slow", inputs="x:f32[1]", outputs="y:f32[1]", max_batch_size=4, wait_time=0)
    def slow(batch):
        time.sleep(0.03)  # the line for slots takes longer than a slice of a wait
        return batch.inputs["x"]

    enough = threading.Event()
    with serving(slow, socket), rb.connect("slow", socket=socket, window=4, wait=60) as m:

        def few() -> None:
            while not enough.is_set():
                m(np.zeros(1, "float32"))

        with concurrent.futures.ThreadPoolExecutor(41) as pool:
            others = [pool.submit(few) for _ in range(40)]
            try:
                for _ in range(3):
                    assert pool.submit(m, np.ones((4, 1), "float32"), split=False).result(60).all()
            finally:
                enough.set()
            for other in others:
                other.result(60)


@pytest.mark.parametrize("window", [4, 16, 17, 64])
@pytest.mark.parametrize("in_flight", [1, 15, 16, 17, 40])  # a loop commits after 16, and at the end of its turn
def test_asyncio_with_any_number_in_flight(echo, window, in_flight):
    with rb.connect("echo", socket=echo, window=window) as m:

        async def main() -> None:
            for turn in range(20):
                sent = [100 * turn + i for i in range(in_flight)]
                got = await asyncio.wait_for(asyncio.gather(*(m.ainfer(row(v)) for v in sent)), 60)
                assert [r[0] for r in got] == sent

        asyncio.run(main())


def test_asyncio_requests_fail_alone(socket):
    @rb.worker("odd", inputs={"x": ("float32", (16,))}, outputs={"y": ("float32", (16,))}, max_batch_size=16)
    def even(batch: rb.Batch) -> np.ndarray:
        for i, item in enumerate(batch.requests):
            if batch.inputs["x"][item.row, 0] % 2:
                batch.fail(i, "odd")
        return batch.inputs["x"]

    async def main(m: rb.Model) -> list:
        tasks = [asyncio.ensure_future(m.ainfer(row(i))) for i in range(60)]
        await asyncio.sleep(0)
        for t in tasks[::3]:  # some have a slot by now, some wait for room
            t.cancel()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)

    with serving(even, socket), rb.connect("odd", socket=socket, window=16, wait=60) as m:
        for _ in range(5):
            for i, got in enumerate(asyncio.run(main(m))):
                if i % 3 == 0:
                    assert isinstance(got, asyncio.CancelledError)
                elif i % 2:
                    assert isinstance(got, rb.Failed) and "odd" in str(got)
                else:
                    assert (got == row(i)).all()


@pytest.mark.parametrize(("window", "in_flight"), [(4, 8), (16, 16), (32, 15), (32, 17), (64, 40)])
def test_canceled_tasks_give_their_slots_back(echo, window, in_flight):
    with rb.connect("echo", socket=echo, window=window) as m:

        async def main() -> None:
            for turn in range(20):
                tasks = [asyncio.ensure_future(m.ainfer(row(1))) for _ in range(in_flight)]
                for _ in range(turn % 3):  # before, while and after they get a slot
                    await asyncio.sleep(0)
                for t in tasks:
                    t.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            got = await asyncio.wait_for(asyncio.gather(*(m.ainfer(row(v)) for v in range(window))), 60)
            assert [r[0] for r in got] == list(range(window))

        asyncio.run(main())


def test_closing_ends_requests_in_flight(socket):
    gate = threading.Event()

    @rb.worker("stuck", inputs={"x": ("f32", (16,))}, outputs={"y": ("f32", (16,))}, wait_time=0)
    def stuck(batch: rb.Batch) -> None:
        gate.wait(120)

    async def in_loop(m: rb.Model) -> None:
        await m.ainfer(row(1))

    kinds = [lambda m: m(row(1)), lambda m: m(np.stack([row(1)] * 2)), lambda m: m.request().run(), lambda m: asyncio.run(in_loop(m))]
    with serving(stuck, socket):
        for submits in (False, True, False, True):
            m = rb.connect("stuck", socket=socket, wait=60)
            future = m.submit(row(1)) if submits else None
            errors: list[BaseException] = []

            def call(kind, m: rb.Model = m, errors: list[BaseException] = errors) -> None:
                try:
                    kind(m)
                except BaseException as e:
                    errors.append(e)

            with in_threads(*(functools.partial(call, kind) for kind in kinds)):
                threading.Event().wait(0.05)
                m.close()
            assert future is None or isinstance(future.exception(60), rb.Closed)
            assert [type(e) for e in errors] == [rb.Closed] * 4
        gate.set()
