# SPDX-License-Identifier: Apache-2.0
"""State that survives its worker: sequences of a client, and models that declare state."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading

import numpy as np
import pytest
from conftest import broker_at, eventually, program, python, serving

import ringbatch as rb

SERVER = """
import os, time
import numpy as np
import ringbatch as rb

SPEC = {"inputs": {"x": ("int64", ())}, "outputs": {"y": ("int64", ())}, "max_batch_size": 8, "wait_time": 0}

@rb.worker("count", **SPEC, state={"n": ("int64", ()), "all": ("int64", (2,))})
def count(batch):
    x = batch.inputs["x"]
    for i, r in enumerate(batch.requests):
        if x[r.row] == 13:
            batch.fail(i, "thirteen")
    if (x == 14).any():
        raise ValueError("fourteen")
    if (x == 7).any():
        time.sleep(0.5)
    batch.state["n"] += 1
    batch.state["all"] = batch.state["all"] + np.stack([x, batch.fresh], axis=1)
    return batch.state["n"]

@rb.worker("pads", **{**SPEC, "max_batch_size": 4}, state={"h": ("int64", ())}, pad_to=4)
def pads(batch):
    h = batch.state["h"]
    assert h.shape == (4,) and not h[batch.rows:].any()
    batch.state["h"] = h + batch.inputs["x"]
    return batch.state["h"]

@rb.worker("wrong", **SPEC, state={"h": ("float32", (3,))})
def wrong(batch):
    x, new = batch.inputs["x"], np.zeros((batch.rows, 3), "float32")
    if x[0] == 1:
        return {"y": x, "h": new}
    if x[0] != 2:
        batch.state["nothing" if x[0] == 3 else "h"] = {4: new[:, :2], 5: new + 1j}.get(x[0], new)
    return x

@rb.worker("late", **SPEC)
def late(batch):
    assert "h" not in batch.state
    batch.fresh

@rb.worker("words", inputs={"x": ("float32", ("<=8",))}, outputs={"y": ("float32", ())}, state={"sum": ("float32", ())})
def words(batch):
    batch.state["sum"] = batch.state["sum"] + batch.inputs["x"].sum(axis=1)
    return batch.state["sum"]

@rb.worker("twice", inputs={"x": ("int64", ())}, outputs={"t": ("int64", ())}, state={"last": ("int64", ())})
def twice(batch):
    last, batch.state["last"] = batch.state["last"], batch.inputs["x"]
    return 2 * batch.inputs["x"] + 100 * last

@rb.worker("total", inputs={"t": ("int64", ())}, outputs={"y": ("int64", ())}, state={"sum": ("int64", ())})
def total(batch):
    batch.state["sum"] += batch.inputs["t"]
    return batch.state["sum"]

if __name__ == "__main__":
    if os.environ.get("PIPELINE"):
        rb.pipeline("sums", [twice, total])
    else:
        rb.serve([count, pads, wrong, late, words])
