# SPDX-License-Identifier: Apache-2.0
"""Every form of a call gives the same: by place, by name, with a timeout, with retry, and by infer. With the extension none goes over ctypes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from conftest import serving

import ringbatch as rb
from ringbatch.binding import paths

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
                assert type(y[key]) is type(value) is np.ndarray  # also without dimensions
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


class _NoLibrary:
    def __init__(self, library):
        self.rb_client_fd = library.rb_client_fd  # once for each event loop

    def __getattr__(self, name):
        raise AssertionError(f"{name} was called over ctypes")


def _every_way(m, x):
    """One item, in every form."""
    name = m.inputs[0].name
    yield from (m(x), m(**{name: x}), m({name: x}), m(x, timeout=60), m(x, priority=0), m(x, cost=3), m(x, version=True)[0], m.infer(x))
    yield from (m(x.tolist()), m(np.repeat(x, 2)[::2]), m.submit(x).result(60), m.submit(x, priority=0).result(60))
    yield from (asyncio.run(m.ainfer(x)), asyncio.run(m.ainfer(x, version=True, cost=1))[0])
    shapes = {name: x.shape} if m.inputs[0].variable else None
    with m.request(shapes=shapes) as r:
        r.inputs[name][tuple(map(slice, x.shape))] = x
        r.run(priority=0)
        yield np.array(r.outputs["y"])


@pytest.mark.skipif(paths.quick is None, reason="without the extension")
def test_with_the_extension_no_request_goes_over_ctypes(socket):
    @rb.worker("fixed", inputs={"x": ROW}, outputs={"y": ROW}, wait_time=0)
    def fixed(batch):
        return batch.inputs["x"] + 1

    @rb.worker("padded", inputs="x:f32[<=4]", outputs="y:f32[4]", buckets={"x.0": [3, 4]}, wait_time=0)
    def padded(batch):
        return np.pad(batch.inputs["x"], [(0, 0), (0, 4 - batch.inputs["x"].shape[1])]) + 1

    @rb.worker("sums", inputs={"x": ROW}, outputs={"y": ROW}, state={"h": ROW}, wait_time=0)
    def sums(batch):
        batch.state["h"] = batch.state["h"] + batch.inputs["x"]
        return batch.state["h"]

    x, many = np.arange(4, dtype="float32"), np.arange(400, dtype="float32").reshape(100, 4)
    with serving(fixed, socket), serving(padded, socket), serving(sums, socket):
        for name, given in ("fixed", x), ("padded", x), ("padded", x[:2]):
            with rb.connect(name, socket=socket, wait=60, cast=True) as m:
                list(_every_way(m, given))  # maps the memory
                m._core.lib = _NoLibrary(m._core.lib)
                for y in _every_way(m, given):
                    assert type(y) is np.ndarray and np.array_equal(y, np.pad(given, (0, 4 - len(given))) + 1)
                for y in m(many), m(many[:2], priority=0), m.submit(many).result(60), asyncio.run(m.ainfer(many)):
                    assert np.array_equal(y, many[: len(y)] + 1)
        with rb.connect("sums", socket=socket, wait=60, cast=True) as m, m.sequence() as seq:
            lib, m._core.lib = m._core.lib, _NoLibrary(m._core.lib)
            steps = [seq.step(x), seq.step(x, timeout=60), seq.step(x=x), seq.step(x, priority=0), seq.step(x.tolist()), seq.step({"x": x})]
            steps += [seq.step(x, version=True)[0], asyncio.run(seq.astep(x))]
            assert all((y == (n + 1) * x).all() for n, y in enumerate(steps))
            m._core.lib = lib  # to close the sequence


def test_rows_that_differ_in_size_are_lists_in_every_form(socket):
    @rb.worker("words", inputs="x:i64[<=3,<=4]", outputs="y:i64[<=9] n:i64[]", buckets={"x.0": [2, 3], "x.1": [4]}, wait_time=0)
    def words(batch):
        x = batch.inputs["x"]
        for row in range(batch.rows):
            batch.set_row_dims(row, int(x[row, 0, 0]))
            batch.outputs["y"][row] = x[row].sum()
        batch.outputs["n"][...] = x.sum(axis=(1, 2))

    x = np.array([[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [1, 2, 3]]])
    with serving(words, socket), rb.connect("words", socket=socket, wait=60) as m:
        strided = x[:, :, ::-1].copy()[:, :, ::-1]
        for answer in m(x), m({"x": x}), m(x.tolist(), priority=0), m(strided), m.submit(x).result(60), asyncio.run(m.ainfer(x)):
            assert [list(y) for y in answer["y"]] == [[21], [30] * 7] and list(answer["n"]) == [21, 30]
        one = m(x[1], version=True)[0]
        assert list(one["y"]) == [30] * 7 and one["n"] == 30
        same = m(x[[0, 0]])["y"]
        assert type(same) is np.ndarray and same.tolist() == [[21], [21]]
