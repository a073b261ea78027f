# SPDX-License-Identifier: Apache-2.0
"""``ringbatch serve TARGET``: by file type, with lines to try."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import broker_at, free_port, serving

import ringbatch as rb
from ringbatch.serve import gateway
from ringbatch.serve import object_cli as objects
from ringbatch.serve import serve_cli as cli
from ringbatch.worker.import_path import name_of


def pickled(path, thing):
    path.write_bytes(pickle.dumps(thing))
    path.chmod(0o600)
    return str(path)


def test_a_pickled_function_is_served_with_lines_that_work_and_a_cost_table(tmp_path):
    file, port = pickled(tmp_path / "plus.pkl", functools.partial(np.add, np.float32(1))), free_port()
    env = {**os.environ, "RINGBATCH_SOCKET": str(tmp_path / "b.sock"), "PYTHON": sys.executable}
    command = [rb.binary_path(), "serve", file, "--input", "x:f32[3]", "--max-batch-size", "4", "--http", str(port)]
    p = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    try:
        said: dict[str, str] = {}
        for line in p.stdout:
            name, _, rest = line.partition(": ")
            said[name] = rest.strip()
            if line.startswith("one worker busy"):
                break
        python = said["python"].replace("python3", sys.executable, 1)
        assert subprocess.check_output(python, shell=True, env=env, text=True).strip() == "[1. 1. 1.]"
        if shutil.which("curl"):
            answer = json.loads(subprocess.check_output("curl -sS " + said["curl"].removeprefix("curl "), shell=True, text=True))
            assert answer["outputs"][0]["data"] == [1, 1, 1]
    finally:
        p.send_signal(signal.SIGINT)
        p.stdout.read()
        assert p.wait(60) == 0


def test_the_type_of_a_file_says_how_it_is_served(tmp_path):
    for name, kind in (("a.pt", "torch"), ("a.PT2", "torch"), ("a.onnx", "onnx"), ("a.joblib", "object"), ("a.pkl", "object")):
        (tmp_path / name).touch()
        assert cli.kind_of(str(tmp_path / name)) == kind
    assert cli.kind_of("package.module:factory") == "object" and name_of("package.module:factory") == "factory"
    for wrong, says in (("a.txt", "want a file that ends in"), (str(tmp_path / "none.pt2"), "no such file"), (":f", "want a file")):
        with pytest.raises(rb.Invalid, match=says):
            cli.kind_of(wrong)


@pytest.mark.parametrize(
    ("target", "flags", "says", "guest"),
    [
        ("nope:f", [], "nope:f: No module named 'nope'", False),
        ("wrong:two", [], r"wrong:two: given x:f32\[2\], rows of zeros, it raises TypeError: two\(\) .*", False),
        ("wrong:one", ["--max-batch-size=many"], "wrong:one: max_batch_size=many: .*", True),
        ("wrong.pkl", [], r".*wrong\.pkl cannot be loaded: .*", True),
    ],
)
def test_a_wrong_target_ends_serve_at_the_first_start_with_one_sentence(tmp_path, target, flags, says, guest):
    (tmp_path / "wrong.py").write_text("def one(a):\n    return a\n\n\ndef two(a, b):\n    return a\n")
    (tmp_path / "wrong.pkl").write_bytes(b"no pickle")
    (tmp_path / "wrong.pkl").chmod(0o600)
    socket = str(tmp_path / "s" / "b.sock")
    command = [sys.executable, "-m", "ringbatch.serve.serve_cli", target, "--input", "x:f32[2]", "--socket", socket, *flags]
    with broker_at(socket) if guest else contextlib.nullcontext():
        p = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    last = p.stderr.splitlines()[-1]
    assert p.returncode == 1 and re.fullmatch(f"ringbatch serve: ({says})", last), p.stderr
    assert "times" not in last


class Estimator:
    """An estimator like those of scikit-learn."""

    n_features_in_ = 2

    def predict(self, x):
        return x.sum(1).astype("int64")

    def predict_proba(self, x):
        return np.stack([x[:, 0], 1 - x[:, 0]], 1).astype("float64")


class Small(Estimator):
    """One that was fitted in float32."""

    def __init__(self):
        self.coef_ = np.ones(2, "float32")


def two(a, b):
    return a - b, (a * b).sum(1)


@pytest.mark.parametrize(
    ("name", "thing", "flags", "signature", "inputs", "want"),
    [
        ("labels", Estimator(), [], "x:f64[2] -> y:i64[]", [[1, 2]], 3),
        ("probabilities", Estimator(), ["--method", "predict_proba"], "x:f64[2] -> y:f64[2]", [[1, 2]], [1, 0]),
        ("small", Small(), [], "x:f32[2] -> y:i64[]", [[1, 2]], 3),
        ("swapped", two, ["--input", "b:f32[2]", "--input", "a:f32[2]"], "b:f32[2] a:f32[2] -> y0:f32[2] y1:f32[]", [[1, 2], [3, 4]],
            {"y0": [2, 2], "y1": 11}),
        ("ordered", two, ["--input", "p:f32[2]", "--input", "q:f32[2]", "--args", "q,p"], "p:f32[2] q:f32[2] -> y0:f32[2] y1:f32[]",
            [[1, 2], [3, 4]], {"y0": [2, 2], "y1": 11}),
        ("two", two, ["--input", "a:f32[2]", "--input", "b:f32[2]"], "a:f32[2] b:f32[2] -> y0:f32[2] y1:f32[]", [[1, 2], [3, 4]],
            {"y0": [-2, -2], "y1": 11}),
    ],
)
def test_answers_equal_the_results_of_estimators_and_functions(socket, name, thing, flags, signature, inputs, want):
    a, settings = objects.flags.parse(objects.parser(), ["m:thing", "--name", name, *flags])
    worker = objects.worker_for(thing, a, settings)
    assert worker.signature == signature
    with serving(worker, socket), rb.connect(worker.model, socket=socket, wait=60) as m:
        got = m(*(np.array(x, t.dtype) for x, t in zip(inputs, m.inputs)))
    if isinstance(want, dict):
        assert {k: v.tolist() for k, v in got.items()} == want
    else:
        assert got.tolist() == want


async def coroutine(x):
    return x


@rb.worker("decorated", inputs={"x": ("float32", (2,))}, outputs={"y": ("float32", (2,))})
def decorated(batch):
    return batch.inputs["x"]


@pytest.mark.parametrize(
    ("thing", "flags", "says"),
    [
        (lambda x: x.sum(), ["--input", "x:f32[2]"], "rows went in"),
        (lambda x: np.array(["yes"] * len(x)), ["--input", "x:f32[2]"], "no tensor's type"),
        (lambda x, y: x, ["--input", "a:f32[2]", "--input", "y:f32[2]"], "takes x, y; the inputs are a, y: .* order, --args a,y"),
        (lambda x, y=0, **dropped: x, ["--input", "x:f32[2]", "--input", "z:f32[2]"], "takes x, y; the inputs are x, z"),
        (lambda x: x, [], "does not tell its inputs"),
        (lambda x: x, ["--input", "x:f32[<=3]"], "do not vary"),
        (lambda x: x, ["--input", "x:f32[2]", "--method", "guess"], "no method 'guess'"),
        (3, ["--input", "x:f32[2]"], "cannot be served"),
        (lambda x: x - x.mean(0), ["--input", "x:f32[2]"], "depend on one another"),
        (lambda x: x, ["--input", "x:f32[2]", "--output", "y:f32[3]"], r"shape \(1, 2\) came out, not \(1, 3\)"),
        (lambda x: {"a": x}, ["--input", "x:f32[2]", "--output", "b:f32[2]"], "the model gives a by name, and b are declared"),
        (coroutine, ["--input", "x:f32[2]"], "decorate it with @ringbatch.worker"),
        (decorated, ["--input", "x:f32[2]", "--max-batch-size=4"], "leave --input, --max-batch-size away"),
    ],
)
def test_a_wrong_target_is_refused_before_serving(thing, flags, says):
    a, settings = objects.flags.parse(objects.parser(), ["m:thing", *flags])
    with pytest.raises(rb.Invalid, match=says):
        objects.worker_for(thing, a, settings)


def halved(x):
    x /= 2
    return x.sum(1)


def no_zeros(x):
    if not x.any():
        raise ValueError("a row of zeros has no direction")
    return x


def test_unusual_functions_are_served():
    for thing, output in ((halved, []), (no_zeros, ["--output", "y:f32[2]"]), (lambda x: [r for r in x], ["--output", "y:f32[<=2]"])):
        a, settings = objects.flags.parse(objects.parser(), ["m:thing", "--input", "x:f32[2]", *output])
        assert objects.worker_for(thing, a, settings).signature.startswith("x:f32[2] -> y:f32[")


def test_a_function_that_writes_into_its_arrays_writes_into_copies(socket):
    a, settings = objects.flags.parse(objects.parser(), ["m:halved", "--input", "x:f32[2]"])
    worker = objects.worker_for(halved, a, settings)
    with serving(worker, socket), rb.connect(worker.model, socket=socket, wait=60) as m:
        assert m(np.full((3, 2), 4, "float32")).tolist() == [4, 4, 4]


def test_rows_that_depend_on_one_another_are_served_on_request():
    for flags in (["--no-check"], ["--max-batch-size=1"]):
        a, settings = objects.flags.parse(objects.parser(), ["m:thing", "--input", "x:f32[2]", *flags])
        assert objects.worker_for(lambda x: x - x.mean(0), a, settings).signature == "x:f32[2] -> y:f32[2]"


def test_a_wrong_port_is_refused_before_the_start():
    assert [gateway._address(given) for given in (None, 8000, "8000", "0.0.0.0:1")] == ["off", "127.0.0.1:8000", "127.0.0.1:8000",
        "0.0.0.0:1"]
    with pytest.raises(rb.Invalid, match="99999 is no port"):
        gateway._address("99999")


def test_large_inputs_are_made_by_the_line_and_small_ones_shown():
    assert '"data":[0,0]' in cli.curl_line("m", [("x", "f32", [2])], "8000")
    large = cli.curl_line("m", [("x", "u8", [3, 224, 224])], "8000")
    made = subprocess.check_output(large.removeprefix("curl: ").split(" | ")[0].replace("python3", sys.executable, 1), shell=True)
    assert len(json.loads(made)["inputs"][0]["data"]) == 3 * 224 * 224


@pytest.mark.parametrize("name", ["serve", "torch", "onnx"])
def test_the_command_has_the_help_of_the_python_parser(name):
    text = importlib.import_module(f"ringbatch.serve.{name}_cli").parser().format_help()
    file = Path(__file__).parents[2] / "cmd" / "ringbatch" / "help" / f"{name}.txt"
    assert file.read_text() == text, f"python3 -m ringbatch.serve.{name}_cli --help >{file}"
    told = subprocess.check_output([rb.binary_path(), name, "--help"], env={"PATH": "/nonexistent"}, text=True)
    assert told == text


def test_tensors_in_device_memory_get_a_line_too():
    assert cli._spec("x:f16[3,<=224]@device:0") == ("x", "f16", [3, 1])
