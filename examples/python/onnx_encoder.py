# SPDX-License-Identifier: Apache-2.0
"""An ONNX file served to texts of all lengths: pip install './python[onnx]' onnx

    python examples/python/onnx_encoder.py

Writes a small text encoder (random weights) into a temporary folder and starts a broker and
`ringbatch onnx`. Sends texts of 1..60 tokens at once and compares each answer with the result
of ONNX Runtime for that text alone, unpadded.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import ringbatch
from onnx import TensorProto, helper, numpy_helper

WORDS, WIDTH = 100, 32


def write_encoder(path: Path) -> None:
    """tokens[seq], mask[seq] -> the mean of the words' vectors where mask is 1, times a matrix."""
    rng = np.random.default_rng(0)
    weights = {"table": rng.standard_normal((WORDS, WIDTH)), "matrix": rng.standard_normal((WIDTH, 8))}
    constants = [numpy_helper.from_array(a.astype("float32"), name) for name, a in weights.items()]
    constants += [numpy_helper.from_array(np.array([n]), f"axis{n}") for n in (1, 2)]
    nodes = [
        helper.make_node("Gather", ["table", "tokens"], ["words"]),
        helper.make_node("Cast", ["mask"], ["here"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["here", "axis2"], ["column"]),
        helper.make_node("Mul", ["words", "column"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "axis1"], ["sum"], keepdims=0),
        helper.make_node("ReduceSum", ["here", "axis1"], ["count"]),
        helper.make_node("Div", ["sum", "count"], ["mean"]),
        helper.make_node("MatMul", ["mean", "matrix"], ["embedding"]),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "seq"]) for name in ("tokens", "mask")]
    outputs = [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["batch", 8])]
    graph = helper.make_graph(nodes, "encoder", inputs, outputs, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))


@contextlib.contextmanager
def running(*arguments: str):
    process = subprocess.Popen([ringbatch.binary_path(), *arguments], env={**os.environ, "PYTHON": sys.executable})
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def main(folder: str) -> None:
    file, socket = Path(folder, "encoder.onnx"), str(Path(folder, "run", "broker.sock"))
    write_encoder(file)
    rng = np.random.default_rng(1)
    texts = [rng.integers(1, WORDS, n) for n in rng.integers(1, 61, 200)]
    with (
        running("broker", "--socket", socket, "--log-level", "error"),
        running("onnx", str(file), "--dim", "seq=<=64", "--mask", "mask", "--socket", socket),
        ringbatch.connect("encoder", socket=socket, wait=60) as model,
    ):
        answers = [future.result() for future in [model.submit(text) for text in texts]]
        batches = model.stats()["batches"]
    alone = onnxruntime.InferenceSession(str(file))
    wanted = [alone.run(None, {"tokens": text[None], "mask": np.ones_like(text)[None]})[0][0] for text in texts]
    differences = [np.abs(answer - want).max() for answer, want in zip(answers, wanted)]
    print(f"{len(texts)} texts in {batches} batches, at most {max(differences):.0e} from each alone")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="rb") as folder:
        main(folder)
