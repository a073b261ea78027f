# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import warnings

import numpy as np
import pytest
from conftest import FOUR, serving

import ringbatch as rb
from ringbatch.worker import ring


def test_a_function_of_batches(socket):
    @rb.worker("double", **FOUR, max_batch_size=8, wait_time=0.005)
    def double(batch):
        assert batch.inputs["x"].shape == (batch.rows, 4) and list(batch.outputs) == ["y"]
        assert sum(r.rows for r in batch.requests) == batch.rows == batch.padded
        assert sum(r.rows for r in batch.runs) == batch.rows == len(batch.slots)
        batch.outputs["y"][...] = 2 * batch.inputs["x"]

    assert double.__name__ == "double" and "double" in repr(double)
    with serving(double, socket), rb.connect("double", socket=socket, wait=60, window=32) as m:
        assert m.max_batch_size == 8 and m.wait_time == 0.005
        futures = [m.submit(np.full((1 + i % 3, 4), i, "float32")) for i in range(300)]
        for i, f in enumerate(futures):
            y = f.result(60)
            assert y.shape == (1 + i % 3, 4) and (y == 2 * i).all()


def test_a_class_serves_a_second_model_under_another_name(socket):
    @rb.worker("double", **FOUR)
    class Times:
        def setup(self):
            self.by = 2

        def __call__(self, batch):
            return self.by * batch.inputs["x"]

    again = rb.worker("again", **FOUR)(Times)
    with serving(Times, socket), serving(again, socket), rb.connect("again", socket=socket, wait=60) as m:
        assert m(np.ones(4, "float32")).tolist() == 4 * [2]


def test_scattered_rows_are_gathered_and_put_back(socket):
    """Rows of several clients, with gaps between them: every client gets its own."""
    seen = set()

    @rb.worker("plus", **FOUR, max_batch_size=16, wait_time=0.02)
    def plus(batch):
        seen.add(batch.contiguous)
        x, y = batch.inputs["x"], batch.outputs["y"]
        assert len(x) == len(y) == batch.rows
        y[...] = x + 1
        for i, r in enumerate(batch.runs):  # the same rows without a copy
            assert (batch.input_run("x", i) == x[r.row : r.row + r.rows]).all()

    with serving(plus, socket):
        clients = [rb.connect("plus", socket=socket, wait=60, window=4) for _ in range(6)]
        with concurrent.futures.ThreadPoolExecutor(6) as pool:

            def use(k):
                for i in range(30):
                    rows = 1 + (i + k) % 3
                    x = np.random.rand(rows, 4).astype("float32")
                    assert (clients[k](x) == x + 1).all()

            list(pool.map(use, range(6)))
        for c in clients:
            c.close()
    assert False in seen  # some batches were scattered


def test_requests_in_runs_that_the_function_did_not_take_fail_alone(socket):
    @rb.worker("runs", **FOUR, max_batch_size=2, wait_time=60)
    def runs(batch):
        for i in range(1 if batch.inputs["x"].min() > 0 else len(batch.runs)):
            batch.output_run("y", i)[:] = batch.input_run("x", i)

    with serving(runs, socket), rb.connect("runs", socket=socket, wait=60, window=3) as m, rb.connect("runs", socket=socket, window=1):
        for value in (0, 1):  # all runs, then the first one
            reqs = [m.request() for _ in range(3)]
            for req in (reqs[0], reqs[2]):
                req.inputs["x"][:] = value
                req.commit()
            assert (reqs[0].wait(60).outputs["y"] == value).all()
            if value:
                with pytest.raises(rb.Failed, match="did not write output 'y' of row 1 in a batch of 2"):
                    reqs[2].wait(60)
            for req in reqs:
                req.release()


