# SPDX-License-Identifier: Apache-2.0
"""Workers with lanes: models that go round."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import threading
import time

import numpy as np
import pytest
from conftest import broker_at, eventually, program, serving

import ringbatch as rb
from ringbatch.worker.ring import Ring

COUNT = {"inputs": {"n": ("int32", (2,))}, "outputs": {"text": ("uint8", ("<=64",)), "sum": ("int64", ())}}
LANES = 4


def text_of(first: int, length: int) -> np.ndarray:
    return ((first + np.arange(length)) % 251).astype(np.uint8)


class Counter:
    """A row [first, length] gives the numbers from first on, one a round, and their sum."""

    def __init__(self) -> None:
        self.first, self.left, self.at, self.sum = (np.zeros(LANES, np.int64) for _ in range(4))
        self.rounds, self.most, self.begun = 0, 0, []

    def start(self, lanes, rows):
        assert len(lanes) == len(rows)
        self.begun += [lanes.tolist()]
        n = rows.inputs["n"]
        self.first[lanes], self.left[lanes], self.at[lanes], self.sum[lanes] = n[:, 0], n[:, 1], 0, 0

    def step(self, lanes):
        self.rounds, self.most = self.rounds + 1, max(self.most, len(lanes))
        letters = (self.first + self.at) % 251
        self.at[lanes] += 1
        self.left[lanes] -= 1
        self.sum[lanes] += letters[lanes]
        return {"text": letters.astype(np.uint8), "sum": self.sum}, self.left <= 0


def check(answer, first: int, length: int) -> None:
    want = text_of(first, length)
    np.testing.assert_array_equal(answer["text"], want)
    assert answer["sum"] == want.sum()


@contextlib.contextmanager
def counting(socket: str, model: str, made, **options):
    worker = rb.worker(model, **COUNT, lanes=LANES, **options)(made)
    with serving(worker, socket), rb.connect(model, socket=socket, wait=60, window=32) as m:
        yield m


def test_rows_leave_their_lanes_alone_and_new_ones_take_them(socket):
    made = Counter()
    with counting(socket, "count", made) as m:
        asked = [(i, 1 + 13 * i % 37) for i in range(60)]
        futures = [m.submit(np.array(n, np.int32)) for n in asked]
        for f, (first, length) in zip(futures, asked):
            check(f.result(60), first, length)
        rounds = made.rounds
        assert rounds < sum(length for _, length in asked) / 2, "rows did not share rounds"
        assert made.most == LANES
        (w,) = [w for x in rb.stats(socket)["models"] if x["name"] == "count" for w in x["workers"]]
        assert w["rounds"] == sum(length for _, length in asked)
        check(m(np.array([7, 64], np.int32)), 7, 64)  # as long as the output holds


class Held(Counter):
    """Stops when the row that begins with 5 has 20 numbers, until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def step(self, lanes):
        if (self.at[lanes][self.first[lanes] == 5] == 20).any():
            assert self.go.wait(60)
        return super().step(lanes)


def test_a_model_may_change_the_lanes_that_it_is_told(socket):
    class Changes(Counter):
        def start(self, lanes, rows):
            super().start(lanes, rows)
            lanes[:] = 0

        def step(self, lanes):
            result = super().step(lanes)
            lanes[:] = 0
            return result

    with counting(socket, "changes", Changes()) as m:
        asked = [(100 * k, 10 + k) for k in range(2 * LANES)]
        for future, (first, length) in zip([m.submit(np.array(a, np.int32)) for a in asked], asked):
            check(future.result(60), first, length)


def test_rows_in_lanes_stream(socket):
    with counting(socket, "streamed", made := Held()) as m:
        plain = [m.submit(np.array([i + 10, 64], np.int32)) for i in range(8)]
        parts = []
        for part in m.stream(np.array([5, 40], np.int32)):
            parts.append(part)
            made.go.set()
        assert len(parts) > 1 and not any(p.restarted for p in parts)
        np.testing.assert_array_equal(np.concatenate([p.values for p in parts]), text_of(5, 40))
        for i, f in enumerate(plain):
            check(f.result(60), i + 10, 64)


