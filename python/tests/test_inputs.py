# SPDX-License-Identifier: Apache-2.0
"""The arguments of a call: bytes, lists, many rows, a priority; and clear errors."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from conftest import broker_at, serving

import ringbatch as rb

BYTES = {"inputs": {"b": ("uint8", ("<=64",))}, "outputs": {"n": ("int64", ()), "b": ("uint8", ("<=64",))}}


@pytest.fixture(scope="module")
def lengths(socket):
    @rb.worker("lengths", **BYTES, max_batch_size=4, wait_time=0)
    def worker(batch):
        b = batch.inputs["b"]
        return {"n": np.full(batch.rows, b.shape[1]), "b": b}

    with serving(worker, socket), rb.connect("lengths", socket=socket, wait=60) as m:
        yield m


@pytest.mark.parametrize("kind", [list, tuple])
def test_rows_of_bfloat16_are_an_input(socket, kind):
    torch, bfloat16 = pytest.importorskip("torch"), pytest.importorskip("ml_dtypes").bfloat16
    echo = rb.worker("halves", inputs={"x": ("bfloat16", (2,))}, outputs={"y": ("bfloat16", (2,))})(lambda b: b.inputs["x"])
    with serving(echo, socket), rb.connect("halves", socket=socket, wait=60) as m:
        y = m(kind([torch.tensor([1.5, -3]).bfloat16()] * 2))
    assert y.dtype == bfloat16 and y.tolist() == [[1.5, -3]] * 2


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_are_a_u8_input(lengths, kind):
    out = lengths(kind(b"\xff\xd8jpeg"))
    assert out["n"] == 6 and out["b"].tobytes() == b"\xff\xd8jpeg"
    assert lengths.submit(kind(b"")).result(60)["n"] == 0
    assert lengths([kind(b"ab"), kind(b"cd")])["b"].tolist() == [[97, 98], [99, 100]]


def test_masked_arrays_and_ragged_lists_get_a_clear_error(lengths, echo):
    with rb.connect("echo", socket=echo) as m, pytest.raises(rb.Invalid, match=r"'x': a masked array.*x\.filled"):
        m(np.ma.masked_array(np.zeros(16, "float32"), mask=np.arange(16) < 3))
    for ragged in ([b"ab", b"c"], [[1, 2], [3]], [np.zeros(3, "uint8"), np.zeros(4, "uint8")]):
        with pytest.raises(rb.Shape, match=r"'b'.*a list of rows that differ in size.*model\.submit"):
            lengths(ragged)


def test_a_cast_that_changes_a_value_is_refused(echo, lengths, socket):
    ints = {"inputs": {"i": ("int32", ())}, "outputs": {"y": ("int32", ())}}
    with serving(rb.worker("ints", **ints, wait_time=0)(lambda batch: batch.inputs["i"]), socket):
        with rb.connect("ints", socket=socket, wait=60, cast=True) as m:
            assert m(np.int64(5)) == 5 and m.submit([6, 7]).result(60).tolist() == [6, 7]
            for call in (lambda x: m(x), lambda x: m.submit(x), lambda x: asyncio.run(m.ainfer(x))):
                with pytest.raises(rb.DType, match=f"'i': int32 does not hold {2**40 + 5}"):
                    call(np.int64(2**40 + 5))
            with m.request() as r:
                with pytest.raises(rb.DType, match="int32 does not hold 1.5"):
                    r.inputs["i"][...] = 1.5
                r.inputs["i"][...] = np.float64(8)
                assert r.run(timeout=60).outputs["y"] == 8
    with rb.connect("echo", socket=echo, cast=True) as m:
        np.testing.assert_array_equal(m(np.full(16, 0.1)), np.full(16, 0.1, "float32"))
        for x in (np.full(16, 1e300), np.full(16, 2**24 + 1)):
            with pytest.raises(rb.DType, match="'x': float32 does not hold"):
                m(x)


def test_a_dict_gives_inputs_by_name_also_those_that_are_named_as_a_keyword(socket):
    names = ("timeout", "cost", "split", "priority")
    tensors = {"inputs": dict.fromkeys(names, ("int32", ())), "outputs": {"y": ("int32", (4,))}}
    worker = rb.worker("named", **tensors, wait_time=0)(lambda batch: np.stack([batch.inputs[n] for n in names], 1))
    with serving(worker, socket), rb.connect("named", socket=socket, wait=60) as m:
        obs = {name: np.int32(k) for k, name in reversed(list(enumerate(names)))}
        for y in (m(obs), m.submit(obs).result(60), asyncio.run(m.ainfer(obs, timeout=60))):
            assert y.tolist() == [0, 1, 2, 3]
        with pytest.raises(rb.Invalid, match="takes the inputs timeout, cost, split, priority; got obs"):
            m({"obs": 1})
        with pytest.raises(rb.Invalid, match="timeout= are keywords of a call: give all inputs in one dict"):
            m(timeout=np.int32(0), cost=np.int32(1), split=np.int32(2), priority=np.int32(3))


def test_wrong_numbers_and_texts_raise_errors_that_say_what_is_wanted(echo, lengths):
    nan = float("nan")
    with rb.connect("echo", socket=echo) as m:
        x = np.zeros(16, "float32")
        for call in (lambda: rb.connect("echo", socket=echo, wait=nan), lambda: m(x, timeout=nan), lambda: m.submit(x, timeout="nan"),
                lambda: m.request(timeout=nan), lambda: rb.connect("echo", socket=echo, retry=nan)):
            with pytest.raises(rb.Invalid, match="got nan"):
                call()
        for wrong in ({"wait": -1}, {"wait": True}, {"wait": b"1"}, {"retry": -1}, {"retry": b"1"}, {"cast": "no"}):
            with pytest.raises(rb.Invalid, match="got -1|is not a duration|True or False"):
                rb.connect("echo", socket=echo, **wrong)
        for wrong in (True, b"1"):
            with pytest.raises(rb.Invalid, match="is not a duration"):
                m(x, timeout=wrong)
        for how in ({"cost": 1.5}, {"priority": 0.5}, {"cost": "1"}):
            with pytest.raises(rb.Invalid, match="is a whole number, got"):
                m(x, **how)
        with pytest.raises(rb.Invalid, match="rows is a whole number"):
            m.request(rows=1.5)
        for window in ("8", 8.0):
            with pytest.raises(rb.Invalid, match="window is a whole number"):
                rb.connect("echo", socket=echo, window=window)
        with pytest.raises(rb.DType, match="got object"):  # not a list of rows that differ in size
            m([2**70] * 16)
        with pytest.raises(rb.DType, match="got text: a model takes numbers"):
            m("abc")
    for size, error in ((-1, rb.Shape), (65, rb.Shape), (1.5, rb.Invalid)):
        with pytest.raises(error, match="'b'"):
            lengths.request(shapes={"b": (size,)})
    for text in ("abc", ["ab", "cd"]):
        with pytest.raises(rb.DType, match=r"'b'.* got text: pass its bytes, x\.encode\(\)"):
            lengths(text)


def test_more_rows_than_a_request_may_have_are_split_and_joined(echo):
    x = np.arange(100 * 16, dtype="float32").reshape(100, 16)
    for window in (7, 40):  # below and above max_batch_size, 32
        with rb.connect("echo", socket=echo, window=window) as m:
            for y in (m(x), m(x, timeout=60), m(x[:, ::-1])[:, ::-1], m(np.asfortranarray(x), priority=0), m.submit(x).result(60),
                    asyncio.run(m.ainfer(x))):
                assert y.shape == x.shape and (y == x).all()
            for call in (lambda: m(x, split=False), lambda: m.submit(x, split=False), lambda: asyncio.run(m.ainfer(x, split=False))):
                with pytest.raises(rb.TooLarge, match="100 rows, at most 32"):
                    call()
            if window == 7:
                with pytest.raises(rb.Rows, match="this client's window"):
                    m(x[:8], split=False)
            with pytest.raises((rb.Expired, rb.Overloaded, rb.Full)):
                m(x, timeout=1e-9)
            assert (m(x[0]) == x[0]).all()  # nothing is left behind in the window


def test_pieces_of_different_sizes_are_joined_to_a_list(lengths, socket):
    @rb.worker("firsts", inputs={"x": ("int32", ())}, outputs={"y": ("int32", ("<=9",))}, max_batch_size=4, wait_time=0)
    def firsts(batch):
        return [np.arange(n, dtype="int32") for n in batch.inputs["x"]]

    x = np.arange(10, dtype="int32")
    with serving(firsts, socket), rb.connect("firsts", socket=socket, wait=60) as m:
        for y in (m(x), m.submit(x).result(60), asyncio.run(m.ainfer(x))):
            assert [r.tolist() for r in y] == [list(range(min(n, 9))) if n < 10 else None for n in x]


def test_a_failure_of_one_piece_is_that_of_the_whole(socket):
    @rb.worker("picky-piece", inputs={"x": ("int32", ())}, outputs={"y": ("int32", ())}, max_batch_size=4, wait_time=0)
    def picky(batch):
        if (batch.inputs["x"] == 5).any():
            raise ValueError("five")
        return batch.inputs["x"]

    x = np.arange(40, dtype="int32")
    with serving(picky, socket), rb.connect("picky-piece", socket=socket, wait=60) as m:
        for call in (lambda: m(x), lambda: m.submit(x).result(60), lambda: asyncio.run(m.ainfer(x))):
            with pytest.raises(rb.Failed, match="five"):
                call()
        assert (m(x[8:]) == x[8:]).all()


def test_priority_of_every_kind_of_call(at):
    """A busy worker gets urgent requests first, with every kind of call."""
    config = at + ".toml"
    with open(config, "w") as f:
        f.write('[[model]]\nname = "levels"\ninputs = ["x:i32[]"]\noutputs = ["y:i32[]"]\nmax_batch_size = 1\ndefault_priority = 1\nlease '
            '= "5m"\n')
        f.write("[[model.priority]]\n[[model.priority]]\n[[model.priority]]\n")
    order, go = [], threading.Event()

    @rb.worker("levels", inputs={"x": ("i32", ())}, outputs={"y": ("i32", ())}, depth=1)
    def worker(batch):
        order.append(int(batch.inputs["x"][0]))
        go.wait(120)
        return batch.inputs["x"]

    async def all_at_once(m):
        return await asyncio.gather(*(m.ainfer(np.int32(10 * p + 2), priority=p) for p in (2, 1, 0)))

    with broker_at(at, "--config", config), serving(worker, at), rb.connect("levels", socket=at, wait=60, window=32) as m:
        blocker = m.submit(np.int32(99))
        while not order:
            go.wait(0.01)
        futures = [m.submit(np.int32(10 * p), priority=p) for p in (2, 1, 0)]
        threads = [threading.Thread(target=m, args=(np.int32(10 * p + 1),), kwargs={"priority": p}) for p in (2, 1, 0)]
        threads.append(threading.Thread(target=lambda: asyncio.run(all_at_once(m))))
        [t.start() for t in threads]
        while m.stats()["queue_length"] < 9:
            go.wait(0.01)
        go.set()
        [f.result(60) for f in [blocker, *futures]]
        [t.join(60) for t in threads]
        assert [n // 10 for n in order] == [9, 0, 0, 0, 1, 1, 1, 2, 2, 2]
        for call in (lambda: m(np.int32(1), priority=3), lambda: m.submit(np.int32(1), priority=-1),
                lambda: asyncio.run(m.ainfer(np.int32(1), priority=7))):
            with pytest.raises(rb.NoLevel):
                call()
