# SPDX-License-Identifier: Apache-2.0
"""Packed workers: rows of different sizes one after the other in one array. And the cost of a row."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest
from conftest import serving

import ringbatch as rb

SIZES = (0, 3, 64, 17, 17, 33, 1, 50)
TENSORS = {
    "inputs": {"tokens": ("int32", ("<=64",)), "pairs": ("float32", ("<=64", 2)), "k": ("int32", ())},
    "outputs": {"total": ("int64", ()), "scaled": ("float32", ("<=64", 2)), "same": ("int32", ("<=64",))},
}
PACKED = ["tokens", "pairs"]
seen = []  # the sizes of the rows of each batch


def compute(tokens, pairs, k, offsets):
    sums = np.array([tokens[a:b].sum() for a, b in zip(offsets, offsets[1:])], "int64")
    return {"total": sums + k, "scaled": pairs * np.repeat(k, np.diff(offsets))[:, None].astype("float32"), "same": tokens}


def returned(batch):
    tokens, pairs, k, offsets = batch.inputs["tokens"], batch.inputs["pairs"], batch.inputs["k"], batch.offsets
    sizes = [n for r in batch.requests for n in [r.dims[0]] * r.rows]
    assert offsets.dtype == np.int32 and offsets[0] == 0 and np.diff(offsets).tolist() == sizes
    assert tokens.shape == (sum(sizes),) and pairs.shape == (sum(sizes), 2) and k.shape == (batch.rows,)
    assert not tokens.flags.writeable and not offsets.flags.writeable
    seen.append(sizes)
    return compute(tokens, pairs, k, offsets)


async def awaited(batch):
    return returned(batch)


def written(batch):
    for name, value in returned(batch).items():
        batch.outputs[name][...] = value


@pytest.mark.parametrize(("function", "debug"), [(returned, False), (awaited, False), (written, False), (written, True)])
def test_rows_of_many_clients_are_answered_as_alone(socket, function, debug):
    seen.clear()
    rng, model = np.random.default_rng(4), f"packed-{function.__name__}-{debug}"
    made = rb.worker(model, **TENSORS, packed=PACKED, max_batch_size=8, wait_time=60, debug=debug)(function)

    def rows_of(size, *rows):
        k = rng.integers(1, 9, rows or 1, "int32")
        return rng.integers(0, 1000, (*rows, size), "int32"), rng.random((*rows, size, 2), "float32"), k

    def check(tokens, pairs, k, got):
        alone = compute(tokens, pairs, k, np.array([0, len(tokens)]))
        assert got["total"] == alone["total"][0] and all(np.array_equal(got[name], alone[name]) for name in ("scaled", "same"))

    with contextlib.ExitStack() as stack:
        stack.enter_context(serving(made, socket))
        # The last client is idle: the broker waits for full batches.
        *clients, _ = [stack.enter_context(rb.connect(model, socket=socket, wait=60, window=8)) for _ in range(5)]
        given = [rows_of(size) for size in 4 * SIZES]
        futures = [clients[i % 4].submit(x[0], x[1], x[2][0]) for i, x in enumerate(given)]
        for x, future in zip(given, futures):
            check(*x, future.result(120))
        tokens, pairs, k = rows_of(5, 8)  # one request of 8 rows
        got = clients[0](tokens, pairs, k)
        for i in range(8):
            check(tokens[i], pairs[i], k[i : i + 1], {name: rows[i] for name, rows in got.items()})
    assert sorted(sum(seen[:4], [])) == sorted(4 * SIZES) and seen[4:] == [[5] * 8]


def test_a_large_batch_is_packed_by_several_threads(socket):
    @rb.worker("large", inputs=["x:f32[<=99999,4]"], outputs=["y:f32[<=99999,4]"], packed=["x"], max_batch_size=4, slots=8, gather_threads=3)
    def large(batch):
        return batch.inputs["x"] + 1

    with serving(large, socket), rb.connect("large", socket=socket, wait=60, window=4) as m:
        given = [np.random.default_rng(n).random((n, 4), "float32") for n in (99_999, 0, 31_234, 77_777)]
        for x, future in zip(given, [m.submit(x) for x in given]):
            assert np.array_equal(future.result(120), x + 1)


def test_only_wrong_requests_and_answers_fail(socket):
    @rb.worker("wrong", **TENSORS, packed=PACKED, max_batch_size=4, wait_time=60)
    def wrong(batch):
        out = returned(batch)
        if (batch.inputs["k"] == 9).any():
            out["same"] = out["same"][1:]
        return {**out, "same": out["same"] + 0.5} if (batch.inputs["k"] == 8).any() else out

    with serving(wrong, socket), rb.connect("wrong", socket=socket, wait=60) as m, rb.connect("wrong", socket=socket):
        sent = [(3, 3, 1, None), (3, 4, 1, "all of tokens, pairs"), (5, 5, 9, "shape (5,); got shape (4,)"), (6, 6, 8, "'same' is int32")]
        futures = [m.submit(np.zeros(a, "int32"), np.zeros((b, 2), "float32"), np.int32(k)) for a, b, k, _ in sent]
        assert futures[0].result(120)["total"] == 1
        for future, (*_, text) in zip(futures[1:], sent[1:]):
            with pytest.raises(rb.Failed) as failure:
                future.result(120)
            assert text in str(failure.value)


@pytest.mark.parametrize(("inputs", "packed"), [("x:f32[4,<=8]", "x"), ("x:f32[<=8,<=8]", "x"), ("x:f32[<=8] m:f32[<=9]", "mx"),
    ("x:f32[<=4]", "x")])  # fmt: skip
def test_tensors_that_cannot_be_packed_are_refused_at_the_decoration(inputs, packed):
    with pytest.raises(rb.Invalid, match="no inner dimension does, and all have one maximum, or all have names .*; got x:f32"):
        rb.worker("never", inputs=inputs, outputs="y:f32[<=8]", packed=list(packed))


@pytest.mark.parametrize("packed", [True, "x", ["x", "y"], ["words"]])
def test_the_inputs_to_pack_are_a_list_of_all_that_vary(packed):
    with pytest.raises(rb.Invalid, match=r"^packed.*: want a list of all inputs whose size varies, \['x'\]"):
        rb.worker("never", inputs="x:f32[<=8]", outputs="y:f32[<=8]", packed=packed)
    with pytest.raises(rb.Invalid, match="ragged=False"):
        rb.worker("never", inputs="x:f32[<=8]", outputs="y:f32[<=8]", packed=["x"], ragged=False)


def test_every_kind_of_call_takes_a_cost(model):
    x = np.arange(16, dtype="float32")
    for how in ({"cost": 0}, {"cost": 65535, "priority": 0}):
        for given in (x, np.ones((100, 16), "float32")):  # several requests
            assert all((y == given).all() for y in (
                model(given, **how), model.submit(given, **how).result(120), asyncio.run(model.ainfer(given, **how))))  # fmt: skip
        with model.request() as a, model.request() as b:
            a.inputs["x"][...] = b.inputs["x"][...] = x
            assert (a.run(timeout=120, **how).outputs["y"] == b.commit(**how).wait(120).outputs["y"]).all()
    for call in (model, model.submit, lambda x, cost: asyncio.run(model.ainfer(x, cost=cost))):
        for cost in (-1, 65536):
            with pytest.raises(rb.Invalid, match="cost of a row"):
                call(x, cost=cost)


def test_a_batch_is_full_at_max_batch_cost(socket):
    made = rb.worker("budget", **TENSORS, packed=PACKED, max_batch_size=32, max_batch_cost=100, wait_time=60)(returned)
    with serving(made, socket), rb.connect("budget", socket=socket, wait=60, window=32) as m, rb.connect("budget", socket=socket):
        for sizes, cost, batches in (([50] * 6, None, 3), ([1] * 8, 25, 2), ([64, 30, 6, 50, 50], None, 2), ([3, 4], 200, 2)):
            seen.clear()
            inputs = [(np.zeros(n, "int32"), np.zeros((n, 2), "float32"), np.int32(n)) for n in sizes]
            for size, future in zip(sizes, [m.submit(*x, cost=cost) for x in inputs]):
                assert future.result(120)["total"] == size
            assert len(seen) == batches and sorted(sum(seen, [])) == sorted(sizes), seen
