# SPDX-License-Identifier: Apache-2.0
"""A forked child attaches for itself and does not disturb its parent."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import eventually, python

import ringbatch as rb

CHILD = """
    import asyncio, threading, traceback
    def child_works(m, req=None, view=None):
        def refused(f):
            try:
                f()
                return False
            except rb.Forked:
                return True
        ok = True
        if req is not None:          # the parent's request and views are refused; plain arrays read zeros
            plain = np.ndarray(16, "float32", buffer=memory[0])
            ok = refused(req.commit) and refused(lambda: view[0]) and refused(lambda: view.sum())
            ok = ok and "over" in repr(view) and not plain.any()
            req.release()
        ok = ok and (m(x) == x).all() and (m.submit(x).result(60) == x).all()
        with m.request() as own:
            own.inputs["x"][...] = x
            ok = ok and (own.run().outputs["y"] == x).all()
        async def several():
            return await asyncio.gather(*(m.ainfer(x) for _ in range(20)))
        ok = ok and all((y == x).all() for y in asyncio.run(several()))
        m.close()
        return ok
    def forked(f):
        pid = os.fork()
        if pid == 0:
            ok = False
            try:
                ok = f()
            except BaseException:
                traceback.print_exc()
            os._exit(0 if ok else 1)
        return os.waitpid(pid, 0)[1] == 0
"""


def test_a_child_of_a_connected_parent_attaches_for_itself(echo):
    code = """
    m = rb.connect("echo")
    assert (m(x) == x).all() and (m.submit(x).result(60) == x).all()
    with m.request() as req:
        view = req.inputs["x"]
        view[...] = x
        memory = [np.asarray(view)]
        for _ in range(20):
            assert forked(lambda: child_works(m, req, view))
        assert (view == x).all()
        assert (req.run().outputs["y"] == x).all()   # the parent's request is untouched
    assert (m(x) == x).all()
    print("ok")
    """
    assert python(CHILD + code, socket=echo) == "ok"


def test_fork_from_a_thread_while_others_wait(echo):
    """Other threads are inside the library, waiting and sending, at the moment of the fork."""
    code = """
    m = rb.connect("echo", window=32)
    stop = False
    def use():
        while not stop:
            m(x)
            m.submit(x).result(60)
    threads = [threading.Thread(target=use) for _ in range(4)]
    for t in threads:
        t.start()
    for _ in range(20):
        assert forked(lambda: child_works(m))
    stop = True
    for t in threads:
        t.join(60)
    assert (m(x) == x).all()
    print("ok")
    """
    assert python(CHILD + code, socket=echo) == "ok"


def test_many_forks_leave_nothing_behind(echo):
    """Grandchildren too; the parent keeps its descriptors, its window and its answers."""
    code = """
    def grandchild():
        return (m(x) == x).all() and forked(lambda: (m(x) == x).all())
    m = rb.connect("echo", window=1)
    m(x)
    before = len(os.listdir("/proc/self/fd"))
    for n in range(200):
        assert forked(grandchild if n % 10 == 0 else lambda: (m(x) == x).all())
        assert (m(x) == x).all()
    end = time.monotonic() + 60
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < end:
        time.sleep(0.005)
    assert len(os.listdir("/proc/self/fd")) <= before
    print("ok")
    """
    assert python(CHILD + code, socket=echo) == "ok"
    eventually(lambda: not any(m["clients"] for m in rb.stats(echo)["models"]))


def test_closing_in_the_parent_ends_its_session_while_a_child_lives(echo):
    code = """
        m = rb.connect("echo", name="the-parent")
        m(x)
        r, w = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(w)
            os.read(r, 1)            # lives on without using the connection
            os._exit(0)
        m.close()
        deadline = time.monotonic() + 60
        clients = lambda: sum(m["clients"] for m in rb.stats()["models"])
        while clients() and time.monotonic() < deadline:
            time.sleep(0.01)
        print(clients())
        os.close(w)
        assert os.waitpid(pid, 0)[1] == 0
    """
    assert python(code, socket=echo) == "0"


def test_a_child_that_simply_ends_leaves_the_parent_alone(echo):
    code = """
        m = rb.connect("echo")
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                sys.exit(0)          # destructors run
            assert os.waitpid(pid, 0)[1] == 0
            assert (m(x) == x).all()
        print("ok")
    """
    assert python(code, socket=echo) == "ok"


MULTIPROCESSING = """
import os, sys
import multiprocessing as mp
import numpy as np
import ringbatch as rb

x = np.arange(16, dtype="float32")

def work(i):
    with rb.connect("echo") as m:
        return float(m(x + i)[0])

def fork_after_connect(queue):
    with rb.connect("echo") as m:
        queue.put("connected" if m(x)[1] == 1 else "wrong")

if __name__ == "__main__":
    method = sys.argv[1]
    context = mp.get_context(method)
    with context.Pool(4) as pool:
        assert pool.map(work, range(12)) == list(range(12))
    m = rb.connect("echo")
    queue = context.Queue()
    p = context.Process(target=fork_after_connect, args=(queue,))
    p.start()
    print(queue.get(timeout=60))
    p.join(60)
    assert p.exitcode == 0 and m(x)[1] == 1
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing(echo, tmp_path, method):
    script = tmp_path / "producers.py"
    script.write_text(MULTIPROCESSING)
    p = subprocess.run(
        [sys.executable, str(script), method], env={**os.environ, "RINGBATCH_SOCKET": echo}, capture_output=True, text=True, timeout=200
    )
    assert p.returncode == 0 and p.stdout.split()[-1] == "connected", p.stdout + p.stderr
