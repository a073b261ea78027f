# SPDX-License-Identifier: Apache-2.0
"""ringbatch.onnx: answers equal the results of ONNX Runtime for the row alone."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import broker_at, serving, until_stopped

import ringbatch as rb

ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
import graphs  # noqa: E402
import onnx  # noqa: E402
from onnx import TensorProto as T  # noqa: E402
from onnx import helper as h  # noqa: E402
from onnxruntime.capi import onnxruntime_pybind11_state as state  # noqa: E402

from ringbatch.onnx import serving as ro  # noqa: E402
from ringbatch.onnx import session_lane  # noqa: E402
from ringbatch.worker import axes as sizes  # noqa: E402


@pytest.fixture
def serve(socket):
    """Serves a file in a thread of this process."""
    with contextlib.ExitStack() as stack:
        yield lambda path, name, **options: stack.enter_context(until_stopped(ro.serve, path, name, socket=socket, threads=1, **options))


def alone(path, **feed):
    return ort.InferenceSession(path).run(None, feed)


def ask_at_once(socket, model, requests, clients=4):
    """Sends requests from several clients, so that they share batches; returns the answers in order."""
    got = [None] * len(requests)

    def ask(first):
        with rb.connect(model, socket=socket, wait=60) as c:
            mine = range(first, len(requests), clients)
            pending = [(i, c.submit(**r) if isinstance(r := requests[i], dict) else c.submit(r)) for i in mine]
            for i, r in pending:
                answer = r.result()
                got[i] = {k: np.array(v) for k, v in answer.items()} if isinstance(answer, dict) else np.array(answer)

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        list(pool.map(ask, range(clients)))
    return got


def test_the_signature_comes_from_the_graph_and_batches_equal_rows_alone(serve, socket, tmp_path):
    path = graphs.conv(tmp_path / "conv.onnx")
    serve(path, "conv", max_batch_size=8)
    x = np.random.default_rng(1).standard_normal((40, 3, 8, 8)).astype("float32")
    want = alone(path, x=x)[0]
    for y, z in zip(ask_at_once(socket, "conv", list(x)), want):
        np.testing.assert_allclose(y.reshape(-1), z, rtol=1e-4, atol=1e-5)


def test_rows_of_one_request_are_read_and_written_in_the_ring(serve, socket, tmp_path, monkeypatch):
    path = graphs.conv(tmp_path / "conv.onnx")
    lanes = []
    monkeypatch.setattr(ro, "SessionLane", lambda *a: lanes.append(lane := session_lane.SessionLane(*a)) or lane)
    serve(path, "placed", max_batch_size=8)
    x = np.random.default_rng(1).standard_normal((5, 3, 8, 8)).astype("float32")
    with rb.connect("placed", socket=socket, wait=60) as c:
        np.testing.assert_allclose(c.infer(x), alone(path, x=x)[0], rtol=1e-4, atol=1e-5)
    assert sum(lane.in_place for lane in lanes) == 1


def test_the_next_batch_is_gathered_while_one_computes_and_only_one_does(serve, socket, tmp_path, monkeypatch):
    path, requests = graphs.conv(tmp_path / "conv.onnx"), 8
    changed, gathered, begun, computing = threading.Condition(), 0, 0, 0

    class Watched(session_lane.SessionLane):
        def gather(self, batch):
            nonlocal gathered
            super().gather(batch)
            with changed:
                gathered += 1
                changed.notify_all()

        def compute(self):
            nonlocal begun, computing
            with changed:
                begun, computing = begun + 1, computing + 1
                assert computing == 1
                assert changed.wait_for(lambda: gathered > min(begun, requests - 1), 60), "the next batch was not gathered"
                assert computing == 1
                computing -= 1
            super().compute()

    monkeypatch.setattr(ro, "SessionLane", Watched)
    serve(path, "ahead", max_batch_size=1)
    x = np.random.default_rng(1).standard_normal((requests, 3, 8, 8)).astype("float32")
    with rb.connect("ahead", socket=socket, wait=60, window=requests) as c:
        answers = [r.result() for r in [c.submit(row) for row in x]]
    np.testing.assert_allclose(np.stack([np.reshape(y, -1) for y in answers]), alone(path, x=x)[0], rtol=1e-4, atol=1e-5)


def test_where_sizes_vary_batches_that_are_not_full_compute_at_once(serve, socket, tmp_path, monkeypatch):
    path = graphs.encoder(tmp_path / "enc.onnx")
    begun, both = threading.Event(), threading.Barrier(2)

    class Watched(session_lane.SessionLane):
        def compute(self):
            begun.set()
            both.wait(60)
            super().compute()

    monkeypatch.setattr(ro, "SessionLane", Watched)
    serve(path, "partly", dims={"seq": "<=64"}, mask="mask", max_batch_size=8)
    with rb.connect("partly", socket=socket, wait=60, window=2) as c:
        first = c.submit(np.arange(5))
        assert begun.wait(60)
        for n, r in ((5, first), (20, c.submit(np.arange(20)))):
            want = alone(path, tokens=np.arange(n)[None], mask=np.ones((1, n), "int64"))[1][0]
            np.testing.assert_allclose(np.reshape(r.result()["pooled"], -1), want, rtol=1e-3, atol=1e-4)


def test_a_batch_that_the_session_refuses_fails_and_the_others_are_answered(serve, socket, tmp_path):
    path = graphs.encoder(tmp_path / "enc.onnx")
    serve(path, "refused", dims={"seq": "<=16"}, mask="mask", max_batch_size=1)
    good, bad = np.arange(5), np.array([10**6])  # not in the table
    want = alone(path, tokens=good[None], mask=np.ones((1, 5), "int64"))[1][0]
    with rb.connect("refused", socket=socket, wait=60, window=8) as c:
        asked = [c.submit(tokens) for tokens in [good, bad, good, bad, bad, good]]
        for r, answered in zip(asked, [True, False, True, False, False, True]):
            if answered:
                np.testing.assert_allclose(np.reshape(r.result()["pooled"], -1), want, rtol=1e-3, atol=1e-4)
            else:
                with pytest.raises(rb.Error, match="indices"):
                    r.result()


def test_taken_batches_are_computed_when_the_broker_goes_and_the_session_is_served_again(tmp_path, at, monkeypatch):
    path = graphs.conv(tmp_path / "conv.onnx")
    gathered, gone, computed = threading.Semaphore(0), threading.Event(), threading.Semaphore(0)

    class Watched(session_lane.SessionLane):
        def gather(self, batch):
            super().gather(batch)
            gathered.release()

        def compute(self):
            assert gone.wait(60)
            super().compute()
            computed.release()

    monkeypatch.setattr(ro, "SessionLane", Watched)
    x = np.ones((3, 8, 8), "float32")
    with until_stopped(ro.serve, path, "amid", socket=at, threads=1, wait=60, max_batch_size=1), contextlib.ExitStack() as end:
        end.callback(gone.set)
        with broker_at(at) as broker, rb.connect("amid", socket=at, wait=60, window=2) as c:
            asked = [c.submit(x), c.submit(x)]
            for _ in asked:
                assert gathered.acquire(timeout=60)
            broker.kill()
            broker.wait(60)
            gone.set()
            for _ in asked:
                assert computed.acquire(timeout=60)
        with broker_at(at), rb.connect("amid", socket=at, wait=60) as c:
            np.testing.assert_allclose(np.reshape(c.infer(x), -1), alone(path, x=x[None])[0][0], rtol=1e-4, atol=1e-5)


LENGTHS = [1, 3, 15, 16, 17, 31, 40, 64, 5, 33]


@pytest.mark.parametrize("mask", ["made", "sent", "none"])  # by the worker, by clients; without one there are no buckets
def test_lengths_that_vary_come_back_as_if_alone(serve, socket, tmp_path, mask):
    path = graphs.encoder(tmp_path / "enc.onnx", mask=mask != "none")
    serve(path, mask, dims={"seq": "<=64"}, max_batch_size=8, **({"mask": "mask"} if mask == "made" else {}))
    tokens = [np.random.default_rng(2).integers(1, 50, n) for n in LENGTHS]
    whole = [{"tokens": t, "mask": np.ones(len(t), "int64")} if mask != "none" else {"tokens": t} for t in tokens]
    requests = whole if mask == "sent" else [{"tokens": t} for t in tokens]
    for t, row, y in zip(tokens, whole, ask_at_once(socket, mask, requests)):
        states, pooled = alone(path, **{name: x[None] for name, x in row.items()})
        assert y["states"].reshape(-1, 16).shape == (len(t), 16)  # its own size, not the bucket's
        np.testing.assert_allclose(y["states"].reshape(len(t), 16), states[0], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(y["pooled"].reshape(-1), pooled[0], rtol=1e-3, atol=1e-4)


def test_powers_of_two_end_with_the_largest_size():
    assert sizes.powers_of_two(512) == (16, 32, 64, 128, 256, 512)
    assert sizes.powers_of_two(500) == (16, 32, 64, 128, 256, 500)
    assert sizes.powers_of_two(16) == (16,)
    assert sizes.powers_of_two(3) == (3,)


def test_a_model_gives_as_many_outputs_at_every_size():
    axes = sizes.Axes([sizes.Input("x", "f32", (8,), (0,), ("n",))], None)
    for small, large in [(2, 1), (1, 2)]:
        with pytest.raises(rb.Invalid, match=f"there are {small} outputs at size 6 and {large} at size 8"):
            sizes.probe_outputs(lambda point: [(4,)] * (large if point == (8,) else small), axes)


def test_the_brokers_automatic_buckets_are_the_warmed_up_sizes(socket):
    @rb.worker("auto-buckets", inputs={"t": ("int32", ("<=500",))}, outputs={"y": ("int32", ())}, buckets="auto")
    def size(batch):
        batch.outputs["y"][:] = batch.inputs["t"].shape[1]

    with serving(size, socket), rb.connect("auto-buckets", socket=socket, wait=60) as c:
        seen = {int(c.infer(np.zeros(n, "int32"))) for n in range(1, 501)}
    assert tuple(sorted(seen)) == sizes.powers_of_two(500)


def test_a_model_that_padding_disturbs_is_served_by_exact_sizes_and_says_so(tmp_path, capfd):
    path = graphs.encoder(tmp_path / "bare.onnx", mask=False)
    p = ro.prepare(path, {"seq": "<=64"})
    assert not p.axes.settings()
    said = capfd.readouterr().err
    assert "only requests of equal size share a batch: the results of a row change with its padding" in said
    assert "--buckets.tokens.0=16,32,64 pads in any case" in said
    p = ro.prepare(path, {"seq": "<=64"}, settings={"buckets.tokens.0": "32,64"})  # explicit buckets win
    assert p.axes.settings() == {"buckets.tokens.0": "32,64"}
    assert "padded because buckets were asked for" in capfd.readouterr().err


def sizes_graph(path):
    """x[2,n] → the doubled numbers, the given lengths, and the sum of all numbers, also of padding."""
    nodes = [h.make_node("Add", ["x", "x"], ["y"]), h.make_node("Identity", ["n"], ["told"]),
        h.make_node("ReduceSum", ["x", "axes"], ["sum"], keepdims=0)]
    return graphs.save(path, nodes, {"x": (T.FLOAT, ["b", 2, "n"]), "n": (T.INT32, ["b"])},
                       {"y": (T.FLOAT, ["b", 2, "n"]), "told": (T.INT32, ["b"]), "sum": (T.FLOAT, ["b"])},
                       {"axes": np.array([1, 2])})  # fmt: skip


@pytest.mark.parametrize("pad", [0, 3])
def test_the_worker_pads_and_passes_the_true_lengths(serve, socket, tmp_path, pad):
    """The varying size is not a row's first dimension, so that padding lies inside of rows."""
    path = sizes_graph(tmp_path / "sizes.onnx")
    name = f"sizes{pad}"
    serve(path, name, dims={"n": "<=8"}, lengths="n", pad=pad, max_batch_size=4, buckets={"x.1": [4, 8]})
    rows = [np.arange(2 * n, dtype="float32").reshape(2, n) for n in (1, 3, 4, 5, 8)]
    for x, y in zip(rows, ask_at_once(socket, name, rows)):
        n = x.shape[1]
        np.testing.assert_array_equal(y["y"].reshape(2, n), 2 * x)
        assert int(y["told"].reshape(())) == n
        assert float(y["sum"].reshape(())) == x.sum() + pad * 2 * ((4 if n <= 4 else 8) - n)