class Short:
    """Ends each row after two elements."""

    def start(self, lanes, rows):
        self.at = getattr(self, "at", np.zeros(LANES, int))
        self.at[lanes] = 0

    def step(self, lanes):
        self.at[lanes] += 1
        return {"y": self.at.astype(np.float32)}, self.at == 2


def test_a_row_of_a_size_that_its_input_has_not_fails_alone(socket):
    short = rb.worker("tied", inputs={"x": ("float32", ("n<=10",))}, outputs={"y": ("float32", ("n<=10",))}, lanes=LANES)(Short())
    with serving(short, socket), rb.connect("tied", socket=socket, wait=60) as m:
        for n in (2, 5, 2):
            if n == 2:
                np.testing.assert_array_equal(m(np.zeros(n, np.float32)), [1, 2])
            else:
                with pytest.raises(rb.Failed, match="n"):
                    m(np.zeros(n, np.float32))


class Words(Counter):
    """The same in words of two, as a list with nothing for the first round; it never has a sum for odd lengths."""

    def step(self, lanes):
        words = [text_of(f + 2 * (a - 1), 2) if a else [] for f, a in zip(self.first[lanes], self.at[lanes])]
        self.at[lanes] += 1
        self.left[lanes] -= 2
        done = self.left[lanes] < -1
        return {"text": words, "sum": np.full(len(lanes), 5)}, done, {int(n): "odd" for n in lanes[done] if self.left[n] % 2}


def test_a_round_appends_any_number_of_elements_and_may_fail_a_row(socket):
    with counting(socket, "words", Words()) as m:
        futures = [m.submit(np.array([i, i], np.int32)) for i in range(2, 12)]
        for i, f in enumerate(futures, 2):
            if i % 2:
                with pytest.raises(rb.Failed, match="odd"):
                    f.result(60)
            else:
                np.testing.assert_array_equal(f.result(60)["text"], text_of(i, i))
        with pytest.raises(rb.Failed, match="at most 64"):
            m(np.array([0, 66], np.int32))


def test_a_list_may_have_nothing_for_a_lane_also_where_elements_are_rows(socket):
    class Pairs(Counter):
        def step(self, lanes):
            _, done = super().step(lanes)
            return {"pairs": [[[a, a]] if a % 2 else [] for a in self.at[lanes].tolist()]}, done

    outputs = {"pairs": ("int64", ("<=64", 2))}
    with serving(rb.worker("pairs", inputs=COUNT["inputs"], outputs=outputs, lanes=LANES)(Pairs()), socket), \
            rb.connect("pairs", socket=socket, wait=60) as m:  # fmt: skip
        assert m(np.array([0, 6], np.int32)).tolist() == [[1, 1], [3, 3], [5, 5]]


class Poison(Counter):
    """Raises in the third round of a row that begins with 13, and at the start of a row that begins with 14."""

    def start(self, lanes, rows):
        super().start(lanes, rows)
        if (rows.inputs["n"][:, 0] == 14).any():
            raise ValueError("fourteen")

    def step(self, lanes):
        if ((self.first[lanes] == 13) & (self.at[lanes] == 2)).any():
            raise ValueError("thirteen")
        return super().step(lanes)


class Together(Poison):
    """Rows that begin with 20 and more stop at five elements until a row that begins with 13 is beside them."""

    met = False

    def step(self, lanes):
        self.met |= (self.first[lanes] == 13).any()
        stops = (self.first[lanes] >= 20) & (self.at[lanes] == 5) & (not self.met)
        outputs, done = super().step(lanes[~stops])
        return {"text": [[] if stop else [outputs["text"][n]] for n, stop in zip(lanes, stops)], "sum": self.sum}, done


