# SPDX-License-Identifier: Apache-2.0
"""The answers of a worker's function: empty results, sizes per row, returned arrays, ragged batches."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading

import numpy as np
import pytest
from conftest import FOUR, broker_at, eventually, in_threads, serving

import ringbatch as rb

FIND = {"inputs": {"x": ("int32", (6,))}, "outputs": {"found": ("int32", ("<=6",)), "twice": ("int32", ("<=6", 2))}}


def wanted(x):
    return [v for v in x if v]


@pytest.mark.parametrize("pad_to", [0, 8])  # outputs written in place, and copied at the end
def test_nothing_found_is_an_answer_and_each_row_has_its_own_number(socket, pad_to):
    @rb.worker(f"find{pad_to}", **FIND, max_batch_size=8, wait_time=0.002, pad_to=pad_to)
    def find(batch):
        for row in range(batch.rows):
            hits = wanted(batch.inputs["x"][row].tolist())
            batch.outputs["found"][row, : len(hits)] = hits
            batch.outputs["twice"][row, : len(hits)] = np.array(hits)[:, None]
            batch.set_row_dims(row, len(hits), len(hits))

    rng = np.random.default_rng(1)
    with serving(find, socket), rb.connect(find.model, socket=socket, wait=60, window=16) as m:
        assert m(np.zeros(6, "int32"))["found"].shape == (0,) and m(np.zeros(6, "int32"))["twice"].shape == (0, 2)
        images = rng.integers(0, 2, (3, 6), dtype="int32")
        images[0], images[1, 0] = 0, 1
        for out in (m(images), m.submit(images).result(60)):
            assert [o.tolist() for o in out["found"]] == [wanted(x) for x in images.tolist()]
            assert [len(o) for o in out["twice"]] == [len(wanted(x)) for x in images.tolist()]
        same = m(np.ones((3, 6), "int32"))["found"]
        assert isinstance(same, np.ndarray) and same.shape == (3, 6)
        with m.request(rows=3) as req:
            req.inputs["x"][...] = images
            views = req.run(timeout=60).outputs["found"]
            assert [v.tolist() for v in views] == [wanted(x) for x in images.tolist()]
        with pytest.raises(rb.Released):
            views[2].sum()
        futures = [(x, m.submit(x)) for x in rng.integers(0, 2, (100, 6), dtype="int32")]
        assert all(f.result(60)["found"].tolist() == wanted(x.tolist()) for x, f in futures)


def test_an_empty_input_is_one(socket):
    @rb.worker("count", inputs={"t": ("int32", ("<=9",))}, outputs={"n": ("int64", ())}, wait_time=0)
    def count(batch):
        return np.full(batch.rows, batch.inputs["t"].shape[1])

    with serving(count, socket), rb.connect("count", socket=socket, wait=60) as m:
        assert m(np.zeros(0, "int32")) == 0 and m([]) == 0 and m(np.zeros(9, "int32")) == 9
        assert m(np.zeros((2, 0), "int32")).tolist() == [0, 0]
        with m.request(shapes={"t": (0,)}) as req:
            assert req.inputs["t"].shape == (0,) and req.run(timeout=60).outputs["n"] == 0
        with pytest.raises(rb.Shape, match=r"0\.\.9"):
            m(np.zeros(10, "int32"))


def test_an_error_about_one_request_fails_that_request_alone(socket):
    together = threading.Barrier(3)

    @rb.worker("sizes", inputs={"x": ("int32", ())}, outputs={"y": ("int32", ("<=4",))}, max_batch_size=3, wait_time=60)
    def sizes(batch):
        assert len(batch.requests) == 3
        batch.outputs["y"][...] = 7
        for row, size in enumerate(batch.inputs["x"]):
            batch.set_row_dims(row, int(size))

    @rb.worker("rows", inputs={"x": ("int32", ())}, outputs={"y": ("int32", ("<=4",))}, max_batch_size=3, wait_time=60)
    def rows(batch):
        return [np.full(n, 7, "int32") for n in batch.inputs["x"]]

    def ask(model, n, results):
        with rb.connect(model, socket=socket, wait=60, window=1) as m:
            together.wait(60)
            try:
                results[n] = m(np.int32(n)).tolist()
            except rb.Failed as e:
                results[n] = str(e)

    for worker in (sizes, rows):
        with serving(worker, socket):
            results: dict = {}
            with in_threads(*(functools.partial(ask, worker.model, n, results) for n in (0, 3, 99))):
                pass
            assert results[0] == [] and results[3] == [7, 7, 7]
            assert "0..4" in results[99] and "99" in results[99]


def test_a_function_may_return_its_outputs(socket):
    @rb.worker("one", **FOUR, max_batch_size=8, wait_time=0.001, pad_to=8)
    def one(batch):
        x = batch.inputs["x"]
        kind = int(x[0, 0])
        if kind == 1:
            return {"y": x + 1}
        if kind == 2:
            return x[: batch.rows] + 1  # without the padding
        if kind == 3:
            return (x + 1).astype("float64")  # of the same kind
        if kind == 4:
            return x[:, :3]
        if kind == 5:
            return {"z": x}
        if kind == 6:
            return (x + 1).astype("complex64")
        if kind == 7:
            batch.outputs["y"][...] = x + 1
            return "done"  # ignored, since the output is written
        if kind == 8:
            return np.ma.masked_array(x, mask=x > 0)
        return x + 1

    with serving(one, socket), rb.connect("one", socket=socket, wait=60) as m:
        for kind in (0, 1, 2, 3, 7):
            for x in (np.full(4, kind, "float32"), np.full((3, 4), kind, "float32")):
                assert (m(x) == x + 1).all()
        for kind, says in ((4, r"expected rows of float32 of shape \(4,\)"), (5, "returned z .* no output 'y'"), (6, "complex64"),
                           (8, "masked array")):
            with pytest.raises(rb.Failed, match=says):
                m(np.full(4, kind, "float32"))

    @rb.worker("two", inputs=FOUR["inputs"], outputs={"a": ("float32", (4,)), "b": ("float32", ())}, wait_time=0)
    def two(batch):
        x = batch.inputs["x"]
        if x[0, 0] == 0:
            return x, x.sum(1)
        if x[0, 0] == 1:
            batch.outputs["a"][...] = x
            return {"b": x.sum(1)}
        return x

    with serving(two, socket), rb.connect("two", socket=socket, wait=60) as m:
        for v in (0, 1):
            out = m(np.full(4, v, "float32"))
            assert (out["a"] == v).all() and out["b"] == 4 * v
        with pytest.raises(rb.Failed, match="return a dict with a, b"):
            m(np.full(4, 2, "float32"))


def by_row(y, value):
    for row in range(len(y)):
        y[row] = value[row]


def onto_zeros(add):
    def road(y, value):
        y[...] = 0
        add(y, value)

    return road


# The ways to write an array into a view of an output.
ROADS: dict = {
    "into the view": lambda y, value: y.__setitem__(..., value), "by row": by_row, "in place": onto_zeros(lambda y, value: y.__iadd__(value)),
    "np.copyto": np.copyto, "fill": lambda y, value: y.fill(value.flat[0]),
    "out=": lambda y, value: np.concatenate([value[:1], value[1:]], out=y),
    "where=": onto_zeros(lambda y, value: np.add(value, np.zeros_like(value), out=y, where=np.ones(y.shape, bool))),
    "reduce": lambda y, value: np.sum(np.stack([value, np.zeros_like(value)]), axis=0, out=y),
    "accumulate": lambda y, value: np.maximum.accumulate(value, out=y),
    "at": onto_zeros(lambda y, value: np.add.at(y, (...,), value)),
}  # fmt: skip

BIG: dict = {  # what an output does not hold, and what is only rounded
    "int32": [2**40 + 5, 0.5, np.nan, -(2**31) - 1], "float32": [1e300, 2**24 + 1, -1e39], "float16": [70000.0, 2049], "uint8": [256, -1],
}  # fmt: skip
FINE: dict = {"int32": [2**31 - 1, -(2**31)], "float32": [0.1, np.inf, 2**24, -np.inf, 1e-300], "float16": [0.1, 2048], "uint8": [np.uint8(255), True]}


@pytest.mark.parametrize("pad_to", [0, 8])  # outputs written in place, and copied at the end
@pytest.mark.parametrize("coroutine", [False, True])
def test_a_value_that_an_output_does_not_hold_fails_its_request(socket, coroutine, pad_to):
    values = {kind: BIG[kind] + FINE[kind] for kind in BIG}
    roads = ["returned"] if coroutine else ["returned", *ROADS]

    def give(batch):
        kind, k, road = batch.inputs["which"][0]
        name = list(BIG)[kind]
        made = {n: np.zeros((batch.rows, 2), n) for n in BIG if n != name}
        value = np.full((batch.rows, 2), values[name][k])
        if roads[road] == "returned":
            return {**made, name: value}
        for n, array in made.items():
            batch.outputs[n][...] = array
        ROADS[roads[road]](batch.outputs[name][: batch.rows], value)

    async def give_later(batch):
        return give(batch)

    how = {"inputs": {"which": ("int32", (3,))}, "outputs": {kind: (kind, (2,)) for kind in BIG}, "max_batch_size": 8, "wait_time": 0}
    worker = rb.worker(f"holds-{coroutine}-{pad_to}", **how, pad_to=pad_to)(give_later if coroutine else give)
    with serving(worker, socket), rb.connect(worker.model, socket=socket, wait=60) as m:
        for road, (kind, name) in itertools.product(range(len(roads)), enumerate(BIG)):
            for k, value in enumerate(values[name]):
                which = np.array([kind, k, road], "int32")
                if roads[road] == "in place" and name.startswith("float") and isinstance(value, int):
                    continue  # the sum is a float64, which is rounded
                if value in FINE[name]:
                    np.testing.assert_array_equal(m(which)[name], np.full(2, value, name))
                else:
                    with pytest.raises(rb.Error, match=f"does not hold|output '{name}' is {name}, the function returned"):
                        m(which)


def test_requests_of_different_sizes_share_a_ragged_batch(socket):
    seen = []

    @rb.worker(
        "ragged", inputs={"jpeg": ("uint8", ("<=4000",)), "k": ("int32", ())}, outputs={"back": ("uint8", ("<=4000",))},
        max_batch_size=8, wait_time=60, ragged=True,
    )  # fmt: skip
    def ragged(batch):
        files = batch.inputs["jpeg"]
        seen.append([len(f) for f in files])
        assert not any(f.flags.writeable for f in files)
        assert batch.ragged and len(files) == batch.rows and batch.inputs["k"].shape == (batch.rows,)
        assert [f.nbytes for f in files] == [batch.input_shape(i, "jpeg")[0] for i in range(batch.rows)]
        with pytest.raises(rb.Shape, match="ragged"):
            batch.input_run("jpeg", 0)
        return [f[::-1] for f in files]

    sizes = (0, 3, 4000, 17, 17, 1234, 1, 999)
    files = [os.urandom(n) for n in sizes]
    with serving(ragged, socket), rb.connect("ragged", socket=socket, wait=60, window=16) as m:
        with rb.connect("ragged", socket=socket):  # an idle client: the broker waits for a full batch
            futures = [m.submit(f, np.int32(i)) for i, f in enumerate(files)]
            for f, future in zip(files, futures):
                assert future.result(120).tobytes() == f[::-1]
        assert seen == [list(sizes)] or sorted(seen[0]) == sorted(sizes)

        @rb.worker("ragged", inputs={"jpeg": ("uint8", ("<=4000",)), "k": ("int32", ())}, outputs={"back": ("uint8", ("<=4000",))})
        def plain(batch):
            pass

        with pytest.raises(rb.Invalid, match="ragged"):
            plain.run(socket=socket)


def test_a_ragged_model_has_neither_buckets_nor_padding(socket):
    for extra in ({"buckets": {"t.0": [8, 64]}}, {"pad_to": 64}):

        @rb.worker("never", inputs={"t": ("int32", ("<=64",))}, outputs={"n": ("int64", ())}, ragged=True, **extra)
        def never(batch):
            pass

        with pytest.raises(rb.Invalid, match="its own sizes"):
            never.run(socket=socket)


TWO = {"inputs": {"x": ("float32", ())}, "outputs": {"y": ("float32", ()), "n": ("int32", ("<=3",))}}


def forgetful(batch):
    """Answers 0 completely, and leaves an output out for other numbers."""
    way = int(batch.inputs["x"][0])
    both = {"y": np.full(batch.rows, 7, "float32"), "n": np.full((batch.rows, 3), 7, "int32")}
    if way == 1:
        return None
    if way == 2:
        return {"y": both["y"]}
    if way == 3:
        return {**both, "y": None}
    if way == 4:
        batch.outputs["y"][...] = 1
        return 5
    if way == 5:  # this output has no elements
        for row in range(batch.rows):
            batch.set_row_dims(row, 0)
        return {"y": both["y"]}
    if way == 6:  # no request is left
        batch.fail_all("none of them")
        return None
    if way == 7:
        return batch.outputs
    if way == 8:  # looks at the names only
        assert "y" in batch.outputs and "q" not in batch.outputs and batch.outputs.get("q") is None and batch.outputs.keys() == both.keys()
        return {"n": both["n"]}
    return both


async def forgetful_coroutine(batch):
    return forgetful(batch)


@pytest.mark.parametrize("function", [forgetful, forgetful_coroutine])
def test_an_output_that_was_neither_returned_nor_written_fails_the_batch_by_name(socket, function):
    worker = rb.worker(function.__name__, **TWO, max_batch_size=4, wait_time=0)(function)
    with serving(worker, socket), rb.connect(worker.model, socket=socket, wait=60) as m:
        for way, missing in [(1, "y"), (2, "n"), (3, "y"), (4, "n"), (7, "y"), (8, "y")]:
            assert m(np.float32(0))["y"] == 7
            for ask in (m, lambda x: m.submit(x).result(60)):
                with pytest.raises(rb.Failed, match=rf'no output \'{missing}\': return .*, or write batch.outputs\["{missing}"\]'):
                    ask(np.float32(way))
        assert m(np.float32(5))["n"].size == 0
        with pytest.raises(rb.Failed, match="none of them"):
            m(np.float32(6))


@pytest.mark.parametrize("pad_to", [0, 4])
def test_debug_finds_outputs_that_were_not_written(socket, pad_to):
    @rb.worker(f"lazy{pad_to}", **FOUR, max_batch_size=4, wait_time=0, pad_to=pad_to, debug=True)
    def lazy(batch):
        kind = int(batch.inputs["x"][0, 0])
        if kind == 1:
            batch.outputs["y"][:, :3] = 1
        elif kind == 2:
            batch.outputs["y"][...] = 1
        else:
            batch.outputs["y"]

    with serving(lazy, socket), rb.connect(lazy.model, socket=socket, wait=60) as m:
        assert (m(np.full(4, 2, "float32")) == 1).all()
        for kind in (0, 1):
            with pytest.raises(rb.Failed, match="output 'y' of this request was not written"):
                m(np.full(4, kind, "float32"))
        assert (m(np.full(4, 2, "float32")) == 1).all()


def test_worker_and_broker_log_that_the_model_has_another_policy(at, caplog, capfd):
    @rb.worker("policed", **FOUR, max_batch_size=8, wait_time=0.001)
    def first(batch):
        return batch.inputs["x"]

    @rb.worker("policed", **FOUR, version="any", max_batch_size=4, wait_time=0.001)
    def second(batch):
        return batch.inputs["x"]

    with broker_at(at, "--log-level", "warn"), serving(first, at), rb.connect("policed", socket=at, wait=60) as m:
        with caplog.at_level(logging.WARNING, "ringbatch"), serving(second, at):
            eventually(lambda: len(m.stats()["workers"]) == 2)
        assert [r.message for r in caplog.records] == ["model policed has another policy than this worker: max_batch_size is 8, this "
            "worker asked for 4"]
    assert "worker asked for another policy than the model has" in capfd.readouterr().err


def test_a_python_worker_has_the_name_of_its_environment(socket, monkeypatch):
    monkeypatch.setenv("RINGBATCH_WORKER_NAME", "camera 3")

    @rb.worker("named", **FOUR, wait_time=0)
    def named(batch):
        return batch.inputs["x"]

    with serving(named, socket), rb.connect("named", socket=socket, wait=60) as m:
        assert [w["name"] for w in m.stats()["workers"]] == ["camera 3"]
