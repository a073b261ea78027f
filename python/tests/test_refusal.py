# SPDX-License-Identifier: Apache-2.0
"""A refusal of a worker ends serve only at the first start, before the worker has served."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from conftest import broker_at, program, serving

import ringbatch as rb
from ringbatch.worker import refusal


@pytest.fixture
def refusals():
    with contextlib.closing(refusal.Refusals()) as r:
        yield r


def says(at: str, code: str = "print(refusal.refused('no good'))") -> str:
    """Runs code as a worker process; returns its output."""
    command = [sys.executable, "-c", f"import os\nfrom ringbatch.worker import refusal\n{code}"]
    return subprocess.check_output(command, env={**os.environ, refusal.TOLD_AT: at}, text=True).strip()


def test_the_refusal_of_a_process_arrives_once(refusals):
    assert not refusals.take()
    assert says(refusals.path) == "True"
    assert [r.text for r in refusals.take()] == ["no good"] and not refusals.take()


def test_a_refusal_that_comes_while_others_are_read_is_not_lost(refusals, monkeypatch):
    says(refusals.path)
    read = os.pread

    def and_another_comes(fd, size, at):
        monkeypatch.undo()
        told = read(fd, size, at)
        says(refusals.path, "refusal.refused('neither')")
        return told

    monkeypatch.setattr(os, "pread", and_another_comes)
    assert [[r.text for r in refusals.take()] for _ in range(3)] == [["no good"], ["neither"], []]


def test_a_half_written_refusal_is_read_when_it_is_whole(refusals):
    os.write(refusals._fd, b'["", "no good"]\n["", "nei')
    assert [r.text for r in refusals.take()] == ["no good"]
    os.write(refusals._fd, b'ther"]\n')
    assert [r.text for r in refusals.take()] == ["neither"]


def test_after_very_many_refusals_workers_print_their_own(refusals, monkeypatch):
    monkeypatch.setattr(refusal, "_MOST_BYTES", 1)
    assert says(refusals.path) == "True" and len(refusals.take()) == 1
    assert says(refusals.path) == "False" and not refusals.take()


def test_after_the_start_workers_print_their_own_refusals(refusals):
    refusals.end()
    assert says(refusals.path) == "False" and not refusals.take()
    assert os.readlink(refusals.path.partition(":")[0]).startswith("/memfd:")  # the descriptor stays taken


def test_a_refusal_is_not_written_to_another_file_with_the_same_descriptor(tmp_path):
    refusals = refusal.Refusals()
    fd = refusals._fd
    refusals.close()
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    os.dup2(file, fd)
    try:
        assert says(refusals.path) == "False" and not os.fstat(file).st_size
    finally:
        os.close(file)
        if fd != file:
            os.close(fd)


def test_children_of_a_worker_and_workers_that_have_served_refuse_nothing(refusals):
    assert says(refusals.path, f"print(os.environ.get({refusal.TOLD_AT!r}))") == "None"
    assert says(refusals.path, "refusal.attached(); print(refusal.refused('no good'))") == "False"


def test_a_gpu_that_is_not_there_may_come():
    assert rb.NoGPU not in refusal.LASTING and rb.Invalid in refusal.LASTING


@rb.worker("served", inputs={"x": ("float32", (2,))}, outputs={"y": ("float32", (2,))})
def served(batch):
    batch.outputs["y"][...] = batch.inputs["x"]


def test_a_worker_that_has_attached_has_served(socket, refusals, monkeypatch):
    monkeypatch.setattr(refusal, "_told_at", refusals.path)
    with serving(served, socket), rb.connect("served", socket=socket, wait=60) as m:
        m(np.zeros(2, "float32"))
        assert not refusal.refused("no good") and [r.text for r in refusals.take()] == [""]


SAID = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

ONE_OF_TWO = """
import os, sys, time
import ringbatch as rb

def one():
    if os.path.exists("moved"):
        raise rb.Invalid("the weights are being moved")
    with open("pid", "w") as f:
        f.write(str(os.getpid()))
    return rb.worker("one", inputs={"x": ("float32", (2,))}, outputs={"y": ("float32", (2,))})(lambda batch: batch.inputs["x"])

def other():
    while not os.path.exists("loaded"):
        time.sleep(0.01)
    return rb.worker("other", inputs={"x": ("float32", (2,))}, outputs={"y": ("float32", (2,))})(lambda batch: batch.inputs["x"])

if __name__ == "__main__":
    rb.serve([one, other], socket=sys.argv[1])
"""


@pytest.mark.parametrize("guest", [False, True])
def test_a_worker_that_has_served_does_not_end_workers_that_still_start(tmp_path, at, env, guest):
    """The worker is killed, and refuses from then on."""
    (tmp_path / "served.py").write_text(ONE_OF_TWO)
    with broker_at(at) if guest else contextlib.nullcontext(), program(env, "served.py", at, cwd=tmp_path, **SAID) as p:
        with rb.connect("one", socket=at, wait=60) as one:
            one(np.zeros(2, "float32"))
        (tmp_path / "moved").touch()
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        said = next((line for line in p.stdout if "the weights are being moved" in line), "serve has ended")
        assert "start" in said and "again" in said and p.poll() is None
        (tmp_path / "loaded").touch()
        rb.connect("other", socket=at, wait=60).close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("serve rows alone (--max-batch-size=1) or anything (--no-check)", "serve rows alone (max_batch_size=1) or anything (check=False)"),
        ("want --dim seq='<=512', --mask NAME or --task embed", 'want dims={"seq": \'<=512\'}, mask=NAME or task="embed"'),
        ("models--bert-base/a--b: --allow-pickle loads it", "models--bert-base/a--b: allow_pickle loads it"),
    ],
)
def test_errors_and_notes_name_arguments_to_callers_in_python(text, said, capsys):
    def serve():
        refusal.note(text)
        raise rb.Invalid(text)

    for function, want in ((serve, text), (refusal.for_python(serve), said)):
        with pytest.raises(rb.Invalid) as e:
            function()
        assert str(e.value) == want and capsys.readouterr().err == f"note: {want}\n"


NOT_YET = """
import os

def f(x):
    if not os.path.exists("tried"):
        open("tried", "w").close()
        raise ConnectionError("the feature store is not up yet")
    return x
"""


@pytest.mark.parametrize("guest", [False, True])
def test_a_passing_error_at_the_start_is_tried_again(tmp_path, at, env, guest):
    (tmp_path / "served.py").write_text(NOT_YET)
    command = ["-m", "ringbatch.serve.serve_cli", "served:f", "--input", "x:f32[2]", "--no-costs"]
    with broker_at(at) if guest else contextlib.nullcontext(), program(env, *command, cwd=tmp_path, **SAID) as p:
        said = ""
        for line in p.stdout:
            said += line
            if "serving f:" in line:
                break
        assert "served:f: ConnectionError: the feature store is not up yet" in said and "serving f:" in said