def test_streams_beside_a_row_that_raises_begin_again_and_say_so(socket):
    with counting(socket, "together", Together()) as m:
        good, once = m.stream(np.array([20, 64], np.int32)), m.stream(np.array([30, 64], np.int32), from_start=False)
        parts = [next(good)]
        next(once)
        with pytest.raises(rb.Failed, match="thirteen"):
            list(m.stream(np.array([13, 20], np.int32)))
        parts += good
        restarted = [p.restarted for p in parts]
        assert sum(restarted) >= 1
        again = len(parts) - 1 - restarted[::-1].index(True)
        np.testing.assert_array_equal(np.concatenate([p.values for p in parts[again:]]), text_of(20, 64))
        with pytest.raises(rb.Restarted):
            list(once)


@pytest.mark.parametrize("run_once", [False, True])
def test_only_the_row_to_blame_fails_unless_rows_run_once(socket, run_once):
    name = f"poison{run_once}"
    with counting(socket, name, Poison(), run_once=run_once) as m:
        asked = [(i, 20) for i in range(24)]
        failed = set()
        for f, (first, length) in zip([m.submit(np.array(n, np.int32)) for n in asked], asked):
            try:
                check(f.result(60), first, length)
            except rb.Failed as e:
                assert "thirteen" in str(e) or "fourteen" in str(e)
                failed.add(first)
        assert failed == {13, 14} if not run_once else {13, 14} <= failed


def test_a_canceled_or_expired_row_frees_its_lane(socket):
    made, go = Counter(), threading.Semaphore(0)
    step = made.step
    made.step = lambda lanes: (go.acquire(timeout=5), step(lanes))[1]
    with counting(socket, "slow", made) as m, m.request() as lost:
        kept = [m.submit(np.array([i, 60], np.int32)) for i in range(2)]
        lost.inputs["n"][...] = 1, 64
        lost.commit()
        late = m.submit(np.array([1, 64], np.int32), timeout=0.5)
        eventually(lambda: go.release() or sum(map(len, made.begun)) >= LANES - 1)  # it may expire in the queue
        waiting = [m.submit(np.array([i, 3], np.int32)) for i in (5, 6)]
        lost.cancel()
        with pytest.raises(rb.Expired):
            late.result(60)
        for _ in range(200):
            go.release()
        for f, n in [*zip(kept, [(0, 60), (1, 60)]), *zip(waiting, [(5, 3), (6, 3)])]:
            check(f.result(60), *n)


class Transducer:
    """Each chunk continues the sequence: as many letters as the chunk says."""

    def __init__(self) -> None:
        self.h, self.left = np.zeros(LANES, np.int64), np.zeros(LANES, np.int64)

    def start(self, lanes, rows):
        assert ((rows.state["h"] == 0) | ~rows.fresh).all()
        self.h[lanes], self.left[lanes] = rows.state["h"], rows.inputs["n"][:, 1]
        return {int(n): "bad chunk" for n, x in zip(lanes, rows.inputs["n"]) if x[0] < 0}

    def step(self, lanes):
        letters = (self.h % 251).astype(np.uint8)
        self.h[lanes] += 1
        self.left[lanes] -= 1
        return {"text": letters, "sum": self.h, "h": self.h}, self.left <= 0