def test_a_size_that_follows_no_input_comes_from_the_run(serve, socket, tmp_path):
    """Every second element: half of a size that varies."""
    nodes = [h.make_node("Slice", ["x", "from", "to", "axis", "step"], ["y"])]
    consts = {"from": np.array([0]), "to": np.array([100]), "axis": np.array([1]), "step": np.array([2])}
    path = graphs.save(tmp_path / "half.onnx", nodes, {"x": (T.FLOAT, ["b", "n"])}, {"y": (T.FLOAT, ["b", "half"])}, consts)
    serve(path, "half", dims={"n": "<=10"}, max_batch_size=4)
    with rb.connect("half", socket=socket, wait=60) as c:
        for n in (1, 4, 7, 10):
            x = np.arange(n, dtype="float32")
            np.testing.assert_array_equal(np.array(c.infer(x)).reshape(-1), x[::2])


def mixing(path):
    """Each row minus the mean of the batch."""
    nodes = [h.make_node("ReduceMean", ["x"], ["m"], axes=[0], keepdims=1), h.make_node("Sub", ["x", "m"], ["y"])]
    return graphs.save(path, nodes, {"x": (T.FLOAT, ["b", 4])}, {"y": (T.FLOAT, ["b", 4])})


def test_rows_that_depend_on_one_another_are_refused(tmp_path):
    path = mixing(tmp_path / "mixing.onnx")
    with pytest.raises(rb.Invalid, match="a row gives other results beside other rows"):
        ro.prepare(path, {})
    with pytest.raises(rb.Invalid, match=r"more than 0.05 of the largest: .*=1\) or anything \(--no-check\)"):
        ro.prepare(path, {}, tolerance=0.05)
    ro.prepare(path, {}, check=False)


