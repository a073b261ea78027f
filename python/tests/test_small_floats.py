# SPDX-License-Identifier: Apache-2.0
"""bfloat16 and float8, which NumPy lacks: arrays of ml_dtypes, casts, and trials."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import numpy as np
import pytest
from conftest import serving

import ringbatch as rb
from ringbatch.worker import trials


@pytest.mark.parametrize("rows", [(2,), ("<=2",)])
def test_bfloat16_is_an_array_of_ml_dtypes(socket, rows):
    bfloat16 = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)

    @rb.worker(f"twice{rows[0]}", inputs={"x": (bfloat16, rows)}, outputs={"y": ("bfloat16", rows)}, wait_time=0, max_batch_size=1)
    def twice(batch):
        assert batch.inputs["x"].dtype == bfloat16
        return batch.inputs["x"] * 2 if len(seen) % 2 else batch.inputs["x"].astype("float32") * 2

    x, seen = np.array([1.5, -3], bfloat16), []
    with serving(twice, socket), rb.connect(twice.model, socket=socket, wait=60) as m:
        for given in (x, x.view("uint16"), x[::-1][::-1], np.stack([x, x])):
            seen.append(m(given))
            assert seen[-1].dtype == bfloat16 and (seen[-1].astype("float32") == [3, -6]).all()
        with pytest.raises(rb.DType, match=r"astype\('bfloat16'\)"):
            m(np.ones(2, "float32"))
        with rb.connect(twice.model, socket=socket, cast=True) as casts:
            assert casts(np.array([1.5, -3])).tolist() == [3, -6]
            with pytest.raises(rb.DType, match="does not hold 257"):
                casts(np.array([257, 1]))
            with pytest.raises(rb.DType, match=r"numbers or bits.*x\.view\('bfloat16'\)"):
                casts(np.array([1, 2], "uint16"))
        if rows == (2,):
            with m.request() as r:
                r.inputs["x"][...] = x
                r.run()
                assert r.outputs["y"].tolist() == [3, -6]


EIGHTHS = ["float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("kind", EIGHTHS)
@pytest.mark.parametrize("rows", [(2,), ("<=2",)])
def test_float8_is_an_array_of_ml_dtypes(socket, kind, rows):
    float8 = np.dtype(getattr(pytest.importorskip("ml_dtypes"), kind))

    @rb.worker(f"same{kind}{rows[0]}", inputs={"x": (float8, rows)}, outputs={"y": (kind, rows)}, wait_time=0, max_batch_size=1)
    def same(batch):
        assert batch.inputs["x"].dtype == float8
        if (batch.inputs["x"].view("uint8") == 2).all():
            return batch.inputs["x"].view("uint8")
        return batch.inputs["x"] if (batch.inputs["x"].view("uint8") != 1).all() else np.full((batch.rows, 2), 1e6)

    x = np.array([0.3, -448], float8)
    with serving(same, socket), rb.connect(same.model, socket=socket, wait=60) as m:
        every = np.arange(256, dtype="uint8").view(float8)
        ys = [m(x), m(np.stack([x, x]))[1], m.submit(x).result(60), asyncio.run(m.ainfer(x)), m([x, x])[0]]
        assert all(y.dtype == float8 and y.tolist() == [0.3125, -448] for y in ys)
        odd = np.delete(every, 1).reshape(-1)[:254].reshape(-1, 2)  # each NaN keeps its bits
        assert m(odd).tobytes() == odd.tobytes()
        with pytest.raises(rb.Failed, match=f"{kind} does not hold 1000000.0"):
            m(every[[1, 1]])
        with pytest.raises(rb.Failed, match="returned uint8: numbers or bits"):
            m(every[[2, 2]])
        other = np.dtype(getattr(pytest.importorskip("ml_dtypes"), EIGHTHS[kind == EIGHTHS[0]]))
        for wrong in (np.ones(2, "float32"), np.ones(2, "uint8"), x.astype(other), np.ones(2, "V1")):
            with pytest.raises(rb.DType, match=rf"expected {kind} of shape .*astype\('{kind}'\)"):
                m(wrong)
        with rb.connect(same.model, socket=socket, cast=True) as casts:
            assert casts(np.array([0.3, -448])).tolist() == casts([0.3, -448]).tolist() == [0.3125, -448]
            assert casts(np.array([0.3, -448], ">f8")).tolist() == [0.3125, -448]
            assert casts(np.array([464, np.nan], "float32")).astype("float32")[0] == 448
            with pytest.raises(rb.DType, match="numbers or bits"):
                casts(np.ones(2, "uint8"))
            for much in (65536.0, -1e9, 1 << 30, -(1 << 31), 257, *([464.5, np.inf] if kind == EIGHTHS[0] else [])):
                with pytest.raises(rb.DType, match=f"{kind} does not hold"):
                    casts(np.array([much, 1]))
        if rows == (2,):
            with m.request() as r:
                r.inputs["x"][...] = x
                r.run()
                assert r.outputs["y"].tolist() == [0.3125, -448]


def test_float8_needs_ml_dtypes_in_arrays(socket):
    tensors = {"inputs": {"x": ("float8_e5m2", (2,))}, "outputs": {"y": ("float8_e5m2", (2,))}}
    code = """import sys
sys.modules["ml_dtypes"] = None
import ringbatch as rb
for attempt in (lambda: rb.worker("eighth", **eval(sys.argv[2])), lambda: rb.connect("eighth", socket=sys.argv[1], wait=60)):
    try:
        attempt()
    except rb.Invalid as e:
        print(e)"""
    pytest.importorskip("ml_dtypes")
    with serving(rb.worker("eighth", **tensors)(lambda batch: batch.inputs["x"]), socket):
        said = subprocess.run([sys.executable, "-c", code, socket, repr(tensors)], capture_output=True, text=True, check=True).stdout
    assert said.count("tensor x:f8e5m2[2]: NumPy has no float8_e5m2: pip install ml_dtypes") == 2


@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_small_floats_agree_if_they_differ_by_a_rounding(kind):
    small = np.dtype(getattr(pytest.importorskip("ml_dtypes"), kind))
    x = np.array([1, np.nan, 2], small)
    y = np.nextafter(x, np.array(4, small))
    assert (x != y)[0] and trials.agree([x], [y], 1e-3) and not trials.agree([x], [x[::-1]], 1e-3)
