# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import pathlib
import pickle
import platform
import socket as sockets
import threading
import time

import numpy as np
import pytest
from conftest import broker_at, descriptors, eventually, serving

import ringbatch as rb
from ringbatch.binding import structs
from ringbatch.binding.tensors import tensors_of
from ringbatch.client import connection


def test_one_item_and_rows(model):
    x = np.arange(16, dtype="float32")
    y = model(x)
    assert type(y) is np.ndarray and y.shape == (16,) and (y == x).all()
    rows = np.arange(5 * 16, dtype="float32").reshape(5, 16)
    assert (model(rows) == rows).all()
    assert (model(x=x) == x).all()
    assert model.infer(rows[:1]).shape == (1, 16)
    assert "x:f32[16] -> y:f32[16]" in repr(model)
    assert model.max_batch_size == 32 and model.window == 32


@pytest.mark.parametrize("bad", [np.float64, np.int32, np.float16, ">f4"])
def test_other_types_are_refused_and_named(model, bad):
    with pytest.raises(rb.DType, match=rf"expected float32 .*got {np.dtype(bad)}") as e:
        model(np.zeros(16, bad))
    assert isinstance(e.value, TypeError)
    assert "x.astype('float32')" in str(e.value)
    with pytest.raises(rb.DType, match=r"np.array\(x, 'float32'\)"):
        model([0.0] * 16)  # NumPy makes float64


def test_cast_is_possible_when_asked_for(echo):
    with rb.connect("echo", socket=echo, cast=True) as m:
        assert m([0.5] * 16).dtype == np.float32
        with pytest.raises(rb.DType, match="does not convert") as e:  # another kind
            m(np.zeros(16, "complex128"))
        assert "connect with" not in str(e.value)


@pytest.mark.parametrize("shape", [(), (15,), (17,), (2, 15), (2, 2, 16), (16, 2)])
def test_other_shapes_are_refused_and_named(model, shape):
    with pytest.raises(rb.Shape, match=r"expected float32 of shape \(16,\), or rows of it; got shape") as e:
        model(np.zeros(shape, "float32"))
    assert isinstance(e.value, ValueError)


class Own(np.ndarray):
    pass


def test_arrays_of_any_layout_and_class(model):
    big = np.arange(64 * 16, dtype="float32").reshape(16, 64)
    fixed = np.full(16, 3, "float32")
    fixed.flags.writeable = False
    others = big[:, 3], big.T[5], big[::-1, 1], np.asfortranarray(big[:4, :16]), np.broadcast_to(np.float32(7), (16,)), fixed.view(Own)
    for x in (fixed, *others, *others):  # the first call keeps a slot for the others
        assert (model(x) == x).all()
    assert (model(big[:, :16][::2]) == big[:, :16][::2]).all()
    assert (model.submit(big[:, 3]).result(60) == big[:, 3]).all()


def test_request_writes_and_reads_in_place(model):
    with model.request() as req:
        assert req.inputs["x"].shape == (16,) and list(req.inputs) == ["x"]
        req.inputs["x"][...] = 3
        y = req.run(timeout=60).outputs["y"]
        assert (y == 3).all() and req.done()
        assert req.timing.queue >= 0
    with model.request(rows=2) as req:
        req.inputs["x"][...] = [[1] * 16, [2] * 16]
        assert req.run().outputs["y"][:, 0].tolist() == [1, 2] and req.rows == 2


def test_steps_out_of_order_are_named(model):
    with model.request() as req:
        with pytest.raises(rb.NotCommitted):
            req.wait()
        with pytest.raises(rb.NotCommitted):
            req.outputs["y"]
        with pytest.raises(rb.Invalid, match="no tensor 'z'"):
            req.inputs["z"]
        with pytest.raises(rb.NoLevel):
            req.commit(priority=7)
        req.commit()
        with pytest.raises(rb.Committed):
            req.commit()
        with pytest.raises(rb.Committed):
            req.inputs["x"]
        req.wait(60)
    for use in (req.commit, req.wait, req.done, req.cancel, lambda: req.timing, lambda: req.outputs["y"]):
        with pytest.raises(rb.Released):
            use()
    req.release()  # twice does nothing


def test_full_window_is_a_named_error(echo):
    with rb.connect("echo", socket=echo, window=2) as m:
        held = [m.request(), m.request()]
        with pytest.raises(rb.Full) as e:
            m.request(timeout=0.05)
        assert e.value.retryable
        with pytest.raises(rb.Full):
            m(np.zeros(16, "float32"), timeout=0.05)
        held[0].release()
        assert m(np.zeros(16, "float32"), timeout=60).shape == (16,)
        del held


@pytest.mark.skipif(platform.python_implementation() != "CPython", reason="forgotten objects end at once only where they are counted")
def test_forgotten_requests_come_back(echo):
    with rb.connect("echo", socket=echo, window=2) as m:
        for _ in range(100):
            m.request(timeout=60)


def test_closed_client(echo):
    m = rb.connect("echo", socket=echo)
    m.close()
    m.close()
    x = np.zeros(16, "float32")
    for use in (lambda: m(x), lambda: m.request(), lambda: m.submit(x), m.mapping):
        with pytest.raises(rb.Closed):
            use()


def test_no_broker_and_unknown_model(echo):
    with pytest.raises(rb.NoBroker, match="ringbatch broker") as e:
        rb.connect("echo", socket="/nonexistent/b.sock", wait=0)
    assert isinstance(e.value, ConnectionError)
    with pytest.raises(rb.UnknownModel, match='"nothing"; there are echo$') as e:
        rb.connect("nothing", socket=echo, wait=0)
    assert isinstance(e.value, LookupError)
    with pytest.raises(rb.UnknownModel):
        rb.connect("nothing", socket=echo, wait=0.1)