def broken(tmp_path, what):
    path = tmp_path / "m.onnx"
    if what == "fixed":
        return graphs.conv(path, batch=1)
    if what == "nonsense":
        path.write_bytes(b"nonsense")
        return str(path)
    if what == "string":
        return graphs.save(path, [h.make_node("Identity", ["x"], ["y"])], {"x": (T.STRING, ["b", 2])}, {"y": (T.STRING, ["b", 2])})
    if what == "scalar":
        return graphs.save(path, [h.make_node("Add", ["x", "s"], ["y"])], {"x": (T.FLOAT, ["b", 2]), "s": (T.FLOAT, [])},
            {"y": (T.FLOAT, ["b", 2])})
    if what == "time first":
        nodes = [h.make_node("Transpose", ["t"], ["u"], perm=[1, 0]), h.make_node("Add", ["x", "u"], ["y"])]
        return graphs.save(path, nodes, {"x": (T.FLOAT, ["b", "n"]), "t": (T.FLOAT, ["n", "b"])}, {"y": (T.FLOAT, ["b", "n"])})
    if what == "fixed inside":
        nodes = [h.make_node("Constant", [], ["s"], value_ints=[1, 2]), h.make_node("Reshape", ["x", "s"], ["y"])]
        return graphs.save(path, nodes, {"x": (T.FLOAT, ["b", 2])}, {"y": (T.FLOAT, ["b", 2])})
    if what == "halves":  # takes even sizes only
        nodes = [h.make_node("Constant", [], ["s"], value_ints=[0, -1, 2]), h.make_node("Reshape", ["x", "s"], ["y"])]
        return graphs.save(path, nodes, {"x": (T.FLOAT, ["b", "n"])}, {"y": (T.FLOAT, ["b", "m", 2])})
    if what == "missing":
        return str(path)
    return graphs.encoder(path)