@pytest.mark.parametrize("gap", [False, True])  # in place, and gathered
def test_inputs_are_read_only(socket, gap):
    @rb.worker(f"scale{gap}", **FOUR, max_batch_size=2, wait_time=60)
    def scale(batch):
        assert batch.contiguous != gap
        for x in (batch.inputs["x"], batch.inputs["x"][0], batch.input_run("x", 0)):
            assert not x.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                x /= 255
        return batch.inputs["x"] / 255

    with serving(scale, socket), rb.connect(scale.model, socket=socket, wait=60, window=3) as m:
        requests = [m.request() for _ in range(3)]
        both = [requests[0], requests[1 + gap]]
        for r in requests:
            r.inputs["x"][...] = 255
        m.commit(both)
        assert [r.wait(60).outputs["y"].tolist() for r in both] == [[1] * 4] * 2
        for r in requests:
            r.release()


def test_padding_rows_are_zero_and_not_answered(socket):
    shapes = set()

    @rb.worker("padded", **FOUR, max_batch_size=4, wait_time=0, pad_to=4)
    def padded(batch):
        x = batch.inputs["x"]
        shapes.add(x.shape)
        assert (x[batch.rows :] == 0).all() and batch.padded == 4
        batch.outputs["y"][...] = x + 1

    with serving(padded, socket), rb.connect("padded", socket=socket, wait=60) as m:
        for i in range(20):
            assert (m(np.full((1 + i % 2, 4), i, "float32")) == i + 1).all()
    assert shapes == {(4, 4)}


def test_failures_carry_the_traceback_and_the_worker_goes_on(socket):
    @rb.worker("picky", **FOUR, max_batch_size=4, wait_time=0)
    def picky(batch):
        for i, r in enumerate(batch.requests):
            first = batch.inputs["x"][r.row, 0]
            if first == 1:
                batch.fail(i, "one is refused")
            if first == 2:
                batch.fail(i, KeyError("two"))
            if first == 4:
                batch.fail(i, rb.QueueFull("another server's"))
            if first == 5:
                batch.fail(i, rb.Shape("no request ends with that"))
            if first == 3:
                raise ValueError("three is too much " + "x" * 3000)
        batch.outputs["y"][...] = batch.inputs["x"]

    def x(v):
        return np.full(4, v, "float32")

    with serving(picky, socket), rb.connect("picky", socket=socket, wait=60) as m:
        for _ in range(3):
            assert (m(x(0)) == 0).all()
            with pytest.raises(rb.Failed, match=r"^one is refused$"):
                m(x(1))
            with pytest.raises(rb.Failed, match="KeyError: 'two'"):
                m(x(2))
            with pytest.raises(rb.QueueFull):
                m(x(4))
            with pytest.raises(rb.Failed, match="no request ends with that"):
                m(x(5))
            with pytest.raises(rb.Failed) as e:
                m(x(3))
            line, trace = str(e.value).split("\n", 1)
            assert line.startswith("ValueError: three is too much xxx") and line.endswith("x...") and len(line) == 320
            assert trace.startswith("...") and trace.endswith("x" * 100) and len(str(e.value)) == 1024


def test_the_first_line_of_a_failure_says_all():
    def said(text):
        try:
            raise ValueError(text)
        except ValueError as e:
            whole = ring._reason(e).decode()
            assert len(whole.encode()) <= 1024
            assert ring._reason(ValueError(text)).decode().split("\n")[0].startswith("ValueError")  # without a traceback
            return whole.split("\n", 1)

    assert said("two\nlines")[0] == "ValueError: two lines"
    assert "raise ValueError(text)" in said("a\0b")[1] and said("a\0b")[0] == "ValueError: a b"
    assert said("")[0] == "ValueError"
    assert said("é" * 600)[0] == "ValueError: " + "é" * 152 + "..."
    assert ring._reason("x" * 2000) == b"x" * 1021 + b"..." and ring._reason("two\nlines") == b"two\nlines"


class Mute(Exception):
    def __str__(self):
        raise RuntimeError


