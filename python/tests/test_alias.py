# SPDX-License-Identifier: Apache-2.0
"""Two versions of a model, and an alias that clients attach to."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import subprocess
import threading
import time

import numpy as np
import pytest
from conftest import Load, Proxy, eventually, go_worker, serving

import ringbatch as rb

ONES = np.ones(16, "float32")


def alias(socket: str, *args: str) -> None:
    """Sets the alias once its models are ready."""

    def is_set() -> bool:
        p = subprocess.run([rb.binary_path(), "alias", "--socket", socket, *args], capture_output=True, text=True)
        assert p.returncode == 0 or "nothing changed" in p.stderr, p.stderr
        return p.returncode == 0

    eventually(is_set)


def once_moved(call):
    """The result of call() after the connection has moved to the alias's present model."""
    answers = []

    def has_moved() -> bool:
        with contextlib.suppress(rb.SignatureMismatch, rb.Shape):
            answers.append(call())
        return bool(answers)

    eventually(has_moved)
    return answers[0]


@pytest.fixture(scope="module")
def versions(socket):
    """m@1 and m@2 multiply 16 numbers by 1 and 2, m@3 multiplies 8 by 3."""
    with contextlib.ExitStack() as workers:
        for scale, width in ((1, 16), (2, 16), (3, 8)):
            name = f"m@{scale}"
            what = ("--name", name, "--scale", str(scale), "--input", f"x:f32[{width}]", "--wait-time", "0")
            workers.enter_context(go_worker(socket, "affine", *what))
            alias(socket, "m", name)
        yield socket


def calls(m, x):
    return [m(x), *m(np.stack([x, x]))]


def futures(m, x):
    return [f.result(60) for f in [m.submit(x) for _ in range(6)]]


def tasks(m, x):
    async def several() -> list[np.ndarray]:
        return list(await asyncio.gather(*(m.ainfer(x) for _ in range(6))))

    return asyncio.run(several())


def views(m, x):
    with m.request() as req:
        req.inputs["x"][...] = x
        return [np.array(req.run().outputs["y"])]


def checked(call, m: rb.Model, answers: list[int]):
    """A call that counts its answers by scale."""
    numbers = itertools.cycle(range(1, 1001))

    def once() -> None:
        n = next(numbers)
        for y in call(m, n * ONES):
            scale = y[0] / n
            assert scale in (1, 2) and (y == scale * n).all(), (n, y)
            answers[int(scale)] += 1

    return once


def test_a_switch_under_load_loses_no_request(versions):
    alias(versions, "m", "m@1")
    kinds = calls, futures, tasks, views
    answers = [[0, 0, 0] for _ in kinds]  # by scale
    with contextlib.ExitStack() as stack:
        models = [stack.enter_context(rb.connect("m", socket=versions)) for _ in kinds]
        load = stack.enter_context(Load(*map(checked, kinds, models, answers)))
        for i in range(8):
            to = 2 - i % 2
            alias(versions, "m", f"m@{to}")
            before = [a[to] for a in answers]
            load.wait_for(lambda to=to, before=before: all(a[to] >= n + 20 for a, n in zip(answers, before)))


@pytest.mark.parametrize("retry", [False, 30.0])
def test_a_model_follows_to_another_signature_if_its_arrays_fit(versions, retry):
    alias(versions, "m", "m@1")
    x, narrow = ONES, ONES[:8]
    with rb.connect("m", socket=versions, retry=retry) as m, rb.connect("m", socket=versions) as by_hand:
        assert (m(x) == x).all() and m.name == "m" and m.stats()["name"] == "m@1"
        waiting = by_hand.request()
        alias(versions, "m", "m@3")
        with pytest.raises(rb.SignatureMismatch, match=r"x:f32\[8\]"):
            while True:  # until the connection has moved
                m(x)
        assert (m(narrow) == 3).all()
        assert (m.submit(narrow).result(60) == 3).all()
        assert (asyncio.run(m.ainfer(narrow)) == 3).all()
        assert m(np.ones((5, 8), "float32")).shape == (5, 8)
        assert m.inputs[0].shape == (8,)
        for call in (m, m.infer, lambda x: m.submit(x).result(60)):
            with pytest.raises(rb.SignatureMismatch, match=r"it was x:f32\[16\]"):
                call(x)
        with pytest.raises(rb.SignatureMismatch):
            asyncio.run(m.ainfer(x))
        with pytest.raises(rb.SignatureMismatch):
            while True:
                by_hand.request().release()
        with waiting:  # the version of the claim answers
            waiting.inputs["x"][...] = 5
            assert (waiting.run().outputs["y"] == 5).all()
        alias(versions, "m", "m@2")
        assert (once_moved(lambda: m(x)) == 2).all()
        once_moved(by_hand.request).release()


@pytest.mark.parametrize("kind", [lambda m, x: m(x), lambda m, x: m.submit(x).result(60), lambda m, x: asyncio.run(m.ainfer(x))],
    ids=["call", "submit", "ainfer"])
def test_a_signature_that_goes_back_and_forth_leaves_no_connections_behind(versions, kind):
    alias(versions, "m", "m@1")

    def answer(m: rb.Model, x: np.ndarray) -> float:
        return once_moved(lambda: float(kind(m, x)[0]))

    def clients() -> int:
        return sum(m["clients"] for m in rb.stats(socket=versions)["models"] if m["name"].startswith("m@"))

    with rb.connect("m", socket=versions) as m:
        assert answer(m, ONES) == 1
        threads, before = threading.active_count(), clients()
        slow = m.submit(ONES)
        for _ in range(5):
            alias(versions, "m", "m@3")
            assert answer(m, ONES[:8]) == 3
            alias(versions, "m", "m@2")
            assert answer(m, ONES) == 2
        assert slow.result(60)[0] == 1
        eventually(lambda: clients() <= before + 1 and threading.active_count() <= threads + 2)  # and one connection of the other signature


