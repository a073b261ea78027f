# SPDX-License-Identifier: Apache-2.0
"""State of PyTorch modules and ONNX files: answers equal those of the model in one process, also if workers are killed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import broker_at, eventually, serving, until_stopped

import ringbatch as rb

LSTM = """
import torch

torch.manual_seed(1)
CELL, HEAD = torch.nn.LSTMCell(4, 8), torch.nn.Linear(8, 3)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = CELL, HEAD

    def forward(self, x, h, c):
        h, c = self.cell(x, (h, c))
        return self.head(h), h, c
"""
X = np.random.default_rng(3).standard_normal((40, 4, 4), "float32")  # steps, sequences, features


def lstm(x: np.ndarray) -> list[np.ndarray]:
    """The answers of the module in this process."""
    torch = pytest.importorskip("torch")
    names: dict = {}
    exec(LSTM, names)
    h = c = torch.zeros(x.shape[1], 8)
    answers = []
    with torch.no_grad():
        for row in torch.from_numpy(x):
            y, h, c = names["Net"]()(row, h, c)
            answers.append(y.numpy())
    return answers


def gru(file: str, x: np.ndarray) -> list[np.ndarray]:
    session, h, answers = pytest.importorskip("onnxruntime").InferenceSession(file), np.zeros((x.shape[1], 8), "float32"), []
    for row in x:
        y, h = session.run(["y", "h_out"], {"x": row, "h_in": h})
        answers.append(y)
    return answers


def workers(socket: str) -> list[int]:
    """The worker processes of a served model."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = line.read_bytes().split(b"\0")
            if socket.encode() in words and any(w in words for w in (b"ringbatch.serve.torch_cli", b"ringbatch.serve.onnx_cli")):
                found.append(int(line.parent.name))
    return found


@pytest.mark.parametrize("kind", ["torch", "onnx"])
def test_a_recurrent_model_goes_on_where_its_killed_worker_was(kind, at, tmp_path):
    if kind == "torch":
        want = lstm(X)
        (tmp_path / "tiny.py").write_text(LSTM)
        flags = ["--kind", kind, "tiny:Net", "--input", "x:f32[4]", "--state", "h:f32[8]", "--state", "c:f32[8]"]
    else:
        pytest.importorskip("onnx")
        import graphs

        file = graphs.gru(tmp_path / "tiny.onnx")
        want, flags = gru(file, X), [file, "--state", "h=h_in:h_out", "--threads", "1"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "ringbatch.serve.serve_cli", *flags]
    command += ["--name", "tiny", "--processes", "2", "--socket", at, "--no-costs"]
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as server:
        try:
            eventually(lambda: len(workers(at)) == 2)
            with rb.connect("tiny", socket=at, wait=120) as model, model.sequence() as one, model.sequence(rows=3) as three:
                check(model, one, three, want, at)
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0


def check(model, one, three, want, at) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for t, x in enumerate(X):
            killed = workers(at) if t == 20 else []
            for pid in killed:
                os.kill(pid, signal.SIGSTOP)
            steps = pool.submit(one.step, x[0]), pool.submit(three.step, x[1:])
            if killed:
                time.sleep(0.3)  # the steps are with the workers now
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            np.testing.assert_allclose(np.vstack([steps[0].result(200)[None], steps[1].result(200)]), want[t], atol=1e-5)
    one.reset()
    three.reset([1])
    again = one.step(X[0, 0]), three.step(X[0, 1:])
    np.testing.assert_allclose([again[0], again[1][1]], want[0][[0, 2]], atol=1e-5)
    assert not np.allclose(again[1][0], want[0][1], atol=1e-3)
    np.testing.assert_allclose(model(X[0]), want[0], atol=1e-5)  # without a sequence


@pytest.mark.parametrize(
    "how", ["module", "dict", "dict without declarations", "script", "exported", "exported by name", "bfloat16", "varying"])  # fmt: skip
def test_kinds_of_modules_keep_state(how, at):
    torch, rt = pytest.importorskip("torch"), pytest.importorskip("ringbatch.torch")
    from ringbatch.torch.loading import inputs_of

    class Sums(torch.nn.Module):
        def forward(self, x, n, total):
            return total + x.sum(1, keepdim=True), n + 1, total + x.sum(1, keepdim=True)

    def by_name(x, n, total):
        return dict(zip(("total", "y", "n"), (total + x.sum(1, keepdim=True), total + x.sum(1, keepdim=True), n + 1)))

    module, options = Sums(), {"inputs": ["x:f32[3]"], "state": {"n": ("int64", ()), "total": ("float32", (1,))}}
    if how == "dict":
        module, options["outputs"] = by_name, ["y:f32[1]"]
    elif how == "dict without declarations":
        module = by_name
    elif how == "script":
        module = torch.jit.script(module)
    elif how.startswith("exported"):
        free, named = {0: torch.export.Dim("rows")}, {"n": torch.ones(2, dtype=torch.int64), "total": torch.ones(2, 1)}
        given = ((torch.ones(2, 3),), named) if how == "exported by name" else ((torch.ones(2, 3), *named.values()), {})
        module = torch.export.export(module, *given, dynamic_shapes={"x": free, "n": free, "total": free}).module()
        assert inputs_of("m.pt2", ["x:f32[3]", "n:i64[]", "total:f32[1]"], None, ["n:i64[]", "total:f32[1]"]) == ["x:f32[3]"]
    elif how == "varying":
        options["inputs"] = ["x:f32[<=3]"]
    with broker_at(at), until_stopped(rt.serve, module, "sums", socket=at, dtype=torch.bfloat16 if how == "bfloat16" else None, **options):
        with rb.connect("sums", socket=at, wait=60) as model, model.sequence(rows=2) as seq:
            for t in range(1, 6):
                assert seq.step(np.ones((2, 3), "float32")).tolist() == [[3 * t]] * 2
            assert seq.state("n").tolist() == [5, 5] and seq.state("total").tolist() == [[15], [15]]