@pytest.mark.parametrize(
    "what, options, message",
    [
        ("fixed", {}, r"input 'x' has a fixed batch of 1, f32\[1,3,8,8\].*dynamic_axes={'x': {0: 'batch'}"),
        ("fixed inside", {}, "takes one row, and fails with 3: a batch of 1 is fixed inside the graph.*--max-batch-size=1"),
        ("nonsense", {}, "onnxruntime cannot load it"),
        ("missing", {}, "No such file"),
        ("string", {}, r"input 'x' is a tensor\(string\), which no ring holds"),
        ("scalar", {}, "input 's' has no dimensions"),
        ("time first", {"dims": {"n": "<=4"}}, "the batch must be the first dimension"),
        ("encoder", {}, "leaves 'seq' open: say how large it gets, like --dim seq='<=512'"),
        ("encoder", {"dims": {"seq": "many"}}, "--dim seq=many: want a largest size"),
        ("encoder", {"dims": {"seq": "<=64", "len": "<=3"}}, "--dim len: the graph has no such open dimension; it has seq"),
        ("encoder", {"dims": {"seq": "<=64"}, "mask": "msk"}, "--mask msk: the graph has no such input; it has tokens, mask"),
        ("encoder", {"dims": {"seq": "<=64"}, "lengths": "mask"}, r"the graph wants i64\[batch,seq\] there, and lengths are \[batch\]"),
        ("encoder", {"dims": {"seq": "8"}, "mask": "mask"}, "--mask mask: no size of this model varies"),
        ("encoder", {"dims": {"seq": "<=64"}, "pad": "word=1"}, "--pad word=1: there is no input 'word'; there are tokens, mask"),
        ("encoder", {"dims": {"seq": "<=64"}, "providers": ["tpu"]}, "--provider tpu: this onnxruntime has"),
        ("encoder", {"dims": {"seq": "<=64"}, "settings": {"buckets.tokens.0": "a"}}, "want ascending sizes"),
        ("encoder", {"dims": {"seq": "<=64"}, "settings": {"buckets.tokens.0": "32,16"}}, "want ascending sizes"),
        ("encoder", {"dims": {"seq": "<=64"}, "tolerance": float("nan")}, "--tolerance nan: want a part of the largest number, like 0.05"),
        ("encoder", {"dims": {"seq": "<=64"}, "tolerance": float("inf")}, "--tolerance inf: want a part"),
        ("encoder", {"dims": {"seq": "<=64"}, "tolerance": -1.0}, "--tolerance -1: want a part"),
    ],
)
def test_a_wrong_model_or_option_is_refused_with_the_remedy(tmp_path, what, options, message):
    with pytest.raises(rb.Invalid, match=message):
        ro.prepare(broken(tmp_path, what), **{"dims": {}, **options})


