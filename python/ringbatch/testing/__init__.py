# SPDX-License-Identifier: Apache-2.0
"""For tests of applications: a broker and workers of the test, and a model without a broker. docs/testing.md is the manual.

::

    pytest_plugins = ["ringbatch.testing"]  # in conftest.py

    def test_an_answer(ringbatch_serve):
        ringbatch_serve(net)                # a worker of your program; it ends with the test
        with rb.connect("net") as model:
            assert model(x).shape == (10,)
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from .. import errors
from ..serve.supervisor import serve_all
from ..serve.targets import Served, describe
from ..worker.signals import StopEvent
from .fake import FakeModel

__all__ = ["FakeModel", "running"]


@contextlib.contextmanager
def running(*workers: Served, processes: int = 0, socket: str | os.PathLike[str] | None = None) -> Iterator[str]:
    """Serves models until the block ends, and yields the broker's socket, which is also $RINGBATCH_SOCKET meanwhile.

    The models are ready when the block begins. Its broker is another process, and its folder is private and goes at the end.

    processes: of each worker, as ``serve`` starts them: tests may kill them. 0 runs the workers in threads of this process:
        a worker may then be a local function of the test.
    socket: the broker's; the workers join a broker that runs there already.
    """
    for w in workers if processes else ():
        if describe(w, 0)[0] != "module":
            raise errors.Invalid(f"processes={processes}: they import {w!r}, so define it at the top of a module; or leave processes=0")
    with contextlib.ExitStack() as stack:
        if socket is None:
            # Not pytest's tmp_path: other users may be able to read it, and its path may be too long for a socket.
            socket = os.path.join(stack.enter_context(tempfile.TemporaryDirectory(prefix="rb")), "b.sock")
        at = os.path.abspath(os.fspath(socket))
        stack.enter_context(_environment("RINGBATCH_SOCKET", at))
        stop, ready, failures = StopEvent(), threading.Event(), list[BaseException]()

        def serve() -> None:
            try:
                serve_all(workers, processes, at, True, None, None, until=(stop, ready.set))
            except BaseException as e:
                failures.append(e)
            ready.set()

        thread = threading.Thread(target=serve, name="ringbatch.testing")
        thread.start()
        try:
            ready.wait()
            if not failures:
                yield at
        finally:
            stop.set()
            thread.join()
        if failures:
            raise failures[0]


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


try:
    import pytest
except ModuleNotFoundError:
    pass  # unittest uses running()
else:

    @pytest.fixture
    def ringbatch_serve() -> Iterator[Any]:
        """Serves workers until the test ends: ``ringbatch_serve(net)``, ``ringbatch_serve(net, processes=2)``. It returns the
        broker's socket. All workers of a test share a broker."""
        with contextlib.ExitStack() as stack:
            at: list[str] = []

            def serve(*workers: Served, processes: int = 0) -> str:
                at.append(stack.enter_context(running(*workers, processes=processes, socket=at[0] if at else None)))
                return at[0]

            yield serve
