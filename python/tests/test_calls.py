# SPDX-License-Identifier: Apache-2.0
"""Every form of a call gives the same: by place, by name, with a timeout, with retry, and by infer, which takes no quick path."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import serving

import ringbatch as rb

ROW = ("float32", (4,))


@pytest.fixture
def two(socket):
    """A model with two inputs and three outputs; one output has no dimensions."""
    outputs = {"sum": ROW, "difference": ("float32", (2, 2)), "first": ("float32", ())}

    @rb.worker("two", inputs={"a": ROW, "b": ROW}, outputs=outputs, wait_time=0)
    def run(batch):
        a, b = batch.inputs["a"], batch.inputs["b"]
        return {"sum": a + b, "difference": (a - b).reshape(-1, 2, 2), "first": a[:, 0]}

    @rb.worker("pair", inputs={"a": ROW, "b": ROW}, outputs={"sum": ROW, "difference": ROW}, wait_time=0)
    def pair(batch):
        a, b = batch.inputs["a"], batch.inputs["b"]
        return {"sum": a + b, "difference": a - b}

    with serving(run, socket), serving(pair, socket):
        yield socket


@pytest.mark.parametrize("retry", [False, True, 30.0])
@pytest.mark.parametrize("name", ["two", "pair"])
def test_every_form_of_a_call_gives_the_same(two, name, retry):
    a, b = np.arange(4, dtype="float32"), np.full(4, 7, "float32")
    with rb.connect(name, socket=two, wait=60, retry=retry) as m:
        want = m.infer(a, b)
        calls = [m(a, b), m(a, b=b), m(b=b, a=a), m(a, b, timeout=60), m(b=b, timeout=60.0, a=a), m(a, b, timeout=float("inf"))]
        calls += [m(a, b, timeout=None), m(a, b, priority=0), m(a[::1], b, split=False)]
        for y in calls:
            assert list(y) == list(want)
            for key, value in want.items():
                assert y[key].dtype == value.dtype and np.array_equal(y[key], value)
        by_name = m(b=b, a=a)
        assert all(type(by_name[key]) is type(value) for key, value in want.items())
        assert np.array_equal(m(np.stack([a, b]), np.stack([b, a]))["sum"], [a + b, a + b])


def test_wrong_calls_raise_the_same(two):
    a = np.zeros(4, "float32")
    with rb.connect("pair", socket=two, wait=60) as m:
        for args, named, error, says in [
            ((), {}, rb.Invalid, "takes the inputs a, b; got none"),
            ((a,), {}, rb.Invalid, "takes the inputs a, b"),
            ((a, a, a), {}, rb.Invalid, "takes the inputs a, b"),
            ((a, a), {"a": a}, rb.Invalid, "takes the inputs a, b"),
            ((a,), {"c": a}, rb.Invalid, "takes the inputs a, b"),
            ((a, a), {"timeout": float("nan")}, rb.Invalid, "nan"),
            ((a,), {"b": a.astype("float64")}, rb.DType, "float64"),
            ((a, np.zeros(5, "float32")), {}, rb.Shape, "5"),
            ((a, a), {"timeout": "soon"}, rb.Invalid, "soon"),
        ]:
            with pytest.raises(error, match=says) as by_call:
                m(*args, **named)
            with pytest.raises(error) as by_infer:
                m.infer(*args, **named)
            assert str(by_call.value) == str(by_infer.value)
    with pytest.raises(rb.Closed):
        m(a, a, timeout=1.0)
