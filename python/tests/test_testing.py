# SPDX-License-Identifier: Apache-2.0
"""ringbatch.testing, as its manual shows it, and the fake model beside a real one."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import REPOSITORY

import ringbatch as rb
from ringbatch.testing import FakeModel, running

PAGE = REPOSITORY / "docs" / "testing.md"


@pytest.mark.skipif(not PAGE.exists(), reason="no manuals here")
def test_the_manuals_tests_pass_in_a_folder_that_others_may_read(tmp_path):
    folder, temporary = tmp_path / "open", tmp_path / "t"
    folder.mkdir(0o755)
    temporary.mkdir(0o755)
    files = dict(re.findall(r"^`(\w+\.py)`:\n\n```python\n(.*?)^```$", PAGE.read_text(), re.S | re.M))
    assert len(files) == 3
    for name, text in files.items():
        (folder / name).write_text(text)
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "base")]
    p = subprocess.run(tests, cwd=folder, env={**os.environ, "TMPDIR": str(temporary)}, stdout=subprocess.PIPE, text=True, timeout=250)
    assert p.returncode == 0 and re.search(r"\b4 passed", p.stdout), p.stdout
    assert not os.listdir(temporary)


@pytest.mark.skipif(not PAGE.exists(), reason="no manuals here")
def test_the_manuals_test_in_go_is_one_of_its_package():
    (shown,) = re.findall(r"^```go\n(.*?)^```$", PAGE.read_text(), re.S | re.M)
    assert shown in (REPOSITORY / "client/ringbatchtest/ringbatchtest_test.go").read_text()


@rb.worker("m", inputs="x:f32[4] n:i64[]", outputs="y:f32[4] tags:i32[<=8]", max_batch_size=4, priorities=2)
def run(batch):
    x = batch.inputs["x"]
    assert not x.flags.writeable and batch.inputs["n"].shape == (len(batch),) and batch.rows <= 4
    if (x == 13).any():
        raise ValueError("thirteen")
    if (x == 12).any():
        batch.fail(batch.request_of(0), KeyError("twelve"))
        return None
    if (x == 11).any():
        return {"y": x}
    if (x == 10).any():
        return {"y": x, "tags": np.zeros((batch.rows, 9), "int32")}
    batch.outputs["y"][...] = x * 2
    return {"y": 0, "tags": [np.arange(n) for n in batch.inputs["n"]]}


def outcome(call, model):
    try:
        return call(model)
    except Exception as e:
        return type(e), str(e).partition("\n")[0]


x, n = np.ones(4, "float32"), np.int64(3)
CALLS = {
    "one": lambda m: m(x, n),
    "rows": lambda m: m(np.arange(36, dtype="float32").reshape(9, 4) / 100, np.full(9, 2)),
    "rows of different sizes": lambda m: m(np.ones((3, 4), "float32"), np.arange(3)),
    "by name": lambda m: m(x=x, n=n, timeout=60, priority=1),
    "a dict": lambda m: m({"x": x, "n": n}),
    "a future": lambda m: m.submit(x, n).result(60),
    "a coroutine": lambda m: asyncio.run(m.ainfer(x, n)),
    "a version": lambda m: m(x, n, version=True),
    "no split": lambda m: m(np.ones((9, 4), "float32"), np.full(9, 2), split=False),
    "a type": lambda m: m(np.ones(4), n),
    "a shape": lambda m: m(np.ones(3, "float32"), n),
    "no rows": lambda m: m(np.ones((0, 4), "float32"), np.ones(0, int)),
    "rows that disagree": lambda m: m(np.ones((2, 4), "float32"), np.ones(3, int)),
    "a name": lambda m: m(x=x, z=n),
    "a level": lambda m: m(x, n, priority=2),
    "a deadline that has passed": lambda m: m(x, n, timeout=0),
    "no duration": lambda m: m(x, n, timeout="soon"),
    "it raises": lambda m: m(x * 13, n),
    "it fails one": lambda m: m(x * 12, n),
    "it forgets an output": lambda m: m(x * 11, n),
    "it returns too much": lambda m: m(x * 10, n),
    "it raises in a future": lambda m: m.submit(x * 13, n).result(60),
    "closed": lambda m: (m.close(), m(x, n)),
}


def test_a_fake_model_answers_and_refuses_as_a_real_one():
    fake = FakeModel(run)
    with running(run), rb.connect("m") as real:
        assert (repr(fake), fake.max_batch_size, fake.name) == (repr(real), real.max_batch_size, real.name)
        for name, call in CALLS.items():
            got, want = outcome(call, fake), outcome(call, real)
            np.testing.assert_equal(got, want, name)


@rb.worker("words", inputs="text:str[<=8] n:i64[]", outputs="first:str[2,<=8] size:i32[]", max_batch_size=4)
def words(batch):
    texts = batch.inputs["text"]
    if "list" in texts:
        return {"first": texts, "size": [0] * len(texts)}
    if "in place" in texts:
        batch.outputs["first"][...] = 0
    return {"first": [[t[:1] * int(n), t] for t, n in zip(texts, batch.inputs["n"])], "size": [len(t) for t in texts]}


def test_a_fake_model_reads_and_writes_text_as_a_real_one():
    fake = FakeModel(words)
    with running(words), rb.connect("words") as real:
        for given in ("one", "", "é", ["a", "b", "", "cc", "d"], np.array(["x", "y"]), "a longer text", b"bytes", 3, ["a", ["b"]], "list", "in place"):
            n = np.ones(len(given), int) if isinstance(given, (list, np.ndarray)) else np.int64(9 if given == "one" else 1)
            got, want = (outcome(lambda m: m(given, n), m) for m in (fake, real))
            np.testing.assert_equal(got, want, str(given))


@pytest.mark.parametrize("keywords", [
    {"state": "h:f32[1]"}, {"ragged": True, "inputs": "x:f32[<=4]"}, {"packed": ["x"], "inputs": "x:f32[<=4]"}, {"memory": "device:0"},
    {"inputs": "x:f32[n<=4]", "outputs": "y:f32[n<=4]"},
], ids=lambda k: next(iter(k)))  # fmt: skip
def test_a_fake_model_refuses_a_worker_that_it_would_answer_wrongly(keywords):
    worker = rb.worker("m", **{"inputs": "x:f32[4]", "outputs": "y:f32[4]", **keywords})(lambda batch: None)
    with pytest.raises(rb.Invalid, match="no FakeModel has"):
        FakeModel(worker)


def test_a_worker_that_cannot_start_fails_the_block():
    @rb.worker("m", inputs="x:f32[4]", outputs="y:f32[4]")
    class Broken:
        def setup(self):
            raise ZeroDivisionError

        def __call__(self, batch):
            pass

    before = os.environ.get("RINGBATCH_SOCKET")
    for wrong, error, processes in ((Broken, ZeroDivisionError, 0), (3, rb.Invalid, 0), (Broken, rb.Invalid, 1)):
        with pytest.raises(error):
            with running(wrong, processes=processes):
                raise AssertionError("it began")
    assert os.environ.get("RINGBATCH_SOCKET") == before
