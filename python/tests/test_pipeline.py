# SPDX-License-Identifier: Apache-2.0
"""Pipelines: functions in several processes over one ring."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import REPOSITORY, eventually, program

import ringbatch as rb

SERVER = """
import os
import numpy as np
import ringbatch as rb

TOTAL = {"total": ("int64", ()), "pid": ("int64", ())}

@rb.worker("sum", inputs={"data": ("uint8", ("<=64",))}, outputs=TOTAL, ragged=True, max_batch_size=4)
def total(batch):
    batch.outputs["pid"][...] = os.getpid()
    for i, row in enumerate(batch.inputs["data"]):
        batch.outputs["total"][i] = int(np.asarray(row, np.int64).sum())

@rb.worker("square", inputs={"total": ("int64", ())}, outputs={"squared": ("int64", ())}, max_batch_size=16)
def square(batch):
    if (batch.inputs["total"] == 13).any():
        raise ValueError("thirteen")
    if (batch.inputs["total"] == 66).any():
        os._exit(3)
    return batch.inputs["total"] ** 2

@rb.worker("spread", inputs={"squared": ("int64", ()), "pid": ("int64", ())}, outputs={"y": ("int64", ("<=4",)), "pids": ("int64", (2,))})
def spread(batch):
    ys = [np.full(v % 5, v) for v in batch.inputs["squared"]]
    return {"y": ys, "pids": np.stack([batch.inputs["pid"], np.full(batch.rows, os.getpid())], axis=1)}

rb.pipeline("sums", [total, square, spread], processes=[1, 2, 1], outputs=["total", "y", "pids"])
"""


@pytest.fixture
def pipeline(tmp_path, at, env):
    (tmp_path / "server.py").write_text(SERVER)
    with program(env, tmp_path / "server.py"):
        yield at


def lines(socket: str) -> dict:
    return {m["name"]: m for m in rb.stats(socket)["models"]}


def test_a_request_passes_python_stages_in_several_processes(pipeline):
    with rb.connect("sums", socket=pipeline, wait=60, window=16) as model:
        futures = [(n, model.submit(bytes([1]) * n)) for n in (0, 1, 3, 20, 64)]
        for n, f in futures:
            out = f.result(60)
            assert out["total"] == n and list(out["y"]) == [n * n] * (n * n % 5)
        assert out["pids"][0] != out["pids"][1]
        with pytest.raises(rb.Failed, match="thirteen"):
            model(bytes([13]))
        with pytest.raises(rb.WorkerDied):  # ends one worker of the stage after the other
            model(bytes([66]))
        assert model(bytes([2]))["total"] == 2
        with pytest.raises(rb.TooLarge):
            model.request(rows=5)  # more than the smallest batch of a stage
    # The worker answers the client, and the broker counts a moment later.
    eventually(lambda: lines(pipeline)["sums/spread"]["ended"] == {"OK": 6})
    eventually(lambda: lines(pipeline)["sums/square"]["ended"] == {"OK": 6, "Failed": 1, "WorkerDied": 1})
    told = lines(pipeline)
    assert told["sums"]["stages"] == ["sums/sum", "sums/square", "sums/spread"]
    assert told["sums/sum"]["requeued"] == 0 and told["sums/square"]["requeued"] > 0


def test_a_pipeline_that_does_not_fit_together_is_refused():
    with pytest.raises(rb.Invalid, match="decorated"):
        rb.pipeline("p", [lambda b: b])
    one = rb.worker("one", inputs={"x": ("int64", ())}, outputs={"y": ("int64", ())})(lambda b: None)
    with pytest.raises(rb.Invalid, match="no stage writes 'z'"):
        rb.pipeline("p", [one], outputs=["z"])


def test_a_stage_cannot_change_an_input_that_a_later_one_reads(env):
    """Stages in threads of one process."""
    script = """
import ringbatch as rb
import threading, os, signal
spec = ("int64", (4,))
@rb.worker("one", inputs={"x": spec}, outputs={"h": spec})
def one(batch):
    x = batch.inputs["x"]
    try:
        x -= 100
    except ValueError:
        return x
two = rb.worker("two", inputs={"x": spec, "h": spec}, outputs={"y": spec})(lambda b: b.inputs["x"] + b.inputs["h"])
def ask():
    with rb.connect("p", wait=60) as m:
        print(m([1, 2, 3, 4]).tolist(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=ask).start()
rb.pipeline("p", [one, two], processes=0)
"""
    done = subprocess.run([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, timeout=200)
    assert done.returncode == 0 and json.loads(done.stdout) == [2, 4, 6, 8]


def test_the_example_decodes_pictures_and_finds_their_classes(tmp_path, env):
    example = REPOSITORY / "examples" / "python" / "image_pipeline.py"
    if not example.exists():
        pytest.skip("no examples here")
    image = pytest.importorskip("PIL.Image")
    names = []
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 255, (90 + 10 * i, 120, 3)).astype(np.uint8)
        names.append(str(tmp_path / f"{i}.jpg"))
        image.fromarray(pixels).save(names[-1])
    (tmp_path / "none.jpg").write_bytes(b"no picture")
    with program(env, example):
        out = subprocess.check_output([sys.executable, str(example), *names, str(tmp_path / "none.jpg")], env=env, text=True, timeout=200)
    lines = out.splitlines()
    assert all(re.fullmatch(rf"{re.escape(n)}( \d+){{5}}", line) for n, line in zip(names, lines)) and len(set(lines[:3])) == 3
    assert "no picture: " in lines[3]