STATE = ["memory:f32[0,2]", "left:f32[2]", "kept:f8e4m3fn[2]"]


@pytest.mark.parametrize("how", ["module", "script", "numpy"])
def test_an_empty_state_is_an_array_of_its_shape(how, at):
    """As torchaudio's Emformer has one, whose memory may have a size of 0."""
    torch, rt = pytest.importorskip("torch"), pytest.importorskip("ringbatch.torch")
    kept = np.array([[1, 2], [0.5, 448]], pytest.importorskip("ml_dtypes").float8_e4m3fn)

    class Emformer(torch.nn.Module):
        def forward(self, x, memory, left, kept):
            left = torch.cat([memory, left[:, None], x[:, None]], 1).sum(1)
            return left, memory, left, kept

    @rb.worker("numpy", inputs="x:f32[2]", outputs="y:f32[2]", state=STATE)
    def counted(batch):
        parts = batch.state["memory"], batch.state["left"][:, None], batch.inputs["x"][:, None]
        left = batch.state["left"] = np.concatenate(parts, 1).sum(1)
        batch.state["kept"] = batch.state["kept"]
        if batch.fresh[0]:  # nobody has to write nothing
            batch.state["memory"] = np.empty((batch.rows, 0, 2), "float32")
        return left

    module = torch.jit.script(Emformer()) if how == "script" else Emformer()
    with broker_at(at), serving(counted, at) if how == "numpy" else until_stopped(
            rt.serve, module, how, socket=at, inputs=["x:f32[2]"], state=STATE):  # fmt: skip
        with rb.connect(how, socket=at, wait=60) as model, model.sequence(rows=2) as seq:
            x = np.array([[1, 2], [3, 4]], "float32")
            seq.set_state(kept=kept, memory=np.zeros((2, 0, 2), "float32"))
            for t in range(1, 4):
                assert seq.step(x).tolist() == (t * x).tolist()
            assert seq.state("memory").shape == (2, 0, 2) and seq.state("left").tolist() == (3 * x).tolist()
            assert seq.state("kept").tobytes() == kept.tobytes()
            with seq.copy() as other:
                assert other.step(x).tolist() == (4 * x).tolist()


TORCH_ERRORS = {
    "the module has no argument 'h': it takes x": lambda x: (x, x),
    "the model returns 1 tensor: want its outputs, and then the new state, 'h'": lambda x, h: x,
    r"state h:f32\[8\]: the module returns rows of torch.float32 \[4\] in its place": lambda x, h: (h, x),
    r"state h:f32\[8\]: the module returns rows of torch.int64 \[8\] in its place": lambda x, h: (x, h.long()),
}


@pytest.mark.parametrize("says", TORCH_ERRORS)
def test_a_module_that_does_not_keep_its_state_is_refused_by_name(says):
    rt = pytest.importorskip("ringbatch.torch")
    with pytest.raises(rb.Invalid, match=says):
        rt.serve(TORCH_ERRORS[says], "wrong", inputs=["x:f32[4]"], state=["h:f32[8]"])


def test_a_dict_without_the_state_and_a_name_used_twice_are_refused():
    rt = pytest.importorskip("ringbatch.torch")
    tensors = {"inputs": ["x:f32[4]"], "outputs": ["y:f32[4]"]}
    with pytest.raises(rb.Invalid, match="the model returns y, and not the new state 'h'"):
        rt.serve(lambda x, h: {"y": x}, "wrong", **tensors, state=["h:f32[8]"])
    with pytest.raises(rb.Invalid, match="the model returns 3 tensors: want y, and then the new state, 'h'"):
        rt.serve(lambda x, h: (x, h, h), "wrong", **tensors, state=["h:f32[8]"])
    with pytest.raises(rb.Invalid, match="state 'x' has the name of an input"):
        rt.serve(lambda x: x, "wrong", **tensors, state=["x:f32[4]"])


@pytest.mark.parametrize(("pair", "says"), [
    (("h", "h_out"), "state s=h:h_out: the graph has no input 'h'; it has h_in, x"),
    (("h_in", "new"), "state s=h_in:new: the graph has no output 'new'; it has h_out, y"),
    (("x", "h_out"), r"state s: the graph reads f32\[batch,4\] from 'x' and writes f32\[batch,8\] to 'h_out': both have one"),
])  # fmt: skip
def test_a_graph_without_the_named_state_is_refused(tmp_path, pair, says):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    import graphs

    from ringbatch.onnx import serve

    with pytest.raises(rb.Invalid, match=says):
        serve(graphs.gru(tmp_path / "m.onnx"), "wrong", state={"s": pair}, threads=1)
