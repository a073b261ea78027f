# SPDX-License-Identifier: Apache-2.0
"""Dimensions with names: tensors that share one share its size."""

from __future__ import annotations

import runpy

import numpy as np
import pytest
from conftest import REPOSITORY, serving

import ringbatch as rb

GRAPH = {"inputs": {"z": ("int64", ("atoms<=9",)), "edges": ("int64", ("edges<=30", 2)), "x": ("float64", ("atoms<=9", 3))},
    "outputs": {"e": ("float64", ()), "f": ("float64", ("atoms<=9", 3)), "w": ("int64", ("edges<=30",))}}  # fmt: skip


def graph(atoms, edges):
    rng = np.random.default_rng(100 * atoms + edges)
    return {"z": rng.integers(0, 9, atoms), "edges": rng.integers(0, max(atoms, 1), (edges, 2)), "x": rng.random((atoms, 3))}


@pytest.mark.parametrize("written", [False, True])
def test_packed_graphs_have_offsets_of_atoms_and_of_edges(socket, written):
    @rb.worker(f"graphs-{written}", **GRAPH, packed=["z", "edges", "x"], max_batch_size=8, debug=written)
    def run(batch):
        atoms, edges = batch.offsets["atoms"], batch.offsets["edges"]
        assert len(batch.inputs["x"]) == len(batch.inputs["z"]) == atoms[-1] and len(batch.inputs["edges"]) == edges[-1]
        rows = list(zip(atoms, atoms[1:]))
        y = {"e": np.array([batch.inputs["z"][a:b].sum() for a, b in rows], "float64"), "f": -batch.inputs["x"],
            "w": batch.inputs["edges"].sum(1)}  # fmt: skip
        if not written:
            return y
        for name, value in y.items():
            batch.outputs[name][...] = value

    with serving(run, socket), rb.connect(run.model, socket=socket, wait=60) as m:
        given = [graph(a, e) for a in (0, 1, 9) for e in (0, 5, 30)]
        for g, future in zip(given, [m.submit(g) for g in given]):
            y = future.result(60)
            assert y["e"] == g["z"].sum() and np.array_equal(y["f"], -g["x"]) and np.array_equal(y["w"], g["edges"].sum(1))
        for wrong, says in (({"x": np.zeros((4, 3))}, r'input "z" has 9 atoms, input "x" has 4'),
                            ({"x": np.zeros((10, 3))}, "expected float64 of shape")):  # fmt: skip
            with pytest.raises(rb.Shape, match=says):
                m({**given[-1], **wrong})


@pytest.mark.parametrize("form", ["array", "list", "written", "wrong"])
@pytest.mark.parametrize("how", [{"buckets": {"tokens": [4, 16]}}, {"ragged": True}])
def test_labels_of_tokens_lose_the_padding_of_their_bucket(socket, form, how):
    @rb.worker(f"labels-{form}-{'ragged' in how}", inputs="tokens:i64[tokens<=16] mask:bool[tokens<=16]", max_batch_size=4,
        outputs="labels:i64[tokens<=16,2] pairs:i64[tokens<=16,tokens<=16]", **how)  # fmt: skip
    def run(batch):
        x = batch.inputs["tokens"]
        rows = x if batch.ragged else [row[: batch.input_shape(i, "tokens")[0]] for i, row in enumerate(x)]
        if form == "array" and not batch.ragged:
            return {"labels": np.stack([x, -x], -1), "pairs": x[:, :, None] + x[:, None]}
        y = {"labels": [np.stack([row, -row], -1) for row in rows], "pairs": [row[:, None] + row for row in rows]}
        if form == "wrong":
            y["labels"] = [row[1:] for row in y["labels"]]
        if form != "written":
            return y
        for i, row in enumerate(rows):
            for name in y:
                batch.outputs[name][i][tuple(map(slice, y[name][i].shape))] = y[name][i]

    with serving(run, socket), rb.connect(run.model, socket=socket, wait=60) as m:
        given = [np.arange(n) for n in (1, 3, 4, 9, 16)]
        for x, future in zip(given, [m.submit(x, x > 0) for x in given]):
            if form == "wrong":
                with pytest.raises(rb.Failed, match=f"output 'labels': this row has {len(x)} tokens in the inputs; got shape"):
                    future.result(60)
                continue
            y = future.result(60)
            assert np.array_equal(y["labels"], np.stack([x, -x], -1)) and np.array_equal(y["pairs"], x[:, None] + x)


def test_outputs_that_share_a_name_have_one_size_in_a_row(socket):
    @rb.worker("found", inputs="x:i64[]", outputs="boxes:f32[found<=9,2] labels:i64[found<=9]", max_batch_size=4, wait_time=60)
    def run(batch):
        n = batch.inputs["x"].tolist()
        return {"boxes": [np.ones((k, 2), "float32") for k in n], "labels": [np.arange(k + (k == 3)) for k in n]}

    with serving(run, socket), rb.connect("found", socket=socket, wait=60) as m, rb.connect("found", socket=socket):
        futures = [m.submit(np.int64(k)) for k in (0, 9, 3, 5)]
        assert [len(futures[i].result(60)["labels"]) for i in (0, 1, 3)] == [0, 9, 5]
        with pytest.raises(rb.Failed, match='output "boxes" has 3 found, output "labels" has 4'):
            futures[2].result(60)


@pytest.mark.parametrize(
    ("inputs", "outputs", "packed", "says"),
    [
        ("x:f32[a<=8] z:f32[a<=9]", "y:f32[1]", [], "a has at most 8 in \"x\" and 9 in \"z\""),
        ("x:f32[a<=8] z:f32[<=8]", "y:f32[1]", ["x", "z"], "or all have names"),
        ("x:f32[a<=8]", "y:f32[<=8]", ["x"], "or all have names"),
        ("x:f32[a<=8]", "y:f32[b<=8]", ["x"], r"no input has the dimension of the output y:f32\[b<=8\]"),
        ("x:f32[a-b<=8]", "y:f32[1]", [], "dimension 'a-b<=8'"),
        ("x:f32[a<=8]", "y:f32[1]", [], "cost=b: no such variable dimension of an input; there are 1: x.0, a"),
    ],
)  # fmt: skip
def test_names_that_do_not_fit_are_refused(socket, inputs, outputs, packed, says):
    with pytest.raises(rb.Invalid, match=says):
        made = rb.worker("never", inputs=inputs, outputs=outputs, packed=packed, ragged=True, cost="b" if "cost" in says else None)(len)
        made.run(socket=socket)


def test_the_example_of_forces(socket):
    example = runpy.run_path(str(REPOSITORY / "examples" / "python" / "forces.py"))
    with serving(example["forces"], socket):
        assert example["ask"](socket) < 100