def test_the_state_of_a_sequence_advances_if_and_only_if_the_step_was_answered(socket):
    worker = rb.worker("chunks", **COUNT, state={"h": ("int64", ())}, lanes=LANES)(Transducer)
    with serving(worker, socket), rb.connect("chunks", socket=socket, wait=60) as m, m.sequence() as a, m.sequence() as b:
        for k in range(5):
            np.testing.assert_array_equal(a.step(np.array([0, 3], np.int32))["text"], text_of(3 * k, 3))
            with pytest.raises(rb.Failed, match="bad chunk"):
                a.step(np.array([-1, 3], np.int32))
            np.testing.assert_array_equal(b.step(np.array([0, 2], np.int32))["text"], text_of(2 * k, 2))
        np.testing.assert_array_equal(m(np.array([0, 2], np.int32))["text"], text_of(0, 2))


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_a_sequence_that_streams_advances_if_and_only_if_the_stream_ended_well(socket, in_a_loop):
    async def parts_of(stream):
        return [part.values async for part in stream]

    def all_of(chunk):
        stream = seq.stream(np.array(chunk, np.int32), timeout=60)
        parts = asyncio.run(parts_of(stream)) if in_a_loop else [part.values for part in stream]
        np.testing.assert_array_equal(np.concatenate(parts), stream.answer["text"])
        return stream.answer["text"]

    worker = rb.worker("chunks", **COUNT, state={"h": ("int64", ())}, lanes=LANES)(Transducer)
    with serving(worker, socket), rb.connect("chunks", socket=socket, wait=60) as m, m.sequence() as seq:
        for k in range(5):
            np.testing.assert_array_equal(all_of([0, 3]), text_of(4 * k, 3))
            with seq.stream(np.array([0, 64], np.int32)) as left:
                assert len(next(left).values)  # the caller leaves in the middle, or after the worker's end
                with pytest.raises(rb.NotDone, match="under way.*close its stream"):
                    seq.step(np.array([0, 1], np.int32))
            with pytest.raises(rb.Failed, match="bad chunk"):
                all_of([-1, 3])
            np.testing.assert_array_equal(seq.step(np.array([0, 1], np.int32))["text"], text_of(4 * k + 3, 1))
        late, left = seq.stream(np.array([0, 1], np.int32)), seq.stream(np.array([0, 64], np.int32))
        next(left)
        seq.close()
        for stream in (late, left):
            with pytest.raises(rb.Closed, match="the sequence was closed"):
                list(stream)


class Lengths:
    """Sums the first k tokens in round k; as long as the row of tokens."""

    def start(self, lanes, rows):
        assert [t.dtype for t in rows.inputs["tokens"]] == [np.float32] * len(lanes)
        self.rows = {**getattr(self, "rows", {}), **dict(zip(lanes.tolist(), map(list, rows.inputs["tokens"])))}
        self.total = {**getattr(self, "total", {}), **dict.fromkeys(lanes.tolist(), 0.0)}

    def step(self, lanes):
        for n in lanes.tolist():
            self.total[n] += self.rows[n].pop(0)
        return {"sums": [[[self.total[n], 1.0]] for n in lanes.tolist()]}, np.array([not self.rows[n] for n in lanes.tolist()])


def test_inputs_of_variable_size_are_lists(socket):
    worker = rb.worker("sums", inputs={"tokens": "f32[<=16]"}, outputs={"sums": "f64[<=16,2]"}, lanes=3)(Lengths)
    with serving(worker, socket), rb.connect("sums", socket=socket, wait=60, window=16) as m:
        rows = [np.arange(1, n + 1, dtype=np.float32) for n in range(1, 12)]
        for f, x in zip([m.submit(x) for x in rows], rows):
            y = f.result(60)
            assert y.shape == (len(x), 2)
            np.testing.assert_array_equal(y[:, 0], np.cumsum(x))


WORKER = """
import sys
sys.path.insert(0, {tests!r})
import os, signal
import ringbatch as rb
from test_lanes import COUNT, LANES, Counter

class Deadly(Counter):
    def step(self, lanes):
        if ((self.first[lanes] == 13) & (self.at[lanes] == 2)).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(lanes)

@rb.worker("deadly", **COUNT, lanes=LANES)
class Made(Deadly):
    pass

if __name__ == "__main__":
    rb.serve(Made, processes=2)
"""


def test_a_row_that_kills_workers_between_rounds_fails_alone(env, tmp_path):
    file = tmp_path / "deadly.py"
    file.write_text(WORKER.format(tests=os.path.dirname(__file__)))
    with program(env, file), rb.connect("deadly", socket=env["RINGBATCH_SOCKET"], wait=60, window=32) as m:
        asked = [(i, 5 + i) for i in range(30)]
        for f, (first, length) in zip([m.submit(np.array(n, np.int32)) for n in asked], asked):
            if first == 13:
                with pytest.raises(rb.WorkerDied):
                    f.result(120)
            else:
                check(f.result(120), first, length)


