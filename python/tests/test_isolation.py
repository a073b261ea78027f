# SPDX-License-Identifier: Apache-2.0
"""Functions that raise: for one poisonous input, or for every batch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import eventually, serving

import ringbatch as rb

POISON = 13.0

SERVER = """
import os, pathlib, sys, time
import ringbatch as rb

broken = pathlib.Path(sys.argv[0]).with_name(f"broken-{os.getpid()}")

@rb.worker("fragile", inputs={"x": ("float32", (4,))}, outputs={"y": ("float32", (4,))}, max_batch_size=8, wait_time=0.001)
def run(batch):
    if broken.exists():
        raise RuntimeError("the context is lost")
    if (batch.inputs["x"] == 13).any():
        raise ValueError("thirteen")
    time.sleep(0.002)
    return batch.inputs["x"] + 1

run.run(wait=60) if sys.argv[1:] else rb.serve(run, processes=2)
"""

PIPELINE = """
import ringbatch as rb

@rb.worker("add", inputs={"x": ("int64", ())}, outputs={"a": ("int64", ())}, max_batch_size=16, wait_time=0.02)
def add(batch):
    return batch.inputs["x"] + 1

@rb.worker("double", inputs={"a": ("int64", ())}, outputs={"y": ("int64", ())}, max_batch_size=16, wait_time=0.02)
def double(batch):
    if (batch.inputs["a"] == 14).any():
        raise ValueError("fourteen")
    return batch.inputs["a"] * 2

rb.pipeline("two", [add, double], processes=[1, 2])
"""

MORTAL = """
import os, sys
import ringbatch as rb

@rb.worker("mortal", inputs={"x": ("float32", ())}, outputs={"y": ("float32", ())}, max_batch_size=1, run_once=True)
def mortal(batch):
    with open(sys.argv[1], "a") as f:
        f.write("run\\n")
    os._exit(3)

