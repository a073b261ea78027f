# SPDX-License-Identifier: Apache-2.0
"""Small ONNX models, made here: real graphs with random weights."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper


def save(path, nodes, inputs, outputs, constants=None, opset: int = 17) -> str:
    """inputs, outputs: name to (type, dims); constants: name to array."""
    graph = h.make_graph(
        nodes, "g",
        [h.make_tensor_value_info(n, t, dims) for n, (t, dims) in inputs.items()],
        [h.make_tensor_value_info(n, t, dims) for n, (t, dims) in outputs.items()],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in (constants or {}).items()],
    )  # fmt: skip
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
    return str(path)


def conv(path, batch="batch", side: int = 8, channels: int = 8) -> str:
    """x[3,side,side] → convolution, relu, mean over the picture, linear → y[10]."""
    rng = np.random.default_rng(0)
    nodes = [
        h.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        h.make_node("Relu", ["c"], ["r"]),
        h.make_node("GlobalAveragePool", ["r"], ["p"]),
        h.make_node("Flatten", ["p"], ["f"]),
        h.make_node("MatMul", ["f", "m"], ["y"]),
    ]
    weights = {"w": rng.standard_normal((channels, 3, 3, 3), "float32"), "m": rng.standard_normal((channels, 10), "float32")}
    return save(path, nodes, {"x": (T.FLOAT, [batch, 3, side, side])}, {"y": (T.FLOAT, [batch, 10])}, weights)


def encoder(path, mask: bool = True) -> str:
    """tokens[seq] → attention over the places of mask[seq], feed-forward → the state of each position, and the pooled one.

    Without mask it attends to all places, padding too.
    """
    rng, width, words = np.random.default_rng(1), 16, 50
    weights = {"table": rng.standard_normal((words, width), "float32"), "one": np.float32(1), "far": np.float32(-1e4),
        "scale": np.float32(width**-0.5),
               "axis1": np.array([1]), "axis2": np.array([2])}  # fmt: skip
    nodes = [h.make_node("Gather", ["table", "tokens"], ["x"])]
    if mask:
        nodes += [
            h.make_node("Cast", ["mask"], ["here"], to=T.FLOAT),
            h.make_node("Sub", ["one", "here"], ["away"]),
            h.make_node("Mul", ["away", "far"], ["bias2"]),
            h.make_node("Unsqueeze", ["bias2", "axis1"], ["bias"]),
            h.make_node("Unsqueeze", ["here", "axis2"], ["here3"]),
        ]
    for name in ("q", "k", "v"):
        weights[f"{name}w"] = (rng.standard_normal((width, width)) * width**-0.5).astype("float32")
        nodes.append(h.make_node("MatMul", ["x", f"{name}w"], [name]))
    weights["f"] = (rng.standard_normal((width, 4 * width)) * width**-0.5).astype("float32")
    weights["g"] = (rng.standard_normal((4 * width, width)) * (4 * width) ** -0.5).astype("float32")
    nodes += [
        h.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        h.make_node("MatMul", ["q", "kt"], ["s"]),
        h.make_node("Mul", ["s", "scale"], ["t"]),
    ]
    if mask:
        nodes.append(h.make_node("Add", ["t", "bias"], ["u"]))
    nodes += [
        h.make_node("Softmax", ["u" if mask else "t"], ["a"], axis=-1),
        h.make_node("MatMul", ["a", "v"], ["o"]),
        h.make_node("MatMul", ["o", "f"], ["h"]),
        h.make_node("Relu", ["h"], ["i"]),
        h.make_node("MatMul", ["i", "g"], ["j"]),
        h.make_node("Add", ["x", "j"], ["z"]),
    ]
    if mask:
        nodes += [
            h.make_node("Mul", ["z", "here3"], ["kept"]),
            h.make_node("ReduceSum", ["kept", "axis1"], ["sum"], keepdims=0),
            h.make_node("ReduceSum", ["here", "axis1"], ["count"], keepdims=1),
            h.make_node("Div", ["sum", "count"], ["pooled"]),
        ]
    else:
        nodes.append(h.make_node("ReduceMean", ["z"], ["pooled"], axes=[1], keepdims=0))
    nodes.append(h.make_node("Identity", ["z"], ["states"]))
    inputs = {"tokens": (T.INT64, ["batch", "seq"]), **({"mask": (T.INT64, ["batch", "seq"])} if mask else {})}
    return save(path, nodes, inputs, {"states": (T.FLOAT, ["batch", "seq", width]), "pooled": (T.FLOAT, ["batch", width])}, weights)


def gru(path, hidden: int = 8) -> str:
    """x[4] and the state h_in[hidden] → one step of a GRU → y[hidden], and the same as h_out."""
    rng = np.random.default_rng(2)
    weights = {"w": rng.normal(0, 0.5, (1, 3 * hidden, 4)).astype("float32"), "axis": np.array([0]),
        "r": rng.normal(0, 0.5, (1, 3 * hidden, hidden)).astype("float32")}  # fmt: skip
    nodes = [
        h.make_node("Unsqueeze", ["x", "axis"], ["steps"]),
        h.make_node("Unsqueeze", ["h_in", "axis"], ["old"]),
        h.make_node("GRU", ["steps", "w", "r", "", "", "old"], ["", "new"], hidden_size=hidden),
        h.make_node("Squeeze", ["new", "axis"], ["h_out"]),
        h.make_node("Identity", ["h_out"], ["y"]),
    ]
    row = (T.FLOAT, ["batch", hidden])
    return save(path, nodes, {"h_in": row, "x": (T.FLOAT, ["batch", 4])}, {"h_out": row, "y": row}, weights)