CHUNKS = """
import sys
sys.path.insert(0, {tests!r})
import os, signal, time
import numpy as np
import ringbatch as rb
from test_lanes import COUNT, LANES, Transducer

@rb.worker("killed", **COUNT, state={{"h": ("int64", ())}}, lanes=LANES)
class Made(Transducer):
    def start(self, lanes, rows):
        self.at = getattr(self, "at", np.zeros(LANES, int))
        self.at[lanes] = rows.inputs["n"][:, 0]
        return super().start(lanes, rows)

    def step(self, lanes):
        time.sleep(0.001)
        if ((self.at == 13) & (self.left == 2))[lanes].any():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(lanes)

if __name__ == "__main__":
    rb.serve(Made, processes=2)
"""


def test_a_sequence_goes_on_from_its_last_answer_while_workers_are_killed(env, tmp_path):
    file, socket = tmp_path / "chunks.py", env["RINGBATCH_SOCKET"]
    file.write_text(CHUNKS.format(tests=os.path.dirname(__file__)))
    steps, wrong = [0] * 6, []

    def speak(m, of: int) -> None:
        with m.sequence() as s:
            at = 0  # the state after the last answer
            for _ in range(30):
                try:
                    text = s.step(np.array([0, 4], np.int32))["text"]
                except rb.WorkerDied:  # it was there with a deadly one: nothing was delivered
                    continue
                if not np.array_equal(text, text_of(at, 4)):
                    wrong.append((of, at, text))
                at, steps[of] = at + 4, steps[of] + 1
            if of == 0:
                with pytest.raises(rb.WorkerDied):
                    s.step(np.array([13, 4], np.int32))
            np.testing.assert_array_equal(s.step(np.array([0, 4], np.int32))["text"], text_of(at, 4))

    def kill() -> int:
        pids = [w["pid"] for w in rb.stats(socket)["models"][0]["workers"]]
        for pid in pids[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(pids[:1])

    with program(env, file), rb.connect("killed", socket=socket, wait=60, window=16) as m:
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            speakers = [pool.submit(speak, m, of) for of in range(6)]
            killed = 0
            for goal in (10, 60, 110):
                eventually(lambda goal=goal: sum(steps) >= goal or all(f.done() for f in speakers))
                killed += kill()
            for f in speakers:
                f.result(240)
    assert not wrong and killed, wrong


def test_rows_begin_again_on_the_next_broker(at):
    made = Counter()
    made.step, step = (lambda lanes: (time.sleep(0.001), step(lanes))[1]), made.step
    worker = rb.worker("again", **COUNT, lanes=LANES)(made)
    with broker_at(at) as first, serving(worker, at):
        with rb.connect("again", socket=at, wait=60, retry=60, window=16) as m:
            futures = [m.submit(np.array([i, 60], np.int32)) for i in range(8)]
            eventually(lambda: made.rounds > 20)
            first.send_signal(signal.SIGKILL)
            first.wait()
            with broker_at(at):
                for i, f in enumerate(futures):
                    check(f.result(120), i, 60)


def test_new_weights_wait_until_no_row_is_in_a_lane(socket):
    class Weighted(Counter):
        def start(self, lanes, rows):
            super().start(lanes, rows)
            self.w = rows.weights["w"]

        def step(self, lanes):
            outputs, done = super().step(lanes)
            return {"text": np.full(LANES, self.w[0], np.uint8), "sum": outputs["sum"]}, done

    worker = rb.worker("weighted", **COUNT, lanes=LANES, live_weights=True)(Weighted)
    with serving(worker, socket), rb.publisher("weighted", {"w": np.zeros(1, np.float32)}, socket=socket, wait=60) as p:
        p.publish({"w": np.ones(1, np.float32)})
        with rb.connect("weighted", socket=socket, wait=60, window=32) as m:
            futures = []
            for version in range(2, 12):
                futures += [m.submit(np.array([i, 40], np.int32)) for i in range(6)]
                p.publish({"w": np.full(1, version, np.float32)})
            seen = [f.result(60)["text"] for f in futures]
        assert all(len(t) == 40 and (t == t[0]).all() for t in seen), "versions mixed in a row"
        assert seen[-1][0] >= 2


class Weighted(Counter):
    """Each number is the weight of its round. The row that begins with 5 waits in round 20, and in round 40 goes on beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.go, self.last = threading.Event(), threading.Event(), threading.Event()

    def start(self, lanes, rows):
        super().start(lanes, rows)
        self.weights = rows.weights

    def step(self, lanes, weights=None):
        long, at = self.first[lanes] == 5, self.at[lanes]
        if (long & (at == 20)).any():
            self.held.set()
            assert self.go.wait(60)
        stops = long & (at == 40) & (not self.last.is_set())
        super().step(lanes[~stops])
        w = int((weights or self.weights)["w"][0])
        return {"text": [[] if stop else [w] for stop in stops], "sum": self.sum}, self.left <= 0


@pytest.mark.parametrize("mix", [False, True])
def test_new_weights_come_in_the_middle_of_rows_only_where_they_may_mix(socket, mix):
    made, name = Weighted(), f"mixed{mix}"
    worker = rb.worker(name, **COUNT, lanes=LANES, live_weights=True, mix_versions=mix)(made)
    with serving(worker, socket), rb.publisher(name, {"w": np.zeros(1, np.float32)}, socket=socket, wait=60) as p:
        p.publish({"w": np.ones(1, np.float32)})
        with rb.connect(name, socket=socket, wait=60) as m:
            long = m.submit(np.array([5, 60], np.int32))
            assert made.held.wait(60)
            assert p.publish({"w": np.full(1, 2, np.float32)}) == 2
            after = m.submit(np.array([7, 3], np.int32))
            made.go.set()
            if not mix:
                made.last.set()
            assert (after.result(60)["text"].tolist(), after.version) == ([2] * 3, 2)
            assert long.done() != mix
            made.last.set()
            assert (long.result(60)["text"].tolist(), long.version) == ([1] * 21 + [2] * 39 if mix else [1] * 60, 1)


def test_weights_that_were_published_while_a_row_was_taken_wait_for_the_lanes(socket, monkeypatch):
    made, asked = Weighted(), []
    made.last.set()
    worker = rb.worker("raced", **COUNT, lanes=LANES, live_weights=True)(made)
    with serving(worker, socket), rb.publisher("raced", {"w": np.zeros(1, np.float32)}, socket=socket, wait=60) as p:
        p.publish({"w": np.ones(1, np.float32)})
        with rb.connect("raced", socket=socket, wait=60) as m:
            take = Ring.next

            def publishes_before(ring, patience):
                if made.at.max() == 21 and not asked:
                    p.publish({"w": np.full(1, 2, np.float32)})
                    asked.append(m.submit(np.array([7, 3], np.int32)))
                    patience = 60 * 10**9
                return take(ring, patience)

            monkeypatch.setattr(Ring, "next", publishes_before)
            made.go.set()
            assert m(np.array([5, 60], np.int32))["text"].tolist() == [1] * 60
            assert (asked[0].result(60)["text"].tolist(), asked[0].version) == ([2] * 3, 2)


def test_a_worker_that_may_mix_versions_has_lanes_and_weights(socket):
    with pytest.raises(rb.Invalid, match="lanes="):
        rb.worker("mixes", **COUNT, live_weights=True, mix_versions=True)
    with pytest.raises(rb.Invalid, match="follows no weights"):
        rb.worker("mixes", **COUNT, lanes=LANES, mix_versions=True)(Counter).run(socket=socket, wait=60)


def test_wrong_models_and_rounds_are_refused_by_name(socket):
    for options, said in [
        ({"lanes": 0.5}, "lanes=0.5"), ({"lanes": 1000}, "1 to"), ({"lanes": 2, "max_batch_size": 8}, "max_batch_size"),
        ({"lanes": 2, "pad_to": 8}, "pad_to"), ({"lanes": 2, "depth": 8}, "depth"),
    ]:  # fmt: skip
        with pytest.raises(rb.Invalid, match=said):
            rb.worker("wrong", **COUNT, **options)
    with pytest.raises(rb.Invalid, match="first dimension"):
        rb.worker("wrong", inputs="x:f32[]", outputs="y:f32[4,<=4]", lanes=2)
    with pytest.raises(rb.Invalid, match="step"):
        rb.worker("wrong", **COUNT, lanes=2)(type("NoStep", (), {"start": print}))
    made = Counter()
    with counting(socket, "wrong", made) as m:
        for result, said in [
            (None, "want outputs, done"), (({"text": np.zeros(LANES, np.uint8)}, np.ones(LANES, bool)), "no sum"),
            (({"texts": 1}, np.ones(1, bool)), "texts"), (({"text": np.zeros(3, np.uint8), "sum": 0}, np.ones(1, bool)), "3"),
            (({"text": np.zeros(1), "sum": [0]}, np.ones(1, bool)), "float64"), (({"text": [0], "sum": [0]}, [0.5]), "bool"), (({"text": [256], "sum": [0]}, [True]), "no room for 256"),
            (({"text": [0], "sum": [0]}, [np.nan]), "bool"), (({"text": [0], "sum": [0]}, [1]), "bool"), (({"text": [0], "sum": [0]}, True), "done"),
            (({"text": np.zeros((1, 65), np.uint8), "sum": [0]}, [False]), "at most 64"), (({"text": [0], "sum": [0]}, [True], ["no"]), "list"),
            (({"text": [[[0]]], "sum": [0]}, [True]), "shape"), (({"text": [0], "sum": [0]}, [True], {"a": "no"}), "lane a"),
            (({"text": np.ones(1, np.uint8), "sum": [0]}, np.zeros(1, bool), {3: "not mine"}), "lane 3"),
            (({"text": [0], "sum": [0]}, [True], {False: "no"}), "lane False"),
        ]:  # fmt: skip
            made.step = lambda lanes, result=result: result
            with pytest.raises(rb.Failed, match=said):
                m(np.array([1, 2], np.int32))
        for text, want in [(b"ab", b"ab"), ([1, 2, 3], bytes([1, 2, 3])), (7, b"\x07"), ([], b"")]:
            made.step = lambda lanes, text=text: ({"text": [text], "sum": [3]}, [True], None)
            assert bytes(m(np.array([1, 2], np.int32))["text"]) == want
        del made.step
        check(m(np.array([1, 2], np.int32)), 1, 2)


def test_a_class_of_rounds_without_lanes_is_told_to_have_them(socket):
    with pytest.raises(rb.Invalid, match="needs lanes="):
        rb.worker("none", **COUNT)(Counter).run(socket=socket)


def test_a_row_whose_answer_is_refused_fails_alone(socket):
    class TakesBack(Counter):
        def start(self, lanes, rows):
            super().start(lanes, rows)
            for batch, n in zip(rows._batches, rows.inputs["n"]):
                if n[0] == 13:
                    batch.show(0, 64)  # no worker does this: the library refuses to answer with fewer

    with counting(socket, "back", TakesBack()) as m:
        futures = [m.submit(np.array([i, 30], np.int32)) for i in range(10, 20)]
        for i, f in enumerate(futures, 10):
            if i == 13:
                with pytest.raises(rb.Failed, match="took back"):
                    f.result(60)
            else:
                check(f.result(60), i, 30)


def test_one_lane_is_enough(socket):
    class One(Counter):
        def step(self, lanes):
            outputs, done = super().step(lanes)
            return {name: values[lanes] for name, values in outputs.items()}, done[lanes].tolist()

    worker = rb.worker("one", **COUNT, lanes=1)(One())
    with serving(worker, socket), rb.connect("one", socket=socket, wait=60, window=16) as m:
        for i, f in enumerate([m.submit(np.array([i, 5 + i], np.int32)) for i in range(12)]):
            check(f.result(60), i, 5 + i)
