# SPDX-License-Identifier: Apache-2.0
"""Models are served with the results that they give: dicts, dataclasses, tuples of tuples, None."""

from __future__ import annotations

import argparse
import collections
import dataclasses

import numpy as np
import pytest
from conftest import broker_at, serving, until_stopped

import ringbatch as rb
from ringbatch.serve import object_cli
from ringbatch.testing import FakeModel
from ringbatch.worker.results import Outputs, named, of_batch, only_names


def is_array(value) -> bool:
    return isinstance(value, np.ndarray)


A, B, C = (np.full((2, 3), k, "float32") for k in range(3))


@dataclasses.dataclass
class Answer:
    logits: object
    loss: object = None
    past: tuple = ()


class ModelOutput(collections.OrderedDict):
    """As transformers': an ordered dict, and a tuple by its integers."""

    def __getitem__(self, key):
        return tuple(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


Pair = collections.namedtuple("Pair", "boxes scores")


@pytest.mark.parametrize(
    ("result", "names", "left_out"),
    [
        (A, ["y"], []),
        ((A, None, (B, C)), ["y0", "y2.0", "y2.1"], ["y1"]),
        ([None, A, 3], ["y1"], ["y0", "y2"]),
        ({"logits": A, "past": [{"key": B, "value": C}], "cache": object()}, ["logits", "past.0.key", "past.0.value"], ["cache"]),
        (ModelOutput(last_hidden_state=A, pooler_output=B), ["last_hidden_state", "pooler_output"], []),
        (Answer(A, past=(B,)), ["logits", "past.0"], ["loss"]),
        (Pair(A, B), ["boxes", "scores"], []),
    ],
)
def test_tensors_are_named_as_the_model_names_them(result, names, left_out):
    found = named(result, is_array)
    assert list(found.tensors) == names
    assert list(found.left_out) == left_out


@pytest.mark.parametrize(
    ("result", "declared", "picked", "names", "values"),
    [
        ((None, A), [], False, ["y"], [A]),  # only one is left
        ((A, B), ["b", "a"], False, ["b", "a"], [A, B]),  # by place: the module has no names
        ({"a": A, "b": B}, ["b", "a"], False, ["b", "a"], [B, A]),
        ({"a": A, "b": B, "c": C}, ["c", "a"], True, ["c", "a"], [C, A]),
        ((A, B), ["y1"], True, ["y1"], [B]),
        (A, ["y"], True, ["y"], [A]),
    ],
)
def test_outputs_are_picked_and_ordered_by_name(result, declared, picked, names, values):
    outputs = Outputs(is_array, declared, picked)
    for _ in range(2):
        assert all(got is want for got, want in zip(outputs(result), values))
    assert outputs.names == names


@pytest.mark.parametrize(
    ("result", "declared", "picked", "says"),
    [
        ({"a": A, "b": B}, ["c"], True, "the model has no output 'c': it gives a, b"),
        ({"a": A, "b": B}, ["x", "y"], False, "the model gives a, b by name, and x, y are declared"),
        ({"a": A}, ["x"], False, "the model gives a by name, and x are declared: use those names"),
        ({"a": {"b": A}, "a.b": B}, [], False, "two results with the name 'a.b'"),
        ({"a": None}, [], False, r"the model gives no tensor: a \(None\)"),
        ({}, [], False, "the model gives no tensor: its result is empty"),
    ],
)
def test_results_that_cannot_be_named_are_refused(result, declared, picked, says):
    with pytest.raises(rb.Invalid, match=says):
        Outputs(is_array, declared, picked)(result)


def test_a_model_gives_the_same_results_in_each_run():
    outputs = Outputs(is_array)
    outputs({"a": A, "b": B})
    with pytest.raises(rb.Invalid, match="the model gave a, b in its first run, and now b, a"):
        outputs({"b": B, "a": A})


def test_names_and_declarations_do_not_mix():
    assert only_names(["logits"]) == ["logits"]
    assert only_names(["y:f32[2]"]) is only_names(None) is only_names({"y": "f32[2]"}) is None
    for wrong in (["logits", "y:f32[2]"], ["a", "a"]):
        with pytest.raises(rb.Invalid, match="want different names, like logits, or declarations"):
            only_names(wrong)


def gives_dict(x):
    return {"sum": x.sum(1), "note": None, "parts": (x, -x)}


@pytest.mark.parametrize("output", [None, ["parts.1", "sum"], ["sum:f32[]", "parts.1:f32[3]"]])
def test_a_function_of_arrays_that_returns_a_dict(at, output):
    worker = object_cli.worker_for(gives_dict, argparse.Namespace(
        target="m:gives_dict", input=["x:f32[3]"], output=output, args=None, method=None, name="d", join=None, check=True), {})  # fmt: skip
    with broker_at(at), serving(worker, at), rb.connect("d", socket=at, wait=60) as model:
        y = model.infer(np.array([1, 2, 3], "float32"))
        np.testing.assert_array_equal(y["parts.1"], [-1, -2, -3])
        assert y["sum"] == 6 and len(list(y)) == len(output or "123")


# -- an index of the rows


def test_an_index_gives_each_row_its_elements_in_their_order():
    rng = np.random.default_rng(0)
    for rows, n in [(1, 0), (1, 3), (4, 0), (4, 2), (5, 40), (40, 5)]:
        values, index = rng.random((n, 2)), rng.integers(0, rows, n).astype(rng.choice(["int64", "uint8", "uint64"]))
        got = rb.by_index(values, index).rows("y", rows)
        assert len(got) == rows
        for row, part in enumerate(got):
            np.testing.assert_array_equal(part, values[[k for k in range(n) if index[k] == row]].reshape(-1, 2))


@pytest.mark.parametrize(
    ("values", "index", "says"),
    [
        (np.zeros((2, 4)), [0, 3], "has row 3 in a batch of 3"),
        (np.zeros((2, 4)), [-1, 0], "has row -1 in a batch of 3"),
        (np.zeros((2, 4)), [0.0, 1.0], "is float64"),
        (np.zeros((2, 4)), [True, False], "is bool"),
        (np.zeros((2, 4)), [0, 1, 2], r"has shape \(3,\), and its values \(2, 4\)"),
        (np.zeros((2, 4)), [[0], [1]], r"has shape \(2, 1\)"),
        (np.zeros((2, 4)), 0, r"has shape \(\)"),
        (0.5, [0], r"has shape \(1,\), and its values \(\)"),
    ],
)
def test_a_wrong_index_is_refused(values, index, says):
    with pytest.raises(rb.Invalid, match=f"output 'boxes': the index {says}"):
        rb.by_index(values, index).rows("boxes", 3)


@rb.worker("indexed", inputs="counts:i64[2]", outputs="boxes:f32[found<=5,2] labels:i64[found<=5] sum:i64[]", max_batch_size=6, wait_time=60)
def indexed(batch):
    """As many boxes as the first number says, of rows from the last to the first; the second number is added to the index."""
    counts, more = batch.inputs["counts"].T
    rows = np.repeat(np.arange(len(batch)), counts)[::-1]
    labels = np.arange(len(rows))
    return {"boxes": rb.by_index(np.stack([rows, labels], 1).astype("float32"), rows), "labels": rb.by_index(labels, rows + more.max()),
        "sum": counts}


def test_a_worker_returns_elements_with_an_index(socket):
    counts = [3, 0, 5, 1, 0, 6]
    with serving(indexed, socket), rb.connect("indexed", socket=socket, wait=60) as m, rb.connect("indexed", socket=socket):
        futures = [m.submit(np.array([n, 0])) for n in counts]
        for n, f in zip(counts[:-1], futures):
            y = f.result(60)
            assert y["boxes"].shape == (n, 2) and len({*y["boxes"][:, 0]}) == (n > 0) and y["sum"] == n
            np.testing.assert_array_equal(y["labels"], y["boxes"][:, 1])
            assert (np.diff(y["labels"]) == 1).all()
        with pytest.raises(rb.Failed, match=r"output '(boxes|labels)': expected a row of .*; got shape \(6,"):
            futures[-1].result(60)
        with pytest.raises(rb.Failed, match="output 'labels': the index has row 6 in a batch of 6"):
            m(np.ones((6, 2), "int64"))
        fake = FakeModel(rb.worker("f", inputs="counts:i64[2]", outputs="boxes:f32[<=5,2] labels:i64[<=5] sum:i64[]")(indexed.function))
        assert fake(np.array([2, 0]))["boxes"].tolist() == [[0, 0], [0, 1]]
        with pytest.raises(rb.Failed, match="output 'labels': the index has row 1 in a batch of 1"):
            fake(np.array([2, 1]))


@pytest.mark.parametrize("how", [{"outputs": "y:f32[2]"}, {"outputs": "y:f32[<=4]", "packed": ["x"]}])
def test_by_index_is_for_outputs_whose_first_dimension_varies(socket, how):
    name = f"not-{how['outputs'][-2]}"
    run = rb.worker(name, inputs="x:f32[<=4]", ragged=True, **how)(lambda batch: rb.by_index([1.0], [0]))
    with serving(run, socket), rb.connect(name, socket=socket, wait=60) as m:
        with pytest.raises(rb.Failed, match="output 'y': by_index is for an output on the host whose first dimension varies"):
            m(np.ones(2, "float32"))


# -- torch


def small_models(torch):
    """Modules that return what those of transformers and torchvision do."""

    class Embeds(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 2)

    class Bert(Embeds):
        """In the order of a tokenizer, with optional arguments and return_dict."""

        def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, labels=None, return_dict=True):
            x = self.table(input_ids) * attention_mask.unsqueeze(2)
            pooled = x.sum(1) / attention_mask.sum(1, keepdim=True)
            return ModelOutput(last_hidden_state=x, pooler_output=pooled) if return_dict else (x, pooled)

    class Cached(Embeds):
        """With the keys and values of its layers, as use_cache gives them, and an object."""

        def forward(self, input_ids, use_cache=True):
            x = self.table(input_ids)
            return {"logits": self.head(x), "past_key_values": ((x, -x), (x + 1, x + 2)), "cache": object()}

    class Maybe(torch.nn.Module):
        def forward(self, x):
            return [None, x * 3, None]

    return {
        "bert": (Bert(), ["input_ids:i64[6]", "token_type_ids:i64[6]", "attention_mask:i64[6]"]),
        "cached": (Cached(), ["input_ids:i64[6]"]),
        "maybe": (Maybe(), ["x:f32[3]"]),
    }


