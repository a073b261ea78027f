# SPDX-License-Identifier: Apache-2.0
"""A view whose request is over raises an error and never crashes."""

from __future__ import annotations

import gc
import pickle

import numpy as np
import pytest
from conftest import python, serving

import ringbatch as rb

USES = {
    "getitem": lambda v: v[0],
    "setitem": lambda v: v.__setitem__(0, 1),
    "iter": lambda v: list(v),
    "len": len,
    "sum": lambda v: v.sum(),
    "copy": lambda v: v.copy(),
    "shape": lambda v: v.shape,
    "tobytes": lambda v: v.tobytes(),
    "interface": lambda v: v.__array_interface__,
    "add": lambda v: v + 1,
    "radd": lambda v: 1 + v,
    "iadd": lambda v: v.__iadd__(1),
    "compare": lambda v: v == 1,
    "np.sum": np.sum,
    "np.concatenate": lambda v: np.concatenate([v, v]),
    "np.copyto": lambda v: np.copyto(v, 1),
    "np.add.reduce": np.add.reduce,
    "out": lambda v: np.add(1, 1, out=v),
    "format": lambda v: f"{v.mean()}",
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_use_after_release_is_an_error(model, use):
    with model.request() as req:
        req.inputs["x"][...] = 1
        view = req.run().outputs["y"]
        part = view[2:5]
        use(view)  # fine here
    for late in (view, part):
        with pytest.raises(rb.Released):
            use(late)
    assert "over" in repr(view) and "over" in str(view)
    assert np.asarray(view).size == 0


def test_a_view_that_is_over_is_no_input(model):
    with model.request() as req:
        y = req.run().outputs["y"]
        assert model(y).shape == (16,)
    for use in (model, model.submit):
        with pytest.raises(rb.Released):
            use(y)


def test_inputs_are_over_at_commit(model):
    with model.request() as req:
        x = req.inputs["x"]
        req.commit()
        with pytest.raises(rb.Committed):
            x[0] = 1
        req.wait()


def test_views_are_arrays_while_they_live(model):
    with model.request() as req:
        x = req.inputs["x"]
        x[...] = np.arange(16)
        x += 1
        np.multiply(x, 2, out=x)
        assert isinstance(x, np.ndarray) and not x.flags.owndata and x.flags.c_contiguous
        assert x.__array_interface__["data"][0] == x.ctypes.data
        assert type(x + 1) is np.ndarray
        kept, mean = x.copy(), x.mean()
        assert (pickle.loads(pickle.dumps(x)) == x).all()
        y = req.run().outputs["y"]
        assert np.array_equal(y, kept) and y.mean() == mean
    assert (kept == 2 * (np.arange(16) + 1)).all()  # copies are their own


def test_plain_arrays_keep_the_mapping_alive(echo):
    m = rb.connect("echo", socket=echo)
    with m.request() as req:
        req.inputs["x"][...] = 4
        plain = np.asarray(req.run().outputs["y"])
        memory = memoryview(req.outputs["y"])
    m.close()
    del m, req
    gc.collect()
    for _ in range(3):
        assert plain.sum() == plain.sum() and len(bytes(memory)) == 64  # stale, not a crash


def test_a_view_lies_in_the_ring(model):
    mapping, t = model.mapping(), model.inputs[0]
    with model.request() as req:
        offset = req.inputs["x"].ctypes.data - mapping.base - t.offset
    assert offset % t.stride == 0 and 0 <= offset < mapping.bytes and mapping.bytes % 4096 == 0


def test_a_request_with_wrong_arguments_gives_no_slot_back(echo):
    said = python(
        """
        from ringbatch.client.request import Request
        core = rb.connect("echo")._core
        for wrong in ((), (None,), (core, "many"), (core, -1), (core, 1, (1, 2, 3) * 99)):
            try:
                Request(*wrong)
            except Exception:
                continue
            print("made of", wrong)
        never = Request.__new__(Request)
        steps = (lambda: never.run(), lambda: never.commit(), lambda: never.wait(), lambda: never.release())
        for use in (*steps, lambda: never.inputs["x"], lambda: never.outputs["y"]):
            try:
                use()
            except Exception:
                pass
        del never
        print(float(rb.connect("echo")(x)[3]))
        """,
        socket=echo,
    )
    assert said == "3.0"


def test_slices_lose_their_memory_with_their_view(echo):
    with rb.connect("echo", socket=echo, window=2) as m:
        with m.request() as req:
            x = req.inputs["x"]
            parts = [x[2:4], x[:8][1:3], x.reshape(4, 4), x[::-1], x[...]]
            parts += [x[i : i + 1] for i in range(200)]
            del parts[5:200]
            x[...] = 1
            req.run()
            assert [np.asarray(part).size for part in parts] == [0] * len(parts)
            y = req.outputs["y"]
            part = y[3:]
        assert np.asarray(part).size == np.asarray(y).size == 0
        with pytest.raises(rb.Released):
            part[0] = 1


def test_a_closed_client_gives_its_window_back_although_views_live(socket):
    @rb.worker("few", inputs={"x": ("float32", (16,))}, outputs={"y": ("float32", (16,))}, wait_time=0, slots=32)
    def few(batch):
        return batch.inputs["x"]

    with serving(few, socket):
        kept = []
        rb.connect("few", socket=socket, wait=60, window=28).close()
        for _ in range(20):
            with rb.connect("few", socket=socket, window=28) as m:
                req = m.request()
                released = m.request()
                kept += [req, req.inputs["x"], released.inputs["x"], np.asarray(req.inputs["x"])]
                released.release()
            with pytest.raises((rb.Released, rb.Closed)):
                req.run()
        with rb.connect("few", socket=socket, window=28) as m:
            assert m.stats()["clients"] == 1


def test_a_late_array_of_a_closed_client_reaches_no_slot(socket):
    @rb.worker("late", inputs={"x": ("float32", (16,))}, outputs={"y": ("float32", (16,))}, wait_time=0, slots=4, max_batch_size=4)
    def late(batch):
        return batch.inputs["x"]

    with serving(late, socket):
        first = rb.connect("late", socket=socket, wait=60, window=4)
        before = [first.request() for _ in range(4)]
        plain = [np.asarray(r.inputs["x"]) for r in before]
        first.close()
        with rb.connect("late", socket=socket, window=4) as m:
            requests = [m.request() for _ in range(4)]
            for r in requests:
                r.inputs["x"][...] = 5
            for p in plain:
                assert not p.any()
                p[...] = 9
            assert all((r.inputs["x"] == 5).all() for r in requests)


def test_views_of_a_closed_client_are_over(echo):
    with rb.connect("echo", socket=echo) as m:
        assert "y" not in m.request().inputs and "x" in m.request().inputs
        written, several = m.request(), m.request(rows=2)
        written.inputs["x"][...] = 4
        several.inputs["x"][...] = 5
        unsent = m.request().inputs["x"]
        y, both = written.run().outputs["y"], several.run().outputs["y"]
        part = y[:2]
        assert (part == 4).all() and (both == 5).all()
    for view in (unsent, y, both, part, written.outputs["y"]):
        with pytest.raises(rb.Released):
            view.sum()
        assert np.array(view).size == 0