def test_every_reason_of_a_failure_has_a_text():
    assert [ring._reason(what) for what in (404, None, {"code": 404})] == [b"404", b"None", b"{'code': 404}"]
    assert ring._reason(Mute()).startswith(b"Mute: <Mute ")


def test_the_first_line_of_a_failure_has_no_places_and_no_notes():
    with pytest.raises(SyntaxError) as e:
        compile("1 +", "/home/somebody/model.py", "exec")
    line = ring._reason(e.value).split(b"\n")[0]
    assert line.startswith(b"SyntaxError: ") and b"/home" not in line
    noted = ValueError("bad")
    noted.__notes__ = ["of the host"]
    assert ring._reason(noted) == b"ValueError: bad"


def test_views_of_a_batch_end_with_it(socket):
    kept = []

    @rb.worker("keeper", inputs={"x": ("float32", (1 << 16,))}, outputs={"y": ("float32", (1 << 16,))}, wait_time=0)
    def keeper(batch):
        kept.append(batch.inputs["x"])
        kept.append(np.asarray(batch.inputs["x"]))
        batch.outputs["y"][...] = batch.inputs["x"]

    with serving(keeper, socket), rb.connect("keeper", socket=socket, wait=60) as m:
        m(np.zeros(1 << 16, "float32"))
        m(np.zeros(1 << 16, "float32"))  # the first batch is over for sure
        with pytest.raises(rb.Released):
            kept[0].sum()
    assert kept[1].sum() == kept[1].sum()  # stale, not a crash, also after the worker has left


@pytest.mark.parametrize("pad_to", [0, 4])
def test_small_inputs_keep_their_values_after_their_batch(socket, pad_to):
    kept = []

    @rb.worker(f"notes{pad_to}", **FOUR, max_batch_size=4, wait_time=0, pad_to=pad_to)
    def notes(batch):
        kept.append(batch.inputs["x"])
        return kept[-1]

    with serving(notes, socket), rb.connect(notes.model, socket=socket, wait=60) as m:
        for i in range(20):
            assert (m(np.full(4, i, "float32")) == i).all()
    assert [x[0].tolist() for x in kept] == [[i] * 4 for i in range(20)] and not any(x.flags.writeable for x in kept)


def test_several_inputs_and_outputs_of_all_types(socket):
    types = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
    specs = {t: (t, (3,)) for t in types} | {"bits": ("bfloat16", (2,)), "scalar": (np.float32, ())}

    @rb.worker("types", inputs=specs, outputs={"out_" + k: v for k, v in specs.items()}, wait_time=0)
    def types_model(batch):
        for name in specs:
            batch.outputs["out_" + name][...] = batch.inputs[name]

    with serving(types_model, socket), rb.connect("types", socket=socket, wait=60) as m:
        inputs = {t: np.ones(3, t) for t in types} | {"bits": np.array([0x3F80, 0], "uint16"), "scalar": np.float32(2.5)}
        out = m(**inputs)
        assert set(out) == {"out_" + k for k in specs}
        out["out_bits"] = out["out_bits"].view("uint16")
        for k, v in inputs.items():
            assert out["out_" + k].dtype == v.dtype and (out["out_" + k] == v).all()
        rows = {k: np.stack([v, v]) for k, v in inputs.items()}
        assert m(**rows)["out_scalar"].tolist() == [2.5, 2.5]
        rows["int8"] = rows["int8"][:1]
        with pytest.raises(rb.Rows, match="'int8' has 1 rows"):
            m(**rows)