MODELS = {
    "bert": {"last_hidden_state", "pooler_output"},
    "cached": {"logits", "past_key_values.0.0", "past_key_values.0.1", "past_key_values.1.0", "past_key_values.1.1"},
    "maybe": {"y"},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_module_is_served_with_its_results(served, name, capfd):
    torch = pytest.importorskip("torch")
    module, inputs = small_models(torch)[name]
    rng = np.random.default_rng(0)
    xs = [rng.integers(1, 4, (5, 6)) if ":i64" in text else rng.random((5, *module_shape(text)), "float32") for text in inputs]
    with torch.no_grad():
        want = named(module(**dict(zip([text.split(":")[0] for text in inputs], map(torch.from_numpy, xs)))), torch.is_tensor).tensors
    with rb.connect(name, socket=served(module, name, inputs=inputs, device="cpu", max_batch_size=4), wait=60) as model:
        got = model.infer(*xs)
        answers = dict(got.items()) if len(MODELS[name]) > 1 else {next(iter(MODELS[name])): got}
        assert set(answers) == MODELS[name]
        for key, y in zip(want.values(), (answers[k if k in answers else "y"] for k in want)):
            np.testing.assert_allclose(np.asarray(y), key.numpy(), rtol=1e-5, atol=1e-5)
    said = capfd.readouterr().err
    assert said.count("note: left out") == (name in ("cached", "maybe"))


def module_shape(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("[")[1][:-1].split(",")))


