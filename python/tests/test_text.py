# SPDX-License-Identifier: Apache-2.0
"""Texts: str in, str out, over the ring."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from conftest import serving

import ringbatch as rb
from ringbatch.binding.tensors import numbers


def upper(batch):
    assert all(isinstance(text, str) for text in batch.inputs["x"])
    return {"y": [text.upper() for text in batch.inputs["x"]], "n": np.array([len(text) for text in batch.inputs["x"]], "i4")}


@pytest.fixture(scope="module")
def model(socket):
    worker = rb.worker("upper", inputs="x:str[<=16]", outputs={"y": ("str", "<=16"), "n": "i32[]"}, max_batch_size=8)(upper)
    with serving(worker, socket), rb.connect("upper", socket=socket, window=16, wait=60) as m:
        yield m


@pytest.fixture(scope="module")
def pairs(socket):
    """Rows of two texts, one text out, which may be too long or not a str."""
    odd = {"number": 1, "bytes": b"a", "surrogate": "\udc80", "none": None}

    def run(batch):
        return [odd.get(a, a + b) for a, b in batch.inputs["x"]]

    worker = rb.worker("pairs", inputs={"x": (str, (2, "<=16"))}, outputs={"y": "str[<=16]"}, max_batch_size=8)(run)
    with serving(worker, socket), rb.connect("pairs", socket=socket, window=16, wait=60) as m:
        yield m


TEXTS = ["hi", "", "grüße, Ωμ", "0123456789abcdef", "a\0b", "𝄞" * 4]


def test_a_str_is_an_item_and_a_list_is_rows(model):
    for text in TEXTS:
        answer = model(text)
        assert answer["y"] == text.upper() and answer["n"] == len(text)
    assert model(TEXTS[:4])["y"] == [t.upper() for t in TEXTS[:4]]
    assert model(x="a")["y"] == "A" and model({"x": ("a", "b")})["y"] == ["A", "B"]
    assert model(["a"])["y"] == ["A"]


@pytest.mark.parametrize("kind", ["U8", object])
def test_arrays_of_str_are_rows(model, kind):
    assert model(np.array(["a", "bc"], kind))["y"] == ["A", "BC"]
    assert model(np.str_("a"))["y"] == "A"


def test_more_rows_than_a_request_may_have_are_split(model):
    many = [str(i) * (i % 4) for i in range(50)]
    assert model(many)["y"] == many and model.submit(many).result()["y"] == many


def test_submit_ainfer_and_requests_take_texts(model):
    futures = [model.submit(text) for text in TEXTS[:4]]
    assert [f.result()["y"] for f in futures] == [t.upper() for t in TEXTS[:4]]

    async def both():
        return await asyncio.gather(model.ainfer("a"), model.ainfer(["b", "c"]))

    assert [a["y"] for a in asyncio.run(both())] == ["A", ["B", "C"]]
    for text in TEXTS[:4]:
        with model.request() as req:
            req.inputs["x"] = text
            kept = req.run().outputs["y"]
        assert kept == text.upper()
    with model.request(rows=2) as req:
        req.inputs["x"] = ["a", "bc"]
        assert req.run().outputs["y"] == ["A", "BC"] and list(req.outputs["n"]) == [1, 2]


def test_what_is_no_text_says_so(model):
    for value, error, says in [
        (b"a", rb.errors.DType, "got bytes; pass text.decode()"), (None, rb.errors.DType, "got NoneType"), (7, rb.errors.DType, "got int"),
        (["a", None], rb.errors.DType, "got NoneType"), (np.zeros(16, "u1"), rb.errors.DType, "array of uint8"),
        ("\udc80", rb.errors.DType, "surrogates"), ("x" * 17, rb.errors.Size, "17 bytes of UTF-8, at most 16"),
        ("ü" * 9, rb.errors.Size, "declare str[<=18]"), (["a", ["b"]], rb.errors.Shape, "lists beside str"),
        ([], rb.errors.Rows, "one row"), ([["a"]], rb.errors.Shape, "got shape (1, 1)"),
    ]:  # fmt: skip
        with pytest.raises(error) as e:
            model(value)
        assert says in str(e.value) and "'x'" in str(e.value), str(e.value)
    with model.request() as req:
        with pytest.raises(rb.errors.Invalid, match="is text: assign it"):
            _ = req.inputs["x"]
        with pytest.raises(rb.errors.Size):
            req.inputs["x"] = "x" * 17
        with pytest.raises(rb.errors.Shape):
            req.inputs["x"] = ["a", "b"]
        with pytest.raises(TypeError):
            req.outputs["n"] = 7
        req.inputs["x"] = "ok"
        assert req.run().outputs["y"] == "OK"
        with pytest.raises(rb.errors.Committed):
            req.inputs["x"] = "late"


def test_rows_of_several_texts(pairs):
    assert pairs(["a", "b"]) == "ab" and pairs([["a", "b"], ["", "ü"]]) == ["ab", "ü"]
    with pytest.raises(rb.errors.Shape):
        pairs(["a", "b", "c"])


def test_a_worker_that_answers_something_else_fails_that_request(pairs):
    futures = {bad: pairs.submit([bad, "b"]) for bad in ["number", "bytes", "surrogate", "none", "0123456789abcdef", "fine"]}
    assert futures.pop("fine").result() == "fineb"
    for bad, future in futures.items():
        with pytest.raises(rb.Failed, match="output 'y'") as e:
            future.result()
        assert ("surrogates" if bad == "surrogate" else "at most 16") in str(e.value), bad


def test_texts_have_rules():
    for spec, says in [
        ("x:str[16]", "most bytes last"), ("x:str[<=2,<=4]", "most bytes last"), ("x:str[]", "most bytes last"),
        ({"x": ("str", 4)}, "most bytes last"), ({"x": ("str", "<=4", "device")}, "host memory"),
    ]:  # fmt: skip
        with pytest.raises(rb.Invalid, match=says):
            rb.worker("m", inputs=spec, outputs="y:f32[1]")
    with pytest.raises(rb.Invalid, match="a module takes and gives numbers"):
        numbers("x:str[<=4]")
    assert "x:str[<=4] y:f32[1]@device" in repr(rb.worker("m", inputs="x:str[<=4] y:f32[1]", outputs="z:f32[1]", memory="device")(upper))
    with pytest.raises(rb.Invalid, match="state has numbers"):
        rb.worker("m", inputs="x:str[<=4]", outputs="y:f32[1]", state="h:str[<=4]")


def test_a_padded_batch_has_empty_texts(socket):
    seen = []

    def run(batch):
        seen.append(batch.inputs["x"])
        return batch.inputs["x"]

    worker = rb.worker("padded", inputs="x:str[<=4]", outputs="y:str[<=4]", pad_to=4, max_batch_size=4)(run)
    with serving(worker, socket), rb.connect("padded", socket=socket, wait=60) as m:
        assert m("a") == "a" and seen == [["a", "", "", ""]]


def test_numbers_in_and_a_text_out_is_a_str(socket):
    worker = rb.worker("say", inputs="x:i32[]", outputs="y:str[<=4]", max_batch_size=4)(lambda batch: [str(n) for n in batch.inputs["x"]])
    with serving(worker, socket), rb.connect("say", socket=socket, wait=60) as m:
        assert m(np.int32(7)) == "7" and m(np.array([1, 22], "i4")) == ["1", "22"]
        assert m.submit(np.int32(5)).result() == "5"


class Spam:
    def predict(self, texts):
        return np.array(["spam" if "win" in text else "ham" for text in texts])


def test_an_object_takes_and_gives_texts(socket):
    from ringbatch.serve import object_cli

    def worker(*args):
        return object_cli.worker_for(Spam(), *object_cli.flags.parse(object_cli.parser(), ["spam", "--name", "spam", *args]))

    with pytest.raises(rb.Invalid, match="y:str"):
        worker("--input", "x:str[<=64]")
    with serving(worker("--input", "x:str[<=64]", "--output", "y:str[<=8]"), socket), rb.connect("spam", socket=socket, wait=60) as m:
        assert m(["you win", "hello"]) == ["spam", "ham"]


def test_steps_of_a_sequence_take_texts(socket):
    def run(batch):
        before = batch.state["n"]
        batch.state["n"] = before + 1
        return [f"{text}{n}" for text, n in zip(batch.inputs["x"], before)]

    worker = rb.worker("steps", inputs="x:str[<=8]", outputs="y:str[<=8]", state="n:i32[]", max_batch_size=4)(run)
    with serving(worker, socket), rb.connect("steps", socket=socket, wait=60) as m, m.sequence() as seq:
        assert [seq.step("a"), seq.step(x="b")] == ["a0", "b1"]
        assert asyncio.run(seq.astep("c")) == "c2"
        with seq.request() as req:
            req.inputs["x"] = "d"
            assert req.run().outputs["y"] == "d3"


def test_a_second_request_in_a_slot_has_its_own_text(model):
    for text in "abc":
        with model.request() as req:
            req.inputs["x"] = text
            assert req.run().outputs["y"] == text.upper()