def test_variable_dimensions_and_buckets(socket):
    @rb.worker(
        "words",
        inputs={"t": ("int32", ("<=64",))},
        outputs={"u": ("int32", ("<=64",)), "n": ("int64", ())},
        max_batch_size=8,
        wait_time=0.002,
        buckets={"t.0": [8, 64]},
    )
    def words(batch):
        t, u = batch.inputs["t"], batch.outputs["u"]
        assert t.shape[1] in (8, 64) and u.shape == (batch.rows, 64)
        for r in batch.requests:
            ((n,),) = {batch.input_shape(row, "t") for row in range(batch.rows)[r.slice]}
            assert r.dims == (n,) and (t[r.slice, n:] == 0).all()
            u[r.slice, :n] = t[r.slice, :n] + 1
            batch.outputs["n"][r.slice] = n
            for row in range(batch.rows)[r.slice]:
                batch.set_row_dims(row, n)

    with serving(words, socket), rb.connect("words", socket=socket, wait=60, window=16) as m:
        for n in (1, 5, 8, 9, 64):
            out = m(np.arange(n, dtype="int32"))
            assert out["u"].tolist() == list(range(1, n + 1)) and out["n"] == n
        futures = [(n, m.submit(np.full((2, n), n, "int32"))) for n in range(1, 65)]
        for n, f in futures:
            out = f.result(60)
            assert out["u"].shape == (2, n) and (out["u"] == n + 1).all() and out["n"].tolist() == [n, n]
        with m.request(shapes={"t": (5,)}) as req:
            assert req.inputs["t"].shape == (8,)  # the bucket
            req.inputs["t"][:5] = 1
            assert req.run().outputs["u"].tolist() == [2] * 5
        with pytest.raises(rb.Shape):
            m(np.zeros(65, "int32"))
        with pytest.raises(rb.Shape, match=r"0\.\.64"):
            m(np.zeros((2, 65), "int32"))


def test_an_input_and_an_output_of_the_same_name(socket):
    same = {"x": ("float32", (4,)), "n": ("int32", ("<=4",))}

    @rb.worker("same-name", inputs=same, outputs=same, max_batch_size=8, wait_time=0)
    def double(batch):
        for name in batch.inputs:
            batch.outputs[name][...] = 0
            batch.outputs[name][:, : batch.inputs[name].shape[1]] = 2 * batch.inputs[name]

    x, n = np.arange(4, dtype="float32"), np.arange(4, dtype="int32")
    with serving(double, socket), rb.connect("same-name", socket=socket, wait=60) as m:
        out = m(x, n)
        assert (out["x"] == 2 * x).all() and (out["n"] == 2 * n).all()
        with m.request() as req:
            req.inputs["x"][...], req.inputs["n"][...] = x, n
            req.run(timeout=60)
            assert (req.outputs["x"] == 2 * x).all() and (req.outputs["n"] == 2 * n).all()


@pytest.mark.parametrize("pad_to", [0, 8])  # outputs written in place, and copied at the end
def test_outputs_with_inner_variable_dimensions(socket, pad_to):
    name = f"boxes{pad_to}"

    @rb.worker(
        name,
        inputs={"x": ("float32", (2, "<=5", "<=6"))},
        outputs={"y": ("float32", (2, "<=5", "<=6")), "n": ("uint8", ("<=3", 2))},
        max_batch_size=8,
        wait_time=0.002,
        pad_to=pad_to,
    )
    def boxes(batch):
        for r in batch.requests:
            _, h, w = batch.input_shape(r.slice.start, "x")
            batch.outputs["y"][r.slice, :, :h, :w] = batch.inputs["x"][r.slice] + 1
            batch.outputs["n"][r.slice, :2] = [[h, w], [w, h]]
            for row in range(batch.rows)[r.slice]:
                batch.set_row_dims(row, h, w, 2)

    rng = np.random.default_rng(0)
    with serving(boxes, socket), rb.connect(name, socket=socket, wait=60, window=32) as m:
        for h, w in ((1, 1), (3, 4), (5, 6), (5, 2), (2, 6)):
            for shape in ((2, h, w), (3, 2, h, w)):
                x = rng.standard_normal(shape, dtype="float32")
                for out in (m(x), *(f.result(60) for f in [m.submit(x) for _ in range(5)])):
                    assert out["y"].shape == x.shape and (out["y"] == x + 1).all()
                    assert (out["n"] == [[h, w], [w, h]]).all()