def test_a_broker_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "_CONNECT_TIMEOUT_NS", 100_000_000)
    path = str(tmp_path / "b.sock")
    with sockets.socket(sockets.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen()
        for use in (lambda: rb.connect("echo", socket=path, wait=0), lambda: rb.stats(path, timeout=0.1)):
            with pytest.raises(rb.Timeout, match=f"the broker at {path} did not answer"):
                use()


def test_connecting_outlasts_a_broker_that_drains(at):
    declared = ("--model", "m", "--input", "x:f32[1]", "--output", "y:f32[1]")
    with broker_at(at, *declared, "--drain-time", "5m") as old, rb.connect("m", socket=at) as m:
        m.submit(np.zeros(1, "float32"))  # there is no worker: the broker drains until the client leaves
        old.terminate()
        with pytest.raises(rb.Draining):
            while True:
                rb.connect("m", socket=at, wait=0).close()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            waiting = pool.submit(rb.connect, "m", socket=at, wait=60)
            time.sleep(0.05)  # mostly enough for the first attempt
            m.close()
            old.wait(60)
            with broker_at(at, *declared):
                waiting.result(60).close()


def test_numbers_that_c_would_truncate_are_refused(model, echo):
    for window in (0, -1, 2**32, 2**33):
        with pytest.raises(rb.Invalid, match=f"got {window}"):
            rb.connect("echo", socket=echo, window=window)
    with pytest.raises(rb.Rows, match="at least one row"):
        model(np.zeros((0, 16), "float32"))
    for rows in (-1, 2**32 + 1):
        with pytest.raises(rb.Rows, match=f"got {rows}"):
            model.request(rows)
    with model.request() as req, pytest.raises(rb.NoLevel, match="-1"):
        req.commit(priority=-1)
    with rb.connect("echo", socket=pathlib.Path(echo)) as m:
        assert m(np.zeros(16, "float32")).shape == (16,)


def test_a_wrong_model_name_is_refused():
    with pytest.raises(TypeError, match="name of a model, got int"):
        rb.connect(3)
    with pytest.raises(rb.Invalid, match="no model has a name like"):
        rb.connect("a\0b")


def test_connections_are_not_copied(model):
    for use in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"connect\('echo'\) in the process that uses it"):
            use(model)
    assert model(np.zeros(16, "float32")).shape == (16,)


def test_timeouts_without_an_end(model):
    x = np.zeros(16, "float32")
    for timeout in (float("inf"), 1e10, 1e300):
        assert model(x, timeout=timeout).shape == model.submit(x, timeout=timeout).result(60).shape
        with model.request(timeout=timeout) as req:
            req.run(timeout)


@pytest.mark.skipif(platform.python_implementation() != "CPython", reason="forgotten objects end at once only where they are counted")
def test_connections_leave_nothing_behind(echo):
    x = np.zeros(16, "float32")

    def use():
        with rb.connect("echo", socket=echo) as m:
            m(x)
            m.submit(x).result(60)
            with m.request() as req:
                req.run()
            asyncio.run(m.ainfer(x))

    use()
    before = descriptors(), threading.active_count()
    for _ in range(20):
        use()
    eventually(lambda: descriptors() <= before[0] and threading.active_count() <= before[1])


def test_deadlines(at):
    gate = threading.Event()

    @rb.worker("slow", inputs={"x": ("f32", (1,))}, outputs={"y": ("f32", (1,))}, wait_time=0)
    def slow(batch):
        gate.wait(120)

    x = np.zeros(1, "float32")
    with broker_at(at), serving(slow, at), rb.connect("slow", socket=at, wait=60) as m:
        with pytest.raises(rb.Expired) as e:
            m(x, timeout=0.05)
        assert isinstance(e.value, TimeoutError)
        with m.request() as req:
            req.commit()
            with pytest.raises(rb.Timeout):
                req.wait(0.05)
            assert not req.done()
            req.cancel()
            with pytest.raises(rb.Canceled):
                req.wait(60)
        with pytest.raises(rb.Expired):
            m.submit(x, timeout=0.05).result(60)
        gate.set()


def test_a_restarted_broker_may_have_another_number_of_slots(at):
    two = {"outputs": {"y": ("f32", (16,)), "n": ("i32", ("<=4",))}, "inputs": {"x": ("f32", (16,)), "z": ("i32", ("<=4",))}}

    def use(m: rb.Model, v: int) -> bool:
        with m.request(shapes={"z": (3,)}) as req:
            req.inputs["x"][...], req.inputs["z"][...] = v, v
            req.run(timeout=60)
            return bool((req.outputs["y"] == v + 1).all() and (req.outputs["n"][:3] == v + 2).all())

    def attached_again(m: rb.Model, v: int) -> bool:
        try:
            assert use(m, v)
        except rb.Error as e:
            assert e.retryable, e
            return False
        return True

    m = None
    for v, slots in enumerate((64, 4096, 8)):

        @rb.worker("two", **two, slots=slots, max_batch_size=4 + v, wait_time=0)
        def worker(batch):
            batch.outputs["y"][...] = batch.inputs["x"] + 1
            batch.outputs["n"][:, :3] = batch.inputs["z"] + 2

        with broker_at(at), serving(worker, at):
            m = m or rb.connect("two", socket=at, wait=60)
            eventually(lambda: attached_again(m, v))
            assert use(m, v) and m.stats()["slots"] == slots
            assert m.max_batch_size == 4 + v
            core = m._core  # compare with the C library's view of the present attachment
            present = tensors_of(core.lib, core.lib.rb_client_tensor, core.handle, structs.OUTPUT, 2)
            assert [t.offset for t in present] == [core._mapping.offsets[t] for t in core.signature.outputs]
    m.close()
