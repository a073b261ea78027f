# SPDX-License-Identifier: Apache-2.0
"""The first hour: waiting, ready lines, early refusals, and one notation for tensors and durations."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta

import numpy as np
import pytest
from conftest import broker_at, in_threads

import ringbatch as rb
from ringbatch.binding.library import seconds
from ringbatch.binding.tensors import declared, parse, signature
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


def serving(tmp_path, at, *arguments):
    (tmp_path / "server.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "server.py"), *arguments]
    return subprocess.Popen(command, env={**os.environ, "RINGBATCH_SOCKET": at}, stderr=subprocess.PIPE, text=True)


def ready_lines(p):
    """Reads to the second line, since there are two models."""
    lines = (line.strip() for line in p.stderr if " is ready: " in line)
    return [next(lines), next(lines)]


def end(p):
    p.send_signal(signal.SIGINT)
    p.stderr.read()
    assert p.wait(60) == 0
    p.stderr.close()


@pytest.mark.parametrize("processes", [("1", "1"), ("0", "1"), ("0", "0")])
def test_serve_says_that_its_models_are_ready_and_how_to_call_them(tmp_path, at, processes):
    p = serving(tmp_path, at, *processes)
    assert sorted(ready_lines(p)) == ['double is ready: rb.connect("double")', 'triple is ready: rb.connect("triple")']
    with rb.connect("double", socket=at) as m:
        assert (m(np.ones(4, "float32")) == 2).all()
    end(p)


def test_a_second_serve_says_that_it_joined_the_broker(tmp_path, at):
    first = serving(tmp_path, at, "1", "1")
    ready_lines(first)
    second = serving(tmp_path, at, "1", "1")
    assert all(line.endswith(f"(joined the broker that already runs at {at})") for line in ready_lines(second))
    end(second)
    end(first)


def test_connect_waits_for_a_model_that_is_still_starting(at):
    assert inspect.signature(rb.connect).parameters["wait"].default == 10.0
    answers = []

    def call():
        with rb.connect("late", socket=at) as m:
            answers.append(m(np.ones(4, "float32")))

    @rb.worker("late", **ONE)
    def late(batch):
        return batch.inputs["x"]

    stop = threading.Event()
    with in_threads(call):
        time.sleep(0.1)
        with broker_at(at), in_threads(lambda: late.run(socket=at, stop=stop)):
            while not answers:
                time.sleep(0.01)
            stop.set()


def test_connect_without_patience_fails_at_once(at):
    began = time.monotonic()
    with pytest.raises(rb.NoBroker):
        rb.connect("m", socket=at, wait=0)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_batchsize": 32}, r'unknown key "max_batchsize" \(did you mean max_batch_size\?\); known are ageing, '),
        ({"wait_time": "5 ms"}, r'"5 ms" is not a duration: .* \(did you mean 5ms\?\), or auto'),
        ({"lease": "soon"}, 'lease=soon: "soon" is not a duration'),
        ({"lease": -1}, "lease=-1: must not be negative"),
        ({"max_batch_size": "many"}, "max_batch_size=many: must be a number"),
        ({"ragged": "perhaps"}, "must be true or false"),
        ({"no_worker": "ignore"}, "must be wait or refuse"),
        ({"preferred_batch_sizes": ["a"]}, "must be numbers, like 8,16,32"),
        ({"max_queue": {1: "x"}}, "max_queue.1=x: must be a number"),
    ],
)
def test_the_decorator_refuses_wrong_settings(settings, says):
    with pytest.raises(rb.Invalid, match=says):
        rb.worker("m", **ONE, **settings)


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


def test_a_tensor_names_its_memory_in_either_notation():
    both = {"x": ("float16", (3,), "device:1")}, ["x:f16[3]@device:1"]
    assert {signature(given, "y:f32[1]@host", "device:0") for given in both} == {"x:f16[3]@device:1 -> y:f32[1]"}
    assert signature("x:f16[3]", "y:f32[1]", "device:0") == "x:f16[3]@device:0 -> y:f32[1]@device:0"


@pytest.mark.parametrize("text", ["x", "x:f32", "x:f33[1]", "x:f32[a]", "x:u16[1]", "x:f32[1]@moon"])
def test_wrong_tensors_are_refused_by_the_decorator(text):
    with pytest.raises(rb.Invalid, match=r"tensor|memory"):
        parse(text)
    with pytest.raises(rb.Invalid):
        rb.worker("m", inputs=[text], outputs="y:f32[1]")


def test_model_is_the_served_name_in_every_module():
    onnx = pytest.importorskip("ringbatch.onnx")
    assert [*inspect.signature(onnx.serve).parameters][:2] == ["file", "model"]
    for call in (rb.worker, rb.connect):
        assert next(iter(inspect.signature(call).parameters)) == "model"


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


def test_worker_processes_share_the_cores(tmp_path, at):
    script = """
        import os, sys
        import ringbatch as rb

        @rb.worker("threads", inputs="x:i32[]", outputs="y:i32[]")
        def threads(batch):
            return batch.inputs["x"] * 0 + int(os.environ["OMP_NUM_THREADS"])

        if __name__ == "__main__":
            rb.serve(threads, processes=2)
    """
    (tmp_path / "threads.py").write_text(textwrap.dedent(script))
    env = {**os.environ, "RINGBATCH_SOCKET": at}
    env.pop("OMP_NUM_THREADS", None)
    p = subprocess.Popen([sys.executable, str(tmp_path / "threads.py")], env=env, stderr=subprocess.PIPE, text=True)
    next(line for line in p.stderr if " is ready: " in line)
    with rb.connect("threads", socket=at) as m:
        assert m(np.zeros((), "int32")) == max(1, len(os.sched_getaffinity(0)) // 2)
    end(p)


def test_a_module_that_fails_with_its_inputs_is_refused_at_the_first_start(tmp_path):
    torch = pytest.importorskip("torch")
    torch.jit.script(torch.nn.Linear(4, 2)).save(str(tmp_path / "m.jit"))
    for more in ([], ["--output", "y:f32[2]", "--no_check"]):
        command = [sys.executable, "-m", "ringbatch", "serve", str(tmp_path / "m.jit"), "--input", "x:f32[3]", "--no_costs", *more]
        p = subprocess.run([*command, "--socket", str(tmp_path / "b.sock")], capture_output=True, text=True, timeout=100)
        assert p.returncode == 1 and p.stderr.count("worker process started") == 1, p.stderr
        said = p.stderr.splitlines()[-1]
        assert "the module fails with rows of x:f32[3]: RuntimeError: " in said and "mat1 and mat2 shapes cannot be multiplied" in said
        assert "Does --input give the type and shape of one row" in said
