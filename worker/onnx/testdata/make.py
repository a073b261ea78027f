# SPDX-License-Identifier: Apache-2.0
"""Makes the graphs of the tests: python make.py, with the package onnx."""

import numpy as np
from onnx import TensorProto, checker, helper, numpy_helper, save


def graph(name, nodes, inputs, outputs, constants=()):
    g = helper.make_graph(nodes, name, inputs, outputs, [numpy_helper.from_array(v, k) for k, v in constants])
    m = helper.make_model(g, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    checker.check_model(m)
    save(m, f"{name}.onnx")


def tensor(name, kind, *shape):
    return helper.make_tensor_value_info(name, kind, shape)


FLOAT, I64 = TensorProto.FLOAT, TensorProto.INT64
w = np.arange(12, dtype=np.float32).reshape(4, 3)

# Two inputs of different types, two outputs: y = x w + bias, best = the largest of y.
graph(
    "linear",
    [
        helper.make_node("Cast", ["bias"], ["b"], to=FLOAT),
        helper.make_node("MatMul", ["x", "w"], ["xw"]),
        helper.make_node("Add", ["xw", "b"], ["y"]),
        helper.make_node("ArgMax", ["y"], ["best"], axis=1, keepdims=0),
    ],
    [tensor("x", FLOAT, "batch", 4), tensor("bias", I64, "batch", 3)],
    [tensor("y", FLOAT, "batch", 3), tensor("best", I64, "batch")],
    [("w", w)],
)
# Each row minus the mean of the batch: rows depend on one another.
graph(
    "mixes",
    [helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1), helper.make_node("Sub", ["x", "mean"], ["y"])],
    [tensor("x", FLOAT, "batch", 4)],
    [tensor("y", FLOAT, "batch", 4)],
)
# Rows depend on one another by less than every tolerance.
graph(
    "nearly",
    [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1),
        helper.make_node("Mul", ["mean", "little"], ["part"]),
        helper.make_node("Sub", ["x", "part"], ["y"]),
    ],
    [tensor("x", FLOAT, "batch", 4)],
    [tensor("y", FLOAT, "batch", 4)],
    [("little", np.array(1e-5, np.float32))],
)
graph("fixed", [helper.make_node("Neg", ["x"], ["y"])], [tensor("x", FLOAT, 1, 4)], [tensor("y", FLOAT, 1, 4)])
graph("open", [helper.make_node("Neg", ["x"], ["y"])], [tensor("x", FLOAT, "batch", "n")], [tensor("y", FLOAT, "batch", "n")])
graph("whole", [helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)], [tensor("x", FLOAT, "batch", 4)], [tensor("y", FLOAT)])