def test_outputs_that_are_assigned_and_not_written(socket):
    @rb.worker("assigns", **FOUR, max_batch_size=4, wait_time=0)
    def assigns(batch):
        if batch.inputs["x"][0, 0] == 2:
            batch.outputs["y"] = batch.inputs["x"] + 1
        if batch.inputs["x"][0, 0] == 3:
            return np.add(batch.inputs["x"], 1, out=batch.output_run("y", 0))
        return np.add(batch.inputs["x"], 1, out=batch.outputs["y"])

    with serving(assigns, socket), rb.connect("assigns", socket=socket, wait=60) as m:
        for good in (0, 3):
            assert (m(np.full(4, good, "float32")) == good + 1).all()
        with pytest.raises(rb.Failed, match=r"\['y'\]\[\.\.\.\] = value"):
            m(np.full(4, 2, "float32"))
        with m.request() as req, pytest.raises(TypeError, match=r"\['x'\]\[\.\.\.\] = value"):
            req.inputs["x"] = np.zeros(4, "float32")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"wait_tme": 1}, r'unknown key "wait_tme" \(did you mean wait_time\?\); known are ageing, .*wait_time'),
        ({"wait_time": "5 ms"}, r'"5 ms" is not a duration: .* \(did you mean 5ms\?\), or auto'),
        ({"preferred_sizes": [2, 4]}, "did you mean preferred_batch_sizes"),
        ({"wait_time": "soon"}, 'wait_time=soon: "soon" is not a duration: write 5ms, 1.5s, or seconds as a number'),
        ({"lease": -1}, "lease=-1: must not be negative"),
        ({"max_batch_size": 0}, "max_batch_size=0: must be a number, 1"),
        ({"max_batch_size": 1.5}, "max_batch_size=1.5: must be a number"),
        ({"ragged": "perhaps"}, "must be true or false"),
        ({"no_worker": "ignore"}, "must be wait or refuse"),
        ({"preferred_batch_sizes": ["a"]}, "must be numbers, like 8,16,32"),
        ({"max_queue": {1: "x"}}, "max_queue.1=x: must be a number"),
        ({"buckets": [[8, 512]]}, "say which: buckets.INPUT.DIMENSION"),
        ({"buckets": {"t.1": [512]}}, "no such variable dimension of an input; there are 1: t.0"),
        ({"buckets": {"t.0": [8, 64]}}, "the last one must be the dimension's maximum, 512"),
        ({"max_queue": {7: 1}, "priorities": 2}, "max_queue.7=1: no such priority level, the model has 0..1"),
    ],
)
def test_a_wrong_setting_is_refused_by_the_decorator_or_the_broker(socket, settings, says):
    with pytest.raises(rb.Invalid, match=says):
        worker = rb.worker("bad", inputs={"t": ("i32", ("<=512",))}, outputs={"y": ("f32", (1,))}, **settings)(lambda batch: None)
        worker.run(socket=socket)


def test_settings_are_numbers_texts_lists_or_tables(socket):
    @rb.worker(
        "set", inputs={"t": ("i32", ("<=512",))}, outputs={"y": ("i32", (1,))}, max_batch_size="4", wait_time="3ms", lease=20, slots=64,
        preferred_batch_sizes=(2, 4), preserve_order=True, buckets={"t.0": [8, 512]}, max_queue={1: 100}, ageing=None,
    )  # fmt: skip
    def worker(batch):
        batch.outputs["y"][...] = 1

    with serving(worker, socket), rb.connect("set", socket=socket, wait=60) as m:
        assert m.max_batch_size == 4 and m.wait_time == 0.003 and m._core.info.levels == 2 and m._core.info.slots == 64
        with m.request(shapes={"t": (3,)}) as req:
            assert req.inputs["t"].shape == (8,)