"""


@contextlib.contextmanager
def served(folder, **env):
    folder.chmod(0o700)
    at = str(folder / "b.sock")
    (folder / "server.py").write_text(SERVER)
    with program({**os.environ, "RINGBATCH_SOCKET": at, **env}, folder / "server.py"):
        yield at


@pytest.fixture(scope="module")
def at(tmp_path_factory):
    with served(tmp_path_factory.mktemp("run")) as socket:
        yield socket


@pytest.fixture
def count(at):
    with rb.connect("count", socket=at, wait=60) as m:
        yield m


def test_rows_are_reset_alone_and_fresh_says_so(count):
    with count.sequence(rows=3) as seq:
        ones = np.ones(3, "int64")
        assert seq.rows == 3 and seq.step(ones).tolist() == [1, 1, 1] and seq.step(ones).tolist() == [2, 2, 2]
        seq.reset(1)
        assert seq.step(ones).tolist() == [3, 1, 3]
        seq.reset([])
        seq.reset(np.array([True, False, True]))
        assert seq.step(ones).tolist() == [1, 2, 1]
        assert seq.state("all").tolist() == [[1, 1], [2, 1], [1, 1]]  # the sum of x, and of fresh, since the reset
        seq.reset()
        assert seq.state("n").tolist() == [0, 0, 0] and seq.step(ones).tolist() == [1, 1, 1]
        assert seq.state("all")[:, 1].tolist() == [1, 1, 1]  # to look at the state does not end fresh
        for wrong in (3, [-1], [True, False], [0.5], "a", [0, 1, 1], np.array([1, 0, 1])):
            with pytest.raises(rb.errors.Rows, match="3 rows"):
                seq.reset(wrong)
        with pytest.raises(rb.errors.Rows, match="row 2 is given twice"):
            seq.reset([2, 2])
        assert seq.state("n").tolist() == [1, 1, 1]
        seq.reset([2, 0, 1])  # numbers without a doubt
        assert seq.state("n").tolist() == [0, 0, 0]
        with pytest.raises(rb.errors.Rows, match="has 3 rows, the inputs have 1"):
            seq.step(1)


def test_a_step_that_ends_badly_leaves_the_state_and_may_be_sent_again(count):
    with count.sequence() as seq, count.sequence() as other:
        assert seq.step(1) == 1
        with pytest.raises(rb.Failed, match="thirteen"):
            seq.step(13)
        with pytest.raises(rb.Failed, match="fourteen"):
            seq.step(14)
        with pytest.raises(rb.Expired):
            seq.step(7, timeout=0.1)
        assert seq.state("n") == 1  # waits for the worker, which still has the step
        with pytest.raises(rb.Expired):
            other.step(7, timeout=0.1)
        assert seq.step(7, timeout=60) == 2 and other.step(1) == 1
        assert seq.state("all").tolist() == [8, 1] and other.state("all").tolist() == [1, 1]


def test_a_step_without_copies_and_in_asyncio(count):
    with count.sequence() as seq:
        with seq.request() as req:
            req.inputs["x"][...] = 5
            assert req.run().outputs["y"] == 1
        seq.request().release()  # never sent
        assert seq.step(1) == 2 and seq.state("all").tolist() == [6, 1]
        seq.reset()
        seq.request().release()
        assert seq.state("n") == 0 and seq.step(0) == 1 and seq.step(5) == 2 and seq.state("all").tolist() == [5, 1]  # it was fresh

        async def steps():
            assert await seq.astep(1) == 3 and await seq.astep(x=1) == 4
            with pytest.raises(rb.Failed, match="thirteen"):
                await seq.astep(13)
            slow = asyncio.ensure_future(seq.astep(7))
            await asyncio.sleep(0.1)
            for x in (1, np.array(1)):
                with pytest.raises(rb.errors.NotDone, match="under way"):
                    seq.step(x)
            slow.cancel()
            with pytest.raises(asyncio.CancelledError):
                await slow
            return await seq.astep(1)

        assert asyncio.run(steps()) == 5 and seq.step(1) == 6


def test_a_task_that_is_canceled_after_its_answer_came_leaves_the_state(count):
    async def steps(seq):
        answered = canceled = 0
        for turns in itertools.count():
            task = asyncio.ensure_future(seq.astep(1))
            for _ in range(turns % 40):
                await asyncio.sleep(0.0002)
            task.cancel()
            try:
                answered = await task
            except asyncio.CancelledError:
                canceled += 1
                assert seq.state("n") == answered
            if answered > 10 and canceled > 10:
                return

    with count.sequence() as seq:
        asyncio.run(steps(seq))


def test_variable_inputs_have_a_step_of_any_size(at):
    with rb.connect("words", socket=at, wait=60) as model, model.sequence() as seq:
        for n in (3, 0, 8):
            seq.step(np.ones(n, "float32"))
        assert seq.state("sum") == 11 and str(model._core.signature) == "x:f32[<=8] -> y:f32[] state sum:f32[]"
        assert repr(model.state) == "[sum:f32[]]"


def test_rows_of_padding_have_a_state_of_zeros(at):
    with rb.connect("pads", socket=at, wait=60) as model, model.sequence() as seq:
        assert [int(seq.step(n)) for n in (1, 2, 3)] == [1, 3, 6]


def test_the_state_is_read_set_and_copied(count):
    with count.sequence() as seq:
        seq.step(5)
        state = {name: seq.state(name) for name in ("n", "all")}
        seq.step(6)
        with seq.copy() as other:
            assert other.step(1) == 3 and other.step(1) == 4 and seq.step(1) == 3
        seq.set_state(state)
        assert seq.step(1) == 2 and seq.state("all").tolist() == [6, 1]
        seq.set_state(n=41)
        assert seq.step(1) == 42 and seq.state("all").tolist() == [7, 1]
        with pytest.raises(rb.errors.DType, match="^state 'n'.*int64"):
            seq.set_state(n=0.5, all=[0, 0])
        with pytest.raises(rb.errors.Shape, match="expected int64 of shape"):
            seq.set_state(all=[0, 0], n=[[1]])
        with pytest.raises(rb.Invalid, match="no state 'm'; there are n, all"):
            seq.set_state(m=1)
        assert seq.state("all").tolist() == [7, 1]  # all or nothing
    with count.sequence(rows=2) as two, two.copy() as other:
        assert other.step(np.ones(2, "int64")).tolist() == [1, 1] and other.state("all").tolist() == [[1, 1]] * 2
        with pytest.raises(rb.errors.Rows, match="2 rows"):
            two.set_state(n=[1, 2, 3])


def test_a_plain_call_has_a_fresh_state_and_a_closed_sequence_none(count):
    with pytest.warns(UserWarning, match="count has state.*seq.step") as warned:
        assert [count(1), count(x=1)] == [1, 1]
    assert len(warned) == 1
    assert count([1, 1]).tolist() == [1, 1]
    seq = count.sequence()
    assert count(1) == 1 and seq.step(1) == 1
    seq.close()
    for use in (lambda: seq.step(1), lambda: seq.state("n"), seq.reset, seq.copy):
        with pytest.raises(rb.errors.Closed):
            use()
    all_slots = [count.sequence() for _ in range(count.window)]
    with pytest.raises(rb.Full):
        count.sequence(timeout=0.05)
    for call in (lambda: count(1), lambda: count(1, priority=0), lambda: count.submit(1), lambda: asyncio.run(count.ainfer(1))):
        with pytest.raises(rb.errors.Rows, match="sequences keep 8 of its 8 slots"):  # at once, and not never
            call()
    del all_slots  # forgotten ones return their slots
    count.sequence(rows=count.window).close()


INTERRUPTED = '''
only_ours = True
with rb.connect("count") as m, m.sequence() as seq, m.sequence(rows=2) as two:
    for use, of in ((lambda: seq.step(1), seq), (lambda: seq.step(1, priority=0), seq), (lambda: seq.step(1, version=True), seq),
                    (lambda: two.step([1, 1]), two), (lambda: seq.request().run(), seq)):
        for at in itertools.count(1):
            before, answered = of.state("n"), []
            more = interrupted(lambda: answered.append(use()), at)
            assert (of.state("n") == before + len(answered)).all(), (at, before, answered)
            if not more:
                break
    def interrupt(*_):
        raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, interrupt)
    late = 0  # signals between the return of step and append, where no library can act
    for n in range(100):
        before, answered = seq.state("n"), []
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.00001 * (n + 1))
            answered.append(seq.step(np.array(1)))
            time.sleep(0.01)
        except KeyboardInterrupt:
            pass
        late += seq.state("n") - before - len(answered)
    assert 0 <= late <= 5, late  # without the undo nearly all
print("fine")
'''


def test_a_step_that_a_signal_handler_ends_leaves_the_state(at):
    from test_signals import STEPS

    assert python("import signal" + STEPS + INTERRUPTED, socket=at) == "fine"


def test_a_second_thread_hears_that_the_sequence_is_busy(count):
    said, quick = [], np.array(7)  # takes half a second

    def use(seq, *how) -> None:
        for f in how:
            try:
                f()
            except rb.errors.NotDone as e:
                said.append(str(e))

    with count.sequence() as seq:
        for step in (lambda: seq.step(quick), lambda: seq.step(7, priority=0)):
            said.clear()
            first = threading.Thread(target=step)
            first.start()
            eventually(lambda: count.stats()["slots_running"])
            use(seq, lambda: seq.step(quick), lambda: seq.step(1, priority=0), seq.reset, seq.copy, seq.close, lambda: seq.state("n"))
            first.join()
            assert len(said) == 6 and all("busy in another thread" in s for s in said), said
        assert seq.step(1) == 3


@pytest.mark.parametrize("x, said", [
    (1, "returned the state 'h': assign it"), (2, "state 'h' was not assigned"),
    (3, "no state 'nothing'; there are h"), (4, r"state 'h': expected 1 rows of float32 of shape \(3,\); got shape \(1, 2\)"),
    (5, "state 'h': expected .*; got complex64"),
])  # fmt: skip
def test_a_function_that_forgets_its_state_fails_by_name(at, x, said):
    with rb.connect("wrong", socket=at, wait=60) as model, model.sequence() as seq:
        with pytest.raises(rb.Failed, match=said):
            seq.step(x)
        assert seq.step(6) == 6


def test_a_model_without_state_says_so(at):
    with rb.connect("late", socket=at, wait=60) as model:
        with pytest.raises(rb.Failed, match="the model has no state"):
            model(1)
        with pytest.raises(rb.Invalid, match="no state"):
            model.sequence()


@pytest.mark.parametrize("state, said", [
    ({"h": ("float32", ("<=4",))}, "state h:f32\\[<=4\\]: the shape of a state is fixed"),
    ({"x": ("float32", (4,))}, "state 'x' has the name of an input"), ("y:f32[4]", "state 'y' has the name of an output"),
    (["h:f32[4]", "h:f32[5]"], "state 'h' has the name of another state"), ({"h": ("float32", (1,) * 8)}, "at most 7 dimensions"),
])  # fmt: skip
def test_a_wrong_declaration_is_refused(state, said):
    with pytest.raises(rb.Invalid, match=said):
        rb.worker("m", inputs="x:f32[4]", outputs="y:f32[4]", state=state)


def test_each_stage_of_a_pipeline_has_its_state(tmp_path):
    with served(tmp_path, PIPELINE="1") as at, rb.connect("sums", socket=at, wait=60) as model, model.sequence() as seq:
        assert [int(seq.step(x)) for x in (1, 2, 3)] == [2, 2 + 104, 106 + 206]
        assert seq.state("last") == 3 and seq.state("sum") == 312
        seq.reset()
        assert seq.step(1) == 2 and model(1) == 2


def test_a_restarted_broker_has_lost_the_state_until_the_reset(tmp_path):
    tmp_path.chmod(0o700)
    at = str(tmp_path / "b.sock")

    @rb.worker("count", inputs="x:i64[]", outputs="y:i64[]", state="n:i64[]")
    def run(batch):
        batch.state["n"] += 1
        return batch.state["n"]

    with contextlib.ExitStack() as stack, broker_at(at) as first:
        stack.enter_context(serving(run, at))
        model = stack.enter_context(rb.connect("count", socket=at, wait=60))
        seq, other = model.sequence(), model.sequence(rows=2)
        assert seq.step(1) == 1 and other.step([1, 1]).tolist() == [1, 1]
        first.kill()
        first.wait()
        with broker_at(at):
            eventually(lambda: rb.stats(at).get("models") and model(1, timeout=60) == 1)
            lost = [lambda: seq.step(1), lambda: seq.state("n"), seq.copy, lambda: seq.set_state(n=1)]
            for use in [*lost, lambda: other.step([1, 1]), lambda: other.reset([1])]:
                with pytest.raises(rb.StateLost, match="reset") as caught:
                    use()
                assert not caught.value.retryable
            seq.reset()
            other.reset([True, True])  # all rows
            assert seq.step(1) == 1 and seq.step(1) == 2 and other.step([1, 1]).tolist() == [1, 1]
            stack.close()
