# SPDX-License-Identifier: Apache-2.0
"""Threads that interleave on one connection."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import threading

import numpy as np
import pytest
import ringbatch as rb
from ringbatch.binding import paths
from ringbatch.client.request import claim

over_ctypes = pytest.mark.skipif(paths.quick is not None, reason="of the way over ctypes: RINGBATCH_CTYPES=1")

x = np.arange(16, dtype="float32")


@pytest.fixture
def core(echo):
    """A connection whose ended requests only the test collects."""
    with rb.connect("echo", socket=echo, window=16) as m:
        m._core.lib.rb_client_fd(m._core.handle, ctypes.addressof(ctypes.c_int()))
        yield m._core


def submit(core, waiters: dict) -> int:
    """Sends x, and forgets the object of its request."""
    request = claim(core, None, None)
    request.inputs["x"][...] = x
    return request.detach_into(waiters, object(), 0)


@over_ctypes
def test_two_threads_that_collect_at_once_get_each_request_once(core):
    request = submit(core, {})
    core.wait(request, 0)
    lib, both_have = core._lib, threading.Barrier(2)

    class Library:
        """Returns after both threads have called it."""

        def rb_reap(self, *args: int) -> int:
            status = lib.rb_reap(*args)
            both_have.wait(60)
            return status

    ended: tuple[list[int], list[int]] = [], []
    core._lib = Library()
    try:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            assert list(pool.map(core._reap_into, ended)) == [True, True]
    finally:
        core._lib = lib
    assert ended[0] + ended[1] == [request]


@over_ctypes
def test_a_sweep_does_not_release_a_submitted_request(core):
    looked, handed_on = threading.Event(), threading.Event()

    class Owed(dict):
        def items(self):
            now = list(super().items())
            looked.set()
            assert handed_on.wait(60)
            return now

    class Waiters(dict):
        """Starts a sweep in another thread while the request is detached."""

        def __setitem__(self, request, waiter):
            super().__setitem__(request, waiter)
            sweeper.start()
            assert looked.wait(60)

    core.owed = Owed(core.owed)
    sweeper = threading.Thread(target=core.sweep)
    request = submit(core, Waiters())
    handed_on.set()
    sweeper.join()
    core.wait(request, 0)  # not Released
    assert (core.collect(request, -1)[0] == x).all()


def test_a_loop_is_watched_after_an_exception_in_its_first_call(echo, monkeypatch):
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    async def twice(model: rb.Model) -> np.ndarray:
        with monkeypatch.context() as m, pytest.raises(Interrupted):
            m.setattr(asyncio.get_running_loop(), "add_reader", interrupt)
            await model.ainfer(x)
        return await asyncio.wait_for(model.ainfer(x), 60)

    with rb.connect("echo", socket=echo) as model:
        assert (asyncio.run(twice(model)) == x).all()