def test_shapes_of_a_request_are_checked(socket):
    @rb.worker("shapes", inputs={"t": ("int32", (2, "<=8")), "x": ("float32", (4,))}, outputs={"y": ("f32", (1,))})
    def worker(batch):
        pass

    with serving(worker, socket), rb.connect("shapes", socket=socket, wait=60) as m:
        with m.request(shapes={"t": (2, 3), "x": (4,)}) as req:
            assert req.inputs["t"].shape == (2, 3)
        with pytest.raises(rb.Invalid, match="no input tt; there are t, x"):
            m.request(shapes={"tt": (2, 3)})
        for bad in ({"t": (3, 3)}, {"t": (3,)}, {"x": (5,)}, {"t": (2, 9)}):
            with pytest.raises(rb.Shape):
                m.request(shapes=bad)


def test_large_batches_are_gathered_by_several_threads_while_the_one_before_runs(socket):
    shapes: list[int] = []

    @rb.worker("large", inputs={"x": ("float32", (1 << 16,)), "n": ("int32", (4,))}, outputs={"y": ("float32", (4,))}, max_batch_size=8,
        wait_time=0.005, gather_threads=3)
    def large(batch) -> None:
        a, n = batch.inputs["x"], batch.inputs["n"]
        shapes.append(len(a))
        for i in range(batch.rows):
            batch.outputs["y"][i] = a[i, 0], a[i, 1 << 15], a[i, -1], n[i, 0]
        if n[0, 1]:
            raise ValueError("this batch fails, the next was being gathered")

    def call(m: rb.Model, k: int) -> None:
        for i in range(25):
            v, fails = 1000 * k + i, int(i % 9 == 8)
            with contextlib.suppress(rb.Failed):
                assert (m(np.full(1 << 16, v, "f4"), np.array([v, fails, 0, 0], "i4")) == v).all()

    with serving(large, socket), rb.connect("large", socket=socket, window=32, wait=60) as m:
        with concurrent.futures.ThreadPoolExecutor(24) as pool:
            list(pool.map(functools.partial(call, m), range(24)))
        assert max(shapes) > 4


def test_a_worker_is_declared_from_samples():
    made = rb.worker("m", like={"x": np.zeros((2, 3), "float32"), "n": 1}, returns={"y": np.float16(0)})(print)
    assert made.signature == "x:f32[2,3] n:i64[] -> y:f16[]"
    for wrong in ({"returns": {"y": 1}}, {"inputs": "x:f32[1]", "like": {"x": 1}, "returns": {"y": 1}}):
        with pytest.raises(rb.Invalid, match="say the inputs once: inputs="):
            rb.worker("m", **wrong)
    with pytest.raises(rb.Invalid, match="tensor 'x': dtype '<U2'"):
        rb.worker("m", like={"x": "no"}, returns={"y": 1})


def test_a_decorator_warns_of_small_batches():
    tensors = {"inputs": "t:i64[<=512]", "outputs": "y:f32[2]"}
    with pytest.warns(UserWarning, match=r"the size of 't' varies, .* Write packed=\['t'\], ragged=True or buckets=\"auto\"") as seen:
        rb.worker("m", **tensors)
    assert seen[0].filename == __file__
    with pytest.warns(UserWarning, match="Write ragged=True"):  # rows of two sizes cannot be packed
        rb.worker("m", inputs="t:i64[<=512] x:f32[<=8]", outputs="y:f32[2]")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for settings in ({"buckets": "auto"}, {"ragged": False}, {"packed": ["t"]}, {"max_batch_size": 1}):
            rb.worker("m", **tensors, **settings)
    with pytest.raises(rb.Invalid, match="packed rows follow one another without padding, so there are no buckets"):
        rb.worker("m", **tensors, packed=["t"], buckets="auto")