@pytest.mark.parametrize(
    "error, providers, kind",
    [
        (state.RuntimeException("CUDA failure 2: out of memory"), ["CUDAExecutionProvider", "CPUExecutionProvider"], RuntimeError),
        (state.RuntimeException("Failed to allocate memory for requested buffer"), ["CPUExecutionProvider"], RuntimeError),
        (MemoryError(), ["CPUExecutionProvider"], RuntimeError),
        (state.RuntimeException("cannot be reshaped"), ["CPUExecutionProvider"], rb.Invalid),
        (state.InvalidProtobuf("parsing failed"), ["CUDAExecutionProvider", "CPUExecutionProvider"], rb.Invalid),
    ],
)
def test_a_device_that_fails_says_nothing_about_the_model(tmp_path, monkeypatch, error, providers, kind):
    """The next start may succeed."""

    def fails(*_, **__):
        raise error

    session = ort.InferenceSession(graphs.encoder(tmp_path / "e.onnx"), providers=["CPUExecutionProvider"])
    monkeypatch.setattr(session, "get_providers", lambda: providers)
    monkeypatch.setattr(ro, "session_of", lambda *_: session)
    for part in ("settle", "refuse_mixed_rows"):
        with monkeypatch.context() as m:
            m.setattr(ro.trials, part, fails)
            with pytest.raises(Exception) as e:  # noqa: PT011
                ro.prepare("e.onnx", {"seq": "8"})
            assert type(e.value) is kind