mortal.run(wait=60)
"""


def workers_of(socket: str) -> list[dict]:
    return rb.stats(socket=socket)["models"][0]["workers"]


class Crowd:
    """Clients that send without a pause, each its own numbers, some of them poison."""

    def __init__(self, socket: str, clients: int, poison: float, texts: tuple[str, ...] = ("ValueError: thirteen",)) -> None:
        self._texts = texts  # that poison may get
        self.answers, self.poisoned, self.wrong = 0, 0, []
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(socket, i, poison)) for i in range(clients)]
        for t in self._threads:
            t.start()

    def _run(self, socket: str, seed: int, poison: float) -> None:
        rng = np.random.default_rng(seed)
        with rb.connect("fragile", socket=socket, wait=60, window=4) as m:
            while not self._stop.is_set():
                x = np.full(4, POISON if rng.random() < poison else rng.integers(100, 200), "float32")
                try:
                    y = m(x)
                    right = x[0] != POISON and (y == x + 1).all()
                except rb.Failed as e:
                    right = x[0] == POISON and str(e).startswith(self._texts)
                    y = e
                with self._lock:
                    self.answers += 1
                    self.poisoned += x[0] == POISON
                    if not right:
                        self.wrong.append((x[0], y))

    def wait_for(self, answers: int) -> None:
        upto = self.answers + answers
        eventually(lambda: self.answers >= upto or self.wrong)

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for t in self._threads:
            t.join(60)
        assert not self.wrong, self.wrong[:3]


@pytest.fixture
def script(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    path = folder / "server.py"
    path.write_text(SERVER)
    monkeypatch.setenv("RINGBATCH_SOCKET", str(folder / "b.sock"))
    return path


def serve(script, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, str(script), *arguments], stderr=subprocess.DEVNULL)


def end(p: subprocess.Popen) -> None:
    p.send_signal(signal.SIGTERM)
    p.wait(60)


def test_a_served_worker_that_begins_to_raise_is_replaced_and_fails_nobody(script):
    socket = os.environ["RINGBATCH_SOCKET"]
    p = serve(script)
    try:
        with rb.connect("fragile", socket=socket, wait=60):
            eventually(lambda: len(workers_of(socket)) == 2)
        # A poisonous request may be tried by the broken worker last.
        with Crowd(socket, clients=6, poison=0.02, texts=("ValueError: thirteen", "RuntimeError: the context is lost")) as crowd:
            crowd.wait_for(300)
            broken = workers_of(socket)[0]["pid"]
            script.with_name(f"broken-{broken}").touch()
            eventually(lambda: (len(now := {w["pid"] for w in workers_of(socket)}) == 2 and broken not in now) or crowd.wrong)
            crowd.wait_for(300)
            told = rb.stats(socket=socket)["models"][0]
        assert told["workers_suspended"] == 1 and told["isolated"] > 0
    finally:
        end(p)


def test_a_worker_of_its_own_is_suspended_and_proves_itself(socket, script, monkeypatch):
    monkeypatch.setenv("RINGBATCH_SOCKET", socket)
    workers = [serve(script, "alone") for _ in range(2)]
    mark = script.with_name(f"broken-{workers[0].pid}")

    def told() -> dict:
        return next(m for m in rb.stats(socket=socket)["models"] if m["name"] == "fragile")

    try:
        with rb.connect("fragile", socket=socket, wait=60):
            eventually(lambda: len(told()["workers"]) == 2)
        with Crowd(socket, clients=6, poison=0) as crowd:
            crowd.wait_for(100)
            mark.touch()
            eventually(lambda: "suspended" in {w["state"] for w in told()["workers"]} or crowd.wrong)
            crowd.wait_for(100)
            mark.unlink()
            ran = {w["pid"]: w["batches"] for w in told()["workers"]}
            eventually(lambda: all(w["batches"] > ran[w["pid"]] + 10 for w in told()["workers"]) or crowd.wrong)
    finally:
        for p in workers:
            end(p)


def test_only_the_poison_fails_and_no_worker_is_suspended(script):
    socket = os.environ["RINGBATCH_SOCKET"]
    p = serve(script)
    try:
        with Crowd(socket, clients=12, poison=0.1) as crowd:
            crowd.wait_for(1000)
            told = rb.stats(socket=socket)["models"][0]
        assert crowd.poisoned > 0 and told["isolated"] > 0 and told["workers_suspended"] == 0
    finally:
        end(p)


def test_a_stage_runs_the_neighbours_of_poison_again(tmp_path):
    tmp_path.chmod(0o700)
    script, socket = tmp_path / "server.py", str(tmp_path / "b.sock")
    script.write_text(PIPELINE)

    def lines() -> dict:
        return {m["name"]: m for m in rb.stats(socket=socket)["models"]}

    p = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "RINGBATCH_SOCKET": socket}, stderr=subprocess.DEVNULL)
    try:
        with rb.connect("two", socket=socket, wait=60, window=16) as m:
            eventually(lambda: len(lines()["two/double"]["workers"]) == 2)
            futures = [m.submit(np.int64(i)) for i in range(16)]
            for i, f in enumerate(futures):
                if i == 13:
                    with pytest.raises(rb.Failed, match="ValueError: fourteen"):
                        f.result(60)
                else:
                    assert f.result(60) == 2 * (i + 1)
        told = lines()
        assert told["two/double"]["isolated"] > 0 and told["two/add"]["isolated"] == 0
    finally:
        end(p)


def test_a_request_of_a_run_once_worker_that_dies_is_not_run_again(socket, tmp_path):
    script, runs = tmp_path / "server.py", tmp_path / "runs"
    script.write_text(MORTAL)
    env = {**os.environ, "RINGBATCH_SOCKET": socket}
    workers = [subprocess.Popen([sys.executable, str(script), str(runs)], env=env) for _ in range(2)]
    try:
        with rb.connect("mortal", socket=socket, wait=60) as m, pytest.raises(rb.WorkerDied):
            m(np.float32(1))
        assert runs.read_text() == "run\n"
    finally:
        for p in workers:
            p.kill()
            p.wait(60)


def test_run_once_fails_the_whole_batch_at_once(socket):
    runs = []

    @rb.worker("once", inputs={"x": ("float32", ())}, outputs={"y": ("float32", ())}, max_batch_size=4, wait_time=0.05, run_once=True)
    def once(batch):
        runs.append(batch.rows)
        raise ValueError("not again")

    with serving(once, socket), rb.connect("once", socket=socket, wait=60, window=4) as m:
        futures = [m.submit(np.float32(i)) for i in range(4)]
        for f in futures:
            with pytest.raises(rb.Failed, match="ValueError: not again"):
                f.result(60)
    assert sum(runs) == 4
