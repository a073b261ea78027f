"""A forked child gets a clean error at once, never a hang; one that connects afresh works."""

from __future__ import annotations

import pytest
from conftest import python


def test_import_does_not_load_the_library(echo):
    assert python("print(any('libringbatch' in line for line in open('/proc/self/maps')))", socket=echo) == "False"


def test_a_parent_that_never_connected_forks_freely(echo):
    code = """
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                with rb.connect("echo") as m:
                    os._exit(0 if (m(x) == x).all() else 1)
            assert os.waitpid(pid, 0)[1] == 0
        print("ok")
    """
    assert python(code, socket=echo) == "ok"


GUARD = """
    import asyncio, threading
    def child_finds_clean_errors(m, req=None, view=None):
        def clean(f):
            best = 1.0
            for _ in range(5):       # a busy machine may stop any process for a while
                start = time.perf_counter()
                try:
                    f()
                    return False
                except rb.ForkedClient:
                    best = min(best, time.perf_counter() - start)
            return best < 0.010
        def with_loop():
            asyncio.run(m.ainfer(x))
        uses = [lambda: m(x), lambda: m.request(), lambda: m.submit(x), lambda: rb.connect("echo"), m.mapping, rb.stats]
        ok = all([clean(f) for f in uses])
        try:
            with_loop()
            ok = False
        except rb.ForkedClient:
            pass
        if req is not None:
            ok = ok and clean(req.commit) and clean(lambda: view[0]) and clean(lambda: view.sum()) and "over" in repr(view)
            req.release()
        m.close()
        return ok
"""


@pytest.mark.parametrize("rounds", [30])
def test_fork_with_the_library_loaded(echo, rounds):
    code = (
        GUARD
        + f"""
    m = rb.connect("echo")
    with m.request() as req:
        view = req.inputs["x"]
        for _ in range({rounds}):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if child_finds_clean_errors(m, req, view) else 1)
            assert os.waitpid(pid, 0)[1] == 0
        view[...] = x
        assert (req.run().outputs["y"] == x).all()   # the parent's own was not touched
    assert (m(x) == x).all()
    print("ok")
    """
    )
    assert python(code, socket=echo) == "ok"


def test_fork_with_the_library_in_use(echo):
    """Other threads are inside the library, waiting and sending, at the moment of the fork."""
    code = (
        GUARD
        + """
    m = rb.connect("echo", window=32)
    stop = False
    def use():
        while not stop:
            m(x)
            m.submit(x).result(10)
    threads = [threading.Thread(target=use) for _ in range(4)]
    for t in threads:
        t.start()
    for _ in range(50):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if child_finds_clean_errors(m) else 1)
        assert os.waitpid(pid, 0)[1] == 0
    stop = True
    for t in threads:
        t.join(20)
    assert (m(x) == x).all()
    print("ok")
    """
    )
    assert python(code, socket=echo) == "ok"


def test_a_child_that_simply_ends_leaves_the_parent_alone(echo):
    code = """
        m = rb.connect("echo")
        for _ in range(10):
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
    try:
        rb.connect("echo")
        queue.put("connected")
    except rb.ForkedClient as e:
        queue.put("forked")

if __name__ == "__main__":
    method = sys.argv[1]
    context = mp.get_context(method)
    with context.Pool(4) as pool:
        assert pool.map(work, range(12)) == list(range(12))
    rb.connect("echo")
    queue = context.Queue()
    p = context.Process(target=fork_after_connect, args=(queue,))
    p.start()
    print(queue.get(timeout=20))
    p.join(20)
    assert p.exitcode == 0
"""


@pytest.mark.parametrize("method, after", [("fork", "forked"), ("spawn", "connected"), ("forkserver", "connected")])
def test_multiprocessing(echo, tmp_path, method, after):
    import os
    import subprocess
    import sys

    script = tmp_path / "producers.py"
    script.write_text(MULTIPROCESSING)
    p = subprocess.run(
        [sys.executable, str(script), method], env={**os.environ, "RINGBATCH_SOCKET": echo}, capture_output=True, text=True, timeout=60
    )
    assert p.returncode == 0 and p.stdout.split()[-1] == after, p.stdout + p.stderr


def test_loader_pattern(echo):
    """Like a DataLoader: a dataset object that connects in whichever worker process uses it."""
    code = """
        import multiprocessing as mp
        class Dataset:
            def __init__(self):
                self._model, self._pid = None, None
            def __getitem__(self, i):
                if self._pid != os.getpid():
                    self._model, self._pid = rb.connect("echo"), os.getpid()
                return self._model(x + i)
        def worker(dataset, tasks, results):
            while True:
                i = tasks.get()
                if i is None:
                    return
                results.put((i, float(dataset[i][0])))
        dataset = Dataset()
        context = mp.get_context("fork")
        tasks, results = context.Queue(), context.Queue()
        workers = [context.Process(target=worker, args=(dataset, tasks, results)) for _ in range(4)]
        for w in workers:
            w.start()
        for i in range(40):
            tasks.put(i)
        got = sorted(results.get(timeout=20) for _ in range(40))
        for _ in workers:
            tasks.put(None)
        for w in workers:
            w.join(20)
            assert w.exitcode == 0
        assert got == [(i, float(i)) for i in range(40)]
        print("ok")
    """
    assert python(code, socket=echo) == "ok"