def test_some_outputs_of_a_module_are_served(at):
    torch, rt = pytest.importorskip("torch"), pytest.importorskip("ringbatch.torch")
    module = torch.nn.Linear(3, 2)

    def clip(x):
        y = module(x)
        return {"per_row": y @ y.T, "embeds": y, "loss": y.sum()}

    for wrong in ("per_row", "loss"):
        with pytest.raises(rb.Invalid, match=r"name the other outputs \(outputs\): embeds"):
            rt.serve(clip, "clip", inputs=["x:f32[3]"], outputs=[wrong, "embeds"], device="cpu", socket=at)
    with broker_at(at), until_stopped(rt.serve, clip, "clip", inputs=["x:f32[3]"], outputs=["embeds"], device="cpu", socket=at):
        with rb.connect("clip", socket=at, wait=60) as model:
            x = np.ones((2, 3), "float32")
            np.testing.assert_allclose(model.infer(x), module(torch.from_numpy(x)).detach().numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("result", "found", "others"),
    [
        (A, {"a": A}, []),
        ([A[0], B[0]], {"a": [A[0], B[0]]}, []),
        ((A[0], B[0]), {"a": (A[0], B[0])}, []),
        ((A, None), {"a": A}, ["y1"]),
        ((A, (None, "text")), {"a": A}, ["y1.0", "y1.1"]),
        ({"a": [A[0], B[0]], "loss": None, "more": (B,)}, {"a": [A[0], B[0]]}, ["loss", "more.0"]),
        ({"b": A}, {}, ["b"]),
        ((A, B), {"a": None, "b": None}, []),
        ([A, B], {"a": None, "b": None}, []),
        ((A, (None, B)), {"a": A, "b": (None, B)}, []),
        ((A, (B,), None), {"a": None, "b": None}, ["y2"]),
        ((None, A), {"a": None, "b": A}, []),
        (Answer(A, past=(B,)), {"logits": A, "past.0": B}, ["loss"]),
        (Pair(A, B), {"scores": B}, ["boxes"]),
    ],
)
def test_results_of_a_worker_are_its_outputs(result, found, others):
    got, left = of_batch(result, dict.fromkeys(found or ["a"], 1))
    assert list(left) == others and list(got) == [name for name in found]
    assert all(value is None or got[name] is value or repr(got[name]) == repr(value) for name, value in found.items())


def test_a_worker_returns_a_models_result(socket):
    @rb.worker("model-output", inputs="x:f32[3]", outputs="logits:f32[3] past.0:f32[3]")
    def run(batch):
        x = batch.inputs["x"]
        return Answer(x, past=(2 * x,)) if x[0, 0] else {"logits": x}

    with serving(run, socket), rb.connect("model-output", socket=socket, wait=60) as m, pytest.warns(UserWarning, match=r"loss \(None\)"):
        y = m(A[0] + 1)
        assert (y["logits"] == 1).all() and (y["past.0"] == 2).all()
        with pytest.raises(rb.Failed, match="the function returned logits and wrote no output 'past.0'"):
            m(A[0])