IN_THREES = {"dims": {"n": "<=8"}, "buckets": {"x.0": [3, 8]}}


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ("fixed inside", {"max_batch_size": 4, "check": False},
            r"^the model fails with 4 rows of \[2\]: serve fewer at once \(max_batch_size\)\. \S.*$"),
        ("halves", {"max_batch_size": 4, **IN_THREES},
            r"^the model fails with 4 rows of \[3\]: .*, or other sizes \(dims, buckets.*\)\. \S.*$"),
        ("halves", {"max_batch_size": 1, **IN_THREES},
            r"^the model fails with 1 row of \[3\]: serve other sizes \(dims, buckets.*\)\. \S.*$"),
    ],
)
def test_a_model_that_fails_on_declared_sizes_is_refused_with_the_remedy(tmp_path, what, options, message):
    with pytest.raises(rb.Invalid, match=message):
        ro.serve(broken(tmp_path, what), "m", **options)


def test_a_size_may_be_fixed(tmp_path):
    p = ro.prepare(graphs.encoder(tmp_path / "e.onnx"), {"seq": "8"})
    assert p.signature == "tokens:i64[8] mask:i64[8] -> states:f32[8,16] pooled:f32[16]"


def test_outputs_are_picked_by_name(tmp_path):
    path = graphs.encoder(tmp_path / "e.onnx")
    for names, text in ((["pooled"], "pooled:f32[16]"), (["pooled", "states"], "pooled:f32[16] states:f32[8,16]")):
        assert ro.prepare(path, {"seq": "8"}, outputs=names).signature.endswith(f" -> {text}")
    for names in (["other"], ["pooled", "pooled"]):
        with pytest.raises(rb.Invalid, match=f"--output {names[0]}: want different outputs of the graph; it has states, pooled"):
            ro.prepare(path, {"seq": "8"}, outputs=names)


def test_an_output_that_no_ring_holds_can_be_left_out(tmp_path):
    path = graphs.encoder(tmp_path / "e.onnx")
    graph = onnx.load(path)
    graph.graph.node.append(h.make_node("SequenceConstruct", ["pooled"], ["all"]))
    graph.graph.output.append(h.make_tensor_sequence_value_info("all", T.FLOAT, None))
    onnx.save(graph, path)
    with pytest.raises(rb.Invalid, match=r"output 'all' is a seq.*Name the outputs to serve without it, --output NAME"):
        ro.prepare(path, {"seq": "8"})
    assert ro.prepare(path, {"seq": "8"}, outputs=["pooled"]).signature.endswith(" -> pooled:f32[16]")


def test_the_command_serves_a_file(socket, tmp_path):
    path = graphs.encoder(tmp_path / "words.onnx")
    p = subprocess.Popen(
        [rb.binary_path(), "onnx", path, "--dim", "seq=<=32", "--mask", "mask", "--max-batch-size=4", "--socket", socket],
        env={**os.environ, "PYTHON": sys.executable}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        serves = "tokens:i64[<=32] -> states:f32[<=32,16] pooled:f32[16] with CPUExecutionProvider; tokens.0 rounded up to 16, 32"
        assert f"serving words: {serves}" in p.stdout.readline()
        t = np.arange(20)
        with rb.connect("words", socket=socket, wait=60) as c:
            np.testing.assert_allclose(c.infer(t)["pooled"], alone(path, tokens=t[None], mask=np.ones((1, 20), "int64"))[1][0], rtol=1e-3,
                atol=1e-4)
    finally:
        p.terminate()
        assert p.wait(60) == 0
    p = subprocess.run([rb.binary_path(), "onnx", path], env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True,
        check=False)
    assert p.returncode == 1
    assert p.stderr.startswith("ringbatch onnx: ")
    assert "--dim seq='<=512'" in p.stderr
