# SPDX-License-Identifier: Apache-2.0
"""Functions that raise: for one poisonous input, or for every batch. broker/engine tests the rules without Python."""

from __future__ import annotations

import contextlib
import subprocess

import numpy as np
import pytest
from conftest import Load, eventually, program, serving

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

rb.serve(run, processes=2)
"""


def sends(m: rb.Model, seed: int):
    """A call with random numbers, sometimes with poison."""
    rng = np.random.default_rng(seed)

    def call() -> None:
        x = np.full(4, POISON if rng.random() < 0.02 else rng.integers(100, 200), "float32")
        try:
            y = m(x)
            assert x[0] != POISON and (y == x + 1).all(), (x, y)
        except rb.Failed as e:  # the broken worker may be the last to try a poisonous request
            assert x[0] == POISON and str(e).startswith(("ValueError: thirteen", "RuntimeError: the context is lost"))

    return call


def test_a_served_worker_that_begins_to_raise_is_replaced_and_fails_no_other_request(tmp_path, at, env):
    (script := tmp_path / "server.py").write_text(SERVER)

    def stats() -> dict:
        return rb.stats(socket=at)["models"][0]

    def pids() -> set[int]:
        return {w["pid"] for w in stats()["workers"]}

    with program(env, script, stderr=subprocess.DEVNULL), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(rb.connect("fragile", socket=at, wait=60, window=4)) for _ in range(6)]
        eventually(lambda: len(pids()) == 2)
        with Load(*(sends(m, seed) for seed, m in enumerate(clients))) as load:
            load.wait_for_answers(300)
            assert stats()["isolated"] > 0 and stats()["workers_suspended"] == 0
            broken = min(pids())
            script.with_name(f"broken-{broken}").touch()
            load.wait_for(lambda: len(now := pids()) == 2 and broken not in now)
            load.wait_for_answers(300)
        assert stats()["workers_suspended"] == 1


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