@pytest.mark.parametrize("retry", [False, 30.0])
def test_errors_keep_no_connection_that_was_left(versions, retry):
    alias(versions, "m", "m@1")
    gc.disable()  # no cycle keeps them either
    try:
        with rb.connect("m", socket=versions, retry=retry) as m:
            for to, x in (("m@3", ONES[:8]), ("m@2", ONES)) * 3:
                alias(versions, "m", to)
                for call in (m, m.infer, m.infer if retry else m.submit) * 3:  # a future that retries keeps its error
                    with contextlib.suppress(rb.Error):
                        call(ONES[:5])
                once_moved(lambda x=x: m(x))
            assert not m._further
    finally:
        gc.enable()


def test_the_connection_to_a_version_that_was_left_ends_with_its_last_answer(versions):
    go_on = threading.Event()

    @rb.worker("m@slow", inputs={"x": ("float32", (8,))}, outputs={"y": ("float32", (8,))}, wait_time=0)
    def slow(batch):
        go_on.wait(60)
        batch.outputs["y"][...] = 4

    alias(versions, "m", "m@1")
    with serving(slow, versions), rb.connect("m", socket=versions) as m:
        alias(versions, "m", "m@slow")
        last = once_moved(lambda: m.submit(ONES[:8]))
        alias(versions, "m", "m@1")
        assert once_moved(lambda: m(ONES)[0]) == 1
        go_on.set()
        assert last.result(60)[0] == 4
        eventually(lambda: not any(thread.name == "ringbatch" for thread in threading.enumerate()))


@pytest.mark.parametrize("ask", [lambda m: asyncio.wait_for(m.ainfer(ONES), 60), lambda m: asyncio.to_thread(m.submit(ONES).result, 60)],
    ids=["ainfer", "submit"])
def test_an_answer_of_a_version_that_was_left_arrives(versions, ask):
    go_on = threading.Event()

    @rb.worker("m@late", inputs={"x": ("float32", (16,))}, outputs={"y": ("float32", (16,))}, wait_time=0)
    def late(batch):
        go_on.wait(60)
        return 5 * batch.inputs["x"]

    def state(name: str) -> dict:
        return next(m for m in rb.stats(versions)["models"] if m["name"] == name)

    async def asked(m: rb.Model) -> np.ndarray:
        answer = asyncio.ensure_future(ask(m))
        while not state("m@late")["slots_running"]:
            await asyncio.sleep(0.01)
        before = state("m@1")["clients"]
        alias(versions, "m", "m@1")
        eventually(lambda: state("m@1")["clients"] > before)  # the library's thread has moved
        time.sleep(0.1)  # nothing happens there
        go_on.set()
        return await answer

    with serving(late, versions):
        alias(versions, "m", "m@late")
        with rb.connect("m", socket=versions, wait=60) as m:
            assert asyncio.run(asked(m))[0] == 5


def test_a_client_follows_an_alias_although_the_broker_answers_late(versions):
    alias(versions, "m", "m@1")
    with contextlib.closing(Proxy(versions)) as slow, rb.connect("m", socket=slow.path) as m:
        assert asyncio.run(m.ainfer(ONES))[0] == 1  # from now on the library's thread follows
        slow.answers.clear()
        before = slow.connections
        alias(versions, "m", "m@3")
        eventually(lambda: slow.connections > before)  # the client attaches again
        time.sleep(0.1)  # the library's thread no longer waits for the answer
        slow.answers.set()
        assert once_moved(lambda: asyncio.run(m.ainfer(ONES[:8]))[0]) == 3


def test_a_sequence_stays_with_its_model_when_the_alias_moves(socket):
    def counter(name: str, width: int, by: int) -> rb.Worker:
        @rb.worker(name, inputs={"x": ("float32", (width,))}, outputs="y:i64[]", state="n:i64[]", wait_time=0)
        def run(batch):
            batch.state["n"] += by
            return batch.state["n"]

        return run

    with contextlib.ExitStack() as workers:
        for worker in (counter("n@1", 16, 1), counter("n@2", 16, 10), counter("n@3", 8, 100)):
            workers.enter_context(serving(worker, socket))
            alias(socket, "n", worker.model)
        alias(socket, "n", "n@1")
        with rb.connect("n", socket=socket) as m:
            first = m.sequence()
            assert first.step(ONES) == 1
            alias(socket, "n", "n@2")  # of the same signature
            eventually(lambda: m(ONES) == 10)
            assert first.step(ONES) == 2 and m.sequence().step(ONES) == 10
            alias(socket, "n", "n@3")  # of another one: a further connection
            assert once_moved(lambda: m(ONES[:8])) == 100
            third = m.sequence()
            assert third.step(ONES[:8]) == 100
            copied = third.copy()
            alias(socket, "n", "n@2")
            assert once_moved(lambda: m(ONES)) == 10
            assert first.step(ONES) == 3 and third.step(ONES[:8]) == 200
            third.close()
            assert copied.step(ONES[:8]) == 200  # a copy keeps the connection
            copied.close()
