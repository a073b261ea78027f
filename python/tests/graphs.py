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


def encoder(path, *, width: int = 16, layers: int = 1, mask: bool = True, words: int = 50) -> str:
    """tokens[seq] → attention over what mask[seq] leaves, feed-forward; → each position's state, and the pooled one.

    Without mask everything is attended to, padding too.
    """
    rng = np.random.default_rng(1)
    weights = {"table": rng.standard_normal((words, width), "float32"), "one": np.float32(1), "far": np.float32(-1e4),
        "scale": np.float32(width**-0.5),
               "axis1": np.array([1]), "axis2": np.array([2])}  # fmt: skip
    nodes = [h.make_node("Gather", ["table", "tokens"], ["x0"])]
    if mask:
        nodes += [
            h.make_node("Cast", ["mask"], ["here"], to=T.FLOAT),
            h.make_node("Sub", ["one", "here"], ["away"]),
            h.make_node("Mul", ["away", "far"], ["bias2"]),
            h.make_node("Unsqueeze", ["bias2", "axis1"], ["bias"]),
            h.make_node("Unsqueeze", ["here", "axis2"], ["here3"]),
        ]
    for n in range(layers):
        x, y = f"x{n}", f"x{n + 1}"
        for name in ("q", "k", "v"):
            weights[f"{name}w{n}"] = (rng.standard_normal((width, width)) * width**-0.5).astype("float32")
            nodes.append(h.make_node("MatMul", [x, f"{name}w{n}"], [f"{name}{n}"]))
        weights[f"f{n}"] = (rng.standard_normal((width, 4 * width)) * width**-0.5).astype("float32")
        weights[f"g{n}"] = (rng.standard_normal((4 * width, width)) * (4 * width) ** -0.5).astype("float32")
        nodes += [
            h.make_node("Transpose", [f"k{n}"], [f"kt{n}"], perm=[0, 2, 1]),
            h.make_node("MatMul", [f"q{n}", f"kt{n}"], [f"s{n}"]),
            h.make_node("Mul", [f"s{n}", "scale"], [f"t{n}"]),
        ]
        if mask:
            nodes.append(h.make_node("Add", [f"t{n}", "bias"], [f"u{n}"]))
        nodes += [
            h.make_node("Softmax", [f"u{n}" if mask else f"t{n}"], [f"a{n}"], axis=-1),
            h.make_node("MatMul", [f"a{n}", f"v{n}"], [f"o{n}"]),
            h.make_node("MatMul", [f"o{n}", f"f{n}"], [f"h{n}"]),
            h.make_node("Relu", [f"h{n}"], [f"i{n}"]),
            h.make_node("MatMul", [f"i{n}", f"g{n}"], [f"j{n}"]),
            h.make_node("Add", [x, f"j{n}"], [y]),
        ]
    last = f"x{layers}"
    if mask:
        nodes += [
            h.make_node("Mul", [last, "here3"], ["kept"]),
            h.make_node("ReduceSum", ["kept", "axis1"], ["sum"], keepdims=0),
            h.make_node("ReduceSum", ["here", "axis1"], ["count"], keepdims=1),
            h.make_node("Div", ["sum", "count"], ["pooled"]),
        ]
    else:
        nodes.append(h.make_node("ReduceMean", [last], ["pooled"], axes=[1], keepdims=0))
    nodes.append(h.make_node("Identity", [last], ["states"]))
    inputs = {"tokens": (T.INT64, ["batch", "seq"]), **({"mask": (T.INT64, ["batch", "seq"])} if mask else {})}
    return save(path, nodes, inputs, {"states": (T.FLOAT, ["batch", "seq", width]), "pooled": (T.FLOAT, ["batch", width])}, weights)
