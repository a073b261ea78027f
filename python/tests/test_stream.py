# SPDX-License-Identifier: Apache-2.0
"""Answers in parts: ``batch.append`` in a worker, ``model.stream`` in a client, across processes that die."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import numpy as np
import pytest
from conftest import eventually, in_threads, serving

import ringbatch as rb

TEXT = {"inputs": {"x": ("int32", (2,))}, "outputs": {"text": ("uint8", ("<=64",)), "sum": ("int32", ())}, "wait_time": 0}

# x is [letters, where the process dies]: "abcd…", one letter a step. It dies once: the second time the letters are capitals.
WRITER = """
import os, signal, sys, time
import numpy as np
import ringbatch as rb
again = len(sys.argv) > 2

@rb.worker("writer", inputs={"x": ("int32", (2,))}, outputs={"text": ("uint8", ("<=64",)), "sum": ("int32", ())}, wait_time=0)
def write(batch):
    for i in range(64):
        for row, (letters, dies) in enumerate(batch.inputs["x"].tolist()):
            if i < letters:
                batch.append("text", row, (65 if again else 97) + i % 26)
            if i == dies and not again:
                time.sleep(0.2)  # until the client has seen the parts
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.002)
    return {"sum": batch.inputs["x"].sum(1)}

write.run(socket=sys.argv[1], wait=60)
"""


def letters(n: int, first: str = "a") -> bytes:
    return bytes(ord(first) + i % 26 for i in range(n))


def joined(parts) -> tuple[bytes, int]:
    """What the parts since the last restart say, and how many restarts there were."""
    text, restarts = b"", 0
    for values, restarted in parts:
        text, restarts = (b"" if restarted else text) + bytes(values), restarts + restarted
    return text, restarts


@pytest.fixture
def writer(tmp_path):
    path = tmp_path / "writer.py"
    path.write_text(WRITER)
    return path


def test_an_answer_comes_in_parts(socket):
    seen = []

    @rb.worker("parts", **TEXT, max_batch_size=4)
    def run(batch):
        batch.append("text", 0, b"")  # rows may stay empty
        for i in range(int(batch.inputs["x"][:, 0].max())):
            for row, (n, _) in enumerate(batch.inputs["x"].tolist()):
                if i < n:
                    batch.append("text", row, letters(n)[i])
            if len(batch) == 1 and batch.inputs["x"][0, 1]:
                eventually(lambda i=i: len(seen) > i)  # the client has the part before the next one
        return {"sum": batch.inputs["x"].sum(1)}

    with serving(run, socket), rb.connect("parts", socket=socket, wait=60, window=8) as m:
        stream = m.stream(np.array([5, 1], "int32"), timeout=60)
        for part in stream:
            seen.append(bytes(part.values))
        assert seen == [b"a", b"b", b"c", b"d", b"e"] and not part.restarted
        assert bytes(stream.answer["text"]) == b"abcde" and stream.answer["sum"] == 6
        assert joined(m.stream(np.array([[0, 0]], "int32"))) == (b"", 0)
        # Plain requests share the worker, and get the same answers. A row that got nothing is empty.
        whole = m.infer(np.array([[3, 0], [0, 0]], "int32"))
        assert [bytes(t) for t in whole["text"]] == [b"abc", b""]

        async def many():
            async def one(n):
                out = []
                async with m.stream(np.array([n, 0], "int32")) as stream:
                    async for part in stream:
                        out.append(part)
                return joined(out)

            return await asyncio.gather(*(one(n % 33) for n in range(100)))

        assert asyncio.run(many()) == [(letters(n % 33), 0) for n in range(100)]
        with pytest.raises(rb.errors.Rows):
            m.stream(np.zeros((2, 2), "int32"))
        # Callers who stop give their slots back.
        for _ in range(20):
            for _ in m.stream(np.array([33, 0], "int32")):
                break
        with m.stream(np.array([33, 0], "int32")) as stream:
            assert next(stream).values[0] == ord("a")
            with pytest.raises(rb.Invalid):
                asyncio.run(stream.__anext__())
        with pytest.raises(rb.Closed):  # not an end: parts are missing
            next(stream)

        async def left():
            stream = m.stream(np.array([33, 0], "int32"))
            assert (await stream.__anext__()).values[0] == ord("a")
            await stream.aclose()  # as contextlib.aclosing does
            with pytest.raises(rb.Closed):
                await stream.__anext__()

        asyncio.run(left())

        async def canceled():
            for _ in range(20):
                task = asyncio.ensure_future(m.stream(np.array([33, 0], "int32")).__anext__())
                await asyncio.sleep(0.001)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        asyncio.run(canceled())
        assert m.infer(np.zeros((8, 2), "int32"))["sum"].sum() == 0


def test_a_stream_sends_its_input_as_it_was_when_it_was_made(socket):
    @rb.worker("echo", inputs=TEXT["inputs"], outputs=TEXT["outputs"])
    def echo(batch):
        return {"text": [[] for _ in range(len(batch))], "sum": batch.inputs["x"].sum(1)}

    with serving(echo, socket), rb.connect("echo", socket=socket, wait=60) as m:
        stream = m.stream(x := np.array([1, 2], np.int32))
        x[:] = 100
        list(stream)
        assert stream.answer["sum"] == 3


def test_what_a_worker_may_not_append(socket):
    wrong = []

    @rb.worker("wrong", **TEXT, max_batch_size=1)
    def run(batch):
        for call in (
            lambda: batch.append("sum", 0, 1), lambda: batch.append("text", 1, 1), lambda: batch.append("text", 0, [[1]]),
            lambda: batch.append("text", 0, [1.5]), lambda: batch.append("text", 0, 256), lambda: batch.append("no", 0, 1),
        ):  # fmt: skip
            with pytest.raises(rb.Error) as e:
                call()
            wrong.append(type(e.value).__name__)
        batch.append("text", 0, [1, 2, 3])
        with pytest.raises(rb.Invalid):
            batch.outputs["text"]
        if batch.inputs["x"][0, 0] == 1:
            batch.append("text", 0, np.zeros(62, "uint8"))
        if batch.inputs["x"][0, 0] == 2:
            batch.set_row_dims(0, 2)
        return {"sum": batch.inputs["x"].sum(1)}

    with serving(run, socket), rb.connect("wrong", socket=socket, wait=60) as m:
        assert joined(m.stream(np.zeros(2, "int32"))) == (b"\1\2\3", 0)
        assert wrong == ["Invalid", "Rows", "Shape", "DType", "DType", "Invalid"]
        with pytest.raises(rb.Failed, match="at most 64, row 0 would have 65"):
            joined(m.stream(np.array([1, 0], "int32")))
        with pytest.raises(rb.Failed, match="took back"):
            joined(m.stream(np.array([2, 0], "int32")))

    @rb.worker("fixed", inputs={"x": ("int32", (2,))}, outputs={"y": ("int32", ())}, wait_time=0)
    def fixed(batch):
        return batch.inputs["x"].sum(1)

    with serving(fixed, socket), rb.connect("fixed", socket=socket, wait=60) as m, pytest.raises(rb.Invalid, match="can grow"):
        m.stream(np.zeros(2, "int32"))


@pytest.mark.parametrize("use", ["for", "async for", "once"])
def test_a_stream_begins_again_on_another_worker(socket, writer, use):
    command = [sys.executable, str(writer), socket]
    first, second, parts = os.spawnv(os.P_NOWAIT, sys.executable, command), 0, []

    def replace() -> None:
        nonlocal second
        os.waitpid(first, 0)
        second = os.spawnv(os.P_NOWAIT, sys.executable, [*command, "again"])

    async def collect() -> None:
        async for part in stream:
            parts.append(part)

    with rb.connect("writer", socket=socket, wait=60) as m, in_threads(replace):
        stream = m.stream(np.array([40, 20], "int32"), timeout=60, from_start=use != "once")
        if use == "once":
            with pytest.raises(rb.Restarted):
                for part in stream:
                    parts.append(part)
        elif use == "for":
            parts += stream
        else:
            asyncio.run(collect())
    os.kill(second, signal.SIGKILL)
    os.waitpid(second, 0)
    before = joined(parts[: next((i for i, p in enumerate(parts) if p.restarted), len(parts))])
    assert before == (letters(len(before[0])), 0) and 0 < len(before[0]) <= 21
    if use != "once":
        assert joined(parts) == (letters(40, "A"), 1)
        assert bytes(stream.answer["text"]) == letters(40, "A")


def test_a_client_that_dies_in_the_middle_frees_its_row(socket, writer):
    worker = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, str(writer), socket])
    try:
        client = f"""
import numpy as np, os, signal, ringbatch as rb
for part in rb.connect("writer", socket={socket!r}, wait=60).stream(np.array([64, 99], "int32")):
    os.kill(os.getpid(), signal.SIGKILL)
"""
        assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", client]) == -signal.SIGKILL
        with rb.connect("writer", socket=socket, wait=60) as m:
            assert joined(m.stream(np.array([40, 99], "int32"), timeout=60)) == (letters(40), 0)
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_an_output_grows_beside_one_that_has_the_size_of_an_input(socket):
    @rb.worker("beside", inputs={"x": ("float32", ("n<=10",))}, outputs={"t": ("uint8", ("<=64",)), "y": ("float32", ("n<=10",))}, wait_time=0)
    def beside(batch):
        for row in range(batch.rows):
            batch.append("t", row, b"ab")
        return {"y": batch.inputs["x"] + 1}

    with serving(beside, socket), rb.connect("beside", socket=socket, wait=60) as m:
        got = m(np.zeros(3, np.float32))
        assert bytes(got["t"]) == b"ab" and got["y"].tolist() == [1, 1, 1]
