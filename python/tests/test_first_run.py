# SPDX-License-Identifier: Apache-2.0
"""The first hour: waiting, ready lines, early refusals, and one notation for tensors and durations."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import socket as sockets
import subprocess
import sys
import textwrap
import time
from datetime import timedelta

import numpy as np
import pytest
from conftest import broker_at, eventually, in_threads, program, serving

import ringbatch as rb
from ringbatch.binding.library import seconds
from ringbatch.binding.tensors import declared, signature
from ringbatch.serve import flags
from ringbatch.worker import refusal

ONE = {"inputs": "x:f32[4]", "outputs": "y:f32[4]"}
SCRIPT = """
import ringbatch as rb

def make():
    @rb.worker("triple", inputs=["x:f32[4]"], outputs={"y": "f32[4]"})
    def triple(batch):
        return 3 * batch.inputs["x"]
    return triple

@rb.worker("double", inputs={"x": ("float32", (4,))}, outputs="y:f32[4]")
def double(batch):
    return 2 * batch.inputs["x"]

if __name__ == "__main__":
    import sys
    rb.serve([double, make], processes=[int(n) for n in sys.argv[1:]])
"""


def server(tmp_path, env, *arguments, script=SCRIPT):
    (tmp_path / "server.py").write_text(script)
    return program(env, tmp_path / "server.py", *arguments, how=signal.SIGINT, stderr=subprocess.PIPE, text=True)


def ready_lines(p):
    """Reads to the second line, since there are two models."""
    lines = (line.strip() for line in p.stderr if " is ready: " in line)
    return [next(lines), next(lines)]


@pytest.mark.parametrize("processes", [("1", "1"), ("0", "1")])
def test_serve_says_that_its_models_are_ready_and_how_to_call_them(tmp_path, at, env, processes):
    with server(tmp_path, env, *processes) as p:
        assert sorted(ready_lines(p)) == ['double is ready: rb.connect("double")', 'triple is ready: rb.connect("triple")']
        with rb.connect("double", socket=at) as m:
            assert (m(np.ones(4, "float32")) == 2).all()


def test_a_second_serve_says_that_it_joined_the_broker(tmp_path, at, env):
    with server(tmp_path, env, "1", "1") as first:
        ready_lines(first)
        with server(tmp_path, env, "1", "1") as second:
            assert all(line.endswith(f"(joined the broker that already runs at {at})") for line in ready_lines(second))


def test_serve_refuses_a_taken_port_before_it_starts_anything(tmp_path, at, env):
    script = SCRIPT.replace("rb.serve([double, make], processes=[int(n) for n in sys.argv[1:]])", "rb.serve(double, http=int(sys.argv[1]))")
    (tmp_path / "server.py").write_text(script)
    with sockets.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = subprocess.run([sys.executable, tmp_path / "server.py", port], env=env, stderr=subprocess.PIPE, text=True, timeout=100).stderr
    assert f"port {port} is taken; choose another with http=PORT" in said.splitlines()[-1] and "broker listening" not in said


def test_connect_waits_for_a_model_that_is_still_starting(at):
    assert inspect.signature(rb.connect).parameters["wait"].default == 10.0
    answers = []

    def call():
        with rb.connect("late", socket=at) as m:
            answers.append(m(np.ones(4, "float32")))

    @rb.worker("late", **ONE)
    def late(batch):
        return batch.inputs["x"]

    with in_threads(call):
        time.sleep(0.1)
        with broker_at(at), serving(late, at):
            eventually(lambda: answers)


def test_a_pipeline_refuses_wrong_settings():
    @rb.worker("s", **ONE)
    def stage(batch):
        return batch.inputs["x"]

    with pytest.raises(rb.Invalid, match="did you mean max_window"):
        rb.pipeline("p", [stage], max_windw=3)


@pytest.fixture
def idle(at):
    """A model without workers."""
    with broker_at(at, "--model", "m", "--input", "x:f32[4]", "--output", "y:f32[4]"), rb.connect("m", socket=at) as m:
        yield m


@pytest.mark.parametrize("given", [0.0015, "1.5ms", "1500us", "0.0015", timedelta(microseconds=1500)])
def test_durations_are_written_in_one_way_everywhere(given, idle):
    assert seconds(given) == pytest.approx(0.0015)
    worker = rb.worker("m", **ONE, wait_time=given)(lambda batch: None)
    assert worker._options.policy in (f"wait_time={given}".encode(), b"wait_time=0.0015")
    with pytest.raises(rb.Expired):
        idle(np.zeros(4, "float32"), timeout=given)


def test_every_call_takes_durations_as_texts(idle, at):
    assert seconds("1m30s") == 90 and seconds("2h") == 7200 and seconds(timedelta(minutes=1)) == 60
    x = np.zeros((3, 4), "float32")
    many = np.zeros((40, 4), "float32")  # several requests
    calls = [
        lambda: idle(x, timeout="20ms"), lambda: idle(many, timeout="20ms"), lambda: idle.submit(x, timeout="20ms").result(),
        lambda: asyncio.run(idle.ainfer(x, timeout="20ms")), lambda: idle.request().run("20ms"), lambda: idle.request().run(timeout="20ms"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(rb.Expired):
            call()
    assert rb.stats(at, timeout=timedelta(seconds=60))["models"]
    with pytest.raises(rb.UnknownModel):
        rb.connect("nothing", socket=at, wait="20ms")
    with rb.connect("m", socket=at, retry="1s", wait=timedelta(seconds=60)) as again, pytest.raises(rb.Expired):
        again(x, timeout="20ms")


@pytest.mark.parametrize(
    "given",
    [
        {"x": ("float32", (3, "<=224")), "m": ("bool", ())},
        {"x": "f32[3,<=224]", "m": "bool[]"},
        {"x": "float32[3, <=224]", "m": ("bool", ())},
        ["x:f32[3,<=224]", "m:bool[]"],
        "x:f32[3,<=224] m:bool[]",
    ],
)
def test_tensors_are_declared_in_either_notation(given):
    assert signature(given, given) == "x:f32[3,<=224] m:bool[] -> x:f32[3,<=224] m:bool[]"
    assert [str(t) for t in declared(given)] == ["x:f32[3,<=224]", "m:bool[]"]


def test_memory_is_said_for_a_model_or_for_a_tensor():
    both = {"x": ("float16", (3,), "device:1")}, ["x:f16[3]@device:1"]
    assert {signature(given, "y:f32[1]@host", "device:0") for given in both} == {"x:f16[3]@device:1 -> y:f32[1]"}
    assert signature("x:f16[3]", "y:f32[1]", "device:0") == "x:f16[3]@device:0 -> y:f32[1]@device:0"
    with pytest.raises(rb.Invalid, match="memory='gpu': want 'host', 'device' or 'device:0'"):
        rb.worker("m", **ONE, memory="gpu")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["x"], "expected name:dtype"), (["x:f32"], "expected name:dtype"), (["x:f33[1]"], "f33"), (["x:f32[a]"], "dimension 'a'"),
        (["x:u16[1]"], "u16"), (["x:f32[1]@moon"], "memory='moon'"), ({"x": ("float31", (4,))}, "float31"),
        ({"x": ("float32", ("many",))}, "many"), ({"x": "float32"}, "expected"), ({"x": ("uint16", (4,))}, "uint16"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_refused_by_the_decorator(given, says):
    with pytest.raises(rb.Invalid, match=says):
        rb.worker("m", inputs=given, outputs="y:f32[1]")


def test_the_exceptions_that_callers_catch_are_on_top():
    listed = [name for name in dir(rb) if isinstance(getattr(rb, name), type) and issubclass(getattr(rb, name), rb.Error)]
    assert len(listed) < 20 and {"Error", "Expired", "Failed", "Overloaded", "QueueFull", "NoBroker"} < set(listed)
    assert len(rb.errors.__all__) > 40
    for name in rb.errors.__all__:
        assert getattr(rb, name) is getattr(rb.errors, name)
    with pytest.raises(AttributeError):
        rb.Expird  # noqa: B018


def test_a_missing_package_is_installed_from_a_clone(capsys):
    assert flags.say_missing("torch", ModuleNotFoundError("No module named 'torch'")) == 1
    said = capsys.readouterr().err
    assert "pip install './python[torch]' in a clone of ringbatch" in said and "ERROR" not in said


def test_errors_of_a_supervised_worker_have_their_level(capsys, monkeypatch):
    monkeypatch.setenv("RINGBATCH_WORKER_NAME", "double-0")
    refusal.report("ringbatch torch", "m.pt2", OSError("no such file"), "OSError: no such file")
    assert capsys.readouterr().err == "ERROR ringbatch torch: OSError: no such file\n"


def test_worker_processes_share_the_cores(tmp_path, at, env):
    script = """
        import os, sys
        import ringbatch as rb

        @rb.worker("threads", inputs="x:i32[]", outputs="y:i32[]")
        def threads(batch):
            return batch.inputs["x"] * 0 + int(os.environ["OMP_NUM_THREADS"])

        if __name__ == "__main__":
            rb.serve(threads, processes=2)
    """
    env.pop("OMP_NUM_THREADS", None)
    with server(tmp_path, env, script=textwrap.dedent(script)), rb.connect("threads", socket=at) as m:
        assert m(np.zeros((), "int32")) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_a_module_that_fails_with_its_inputs_is_refused_at_the_first_start(tmp_path):
    torch = pytest.importorskip("torch")
    torch.jit.script(torch.nn.Linear(4, 2)).save(str(tmp_path / "m.jit"))
    for more in ([], ["--output", "y:f32[2]", "--no-check"]):
        command = [sys.executable, "-m", "ringbatch", "serve", str(tmp_path / "m.jit"), "--input", "x:f32[3]", "--no-costs", *more]
        p = subprocess.run([*command, "--socket", str(tmp_path / "b.sock")], capture_output=True, text=True, timeout=100)
        assert p.returncode == 1 and p.stderr.count("worker process started") == 1, p.stderr
        said = p.stderr.splitlines()[-1]
        assert "the module fails with rows of x:f32[3]: RuntimeError: " in said and "mat1 and mat2 shapes cannot be multiplied" in said
        assert "Does --input give the type and shape of one row" in said
