# SPDX-License-Identifier: Apache-2.0
"""Plays honest clients and victims of test/cmd/chaos with the Python package.

    peer.py load SOCKET MODEL SEED THREADS PAUSE_US TIMEOUT_MS   honest requests until SIGTERM
    peer.py victims SOCKET MODEL                                 for each line '"STEP AFTER SEED"' a client that dies there
    peer.py forks SOCKET MODEL client|worker SEED                ends a session in good order while a forked child lives on
    peer.py signals SOCKET MODEL SEED SECONDS                    exceptions of signal handlers strike anywhere
    peer.py loops SOCKET MODEL SEED ROUNDS                       event loops and coroutines are closed over requests

Its messages are lines of JSON, as testbed.Child writes them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import random
import signal
import struct
import sys
import threading
import time

import numpy as np
import ringbatch as rb
from ringbatch.client import connection

WIDTH = 16
GRACE = 0.1
LONG_NAP = GRACE / 4  # a nap of 10 ms that takes longer: this process stood still
PATIENCE = 100  # seconds, for every expected event, on any machine
connection._CONNECT_TIMEOUT_NS = PATIENCE * 1_000_000_000  # a broker that stands still lives
PLACES = np.arange(WIDTH, dtype=np.int64) * 0x85EBCA6B

socket, model = sys.argv[2:4]


def tell(name: str, data: object = None) -> None:
    sys.stdout.write(json.dumps({"name": name, "data": data}) + "\n")
    sys.stdout.flush()


def answer(x: np.ndarray) -> np.ndarray:
    """testbed.Answer"""
    with np.errstate(over="ignore"):
        return x * np.int64(0x9E3779B9) + PLACES + (x >> 7)


def some_rows(rng: random.Random, rows: int) -> np.ndarray:
    x = np.frombuffer(rng.randbytes(rows * WIDTH * 8), dtype=np.int64).reshape(rows, WIDTH).copy()
    x[:, 0] = 0  # the command to answer
    return x


class WrongBytes(Exception):
    pass


def check(x: np.ndarray, y: np.ndarray) -> None:
    # Not np.array_equal: it takes an exception of a signal's handler in its midst for "not equal".
    expected = answer(x)
    if y.shape != expected.shape or y.tobytes() != expected.tobytes():
        raise WrongBytes


# ---- load


def by_request(client: rb.Client, x: np.ndarray, timeout: float) -> None:
    end = time.monotonic() + timeout
    with client.request(rows=len(x), timeout=timeout) as req:
        req.inputs["x"][...] = x
        check(x, req.run(timeout=max(1e-6, end - time.monotonic())).outputs["y"])


def by_call(client: rb.Client, x: np.ndarray, timeout: float) -> None:
    check(x, client(x, timeout=timeout))


def by_future(client: rb.Client, x: np.ndarray, timeout: float) -> None:
    check(x, client.submit(x, timeout=timeout).result())


def by_coroutine(client: rb.Client, x: np.ndarray, timeout: float) -> None:
    async def one() -> None:
        check(x, await client.ainfer(x, timeout=timeout))

    asyncio.run(one())


WAYS = [by_call, by_call, by_request, by_request, by_future, by_coroutine]


def play_load(seed: str, threads: str, pause_us: str, timeout_ms: str) -> None:
    timeout, pause = int(timeout_ms) / 1e3, int(pause_us) / 1e6
    stopping, lock = threading.Event(), threading.Lock()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    tally: dict = {"OK": 0, "Named": collections.Counter(), "Wrong": [], "Late": [], "Stood": 0, "Slowest": 0}
    client = rb.connect(model, socket=socket, window=3 * int(threads), wait=PATIENCE)

    def watch() -> None:  # adds up the time for which this process stood still
        while True:
            start = time.monotonic()
            time.sleep(0.01)
            if (took := time.monotonic() - start) > LONG_NAP:
                tally["Stood"] += int(took * 1e9)

    def run(k: int) -> None:
        rng = random.Random(f"{seed}/{k}")
        while not stopping.is_set():
            x, way = some_rows(rng, 1 + rng.randrange(3)), rng.choice(WAYS)
            start, before, name = time.monotonic(), tally["Stood"], "OK"
            try:
                way(client, x, timeout)
            except rb.Error as e:
                name = type(e).__name__
            except WrongBytes:
                name = "Wrong"
            took = time.monotonic() - start
            if took > timeout + GRACE:
                time.sleep(GRACE)  # the watcher may have stood still too
            stood = (tally["Stood"] - before) / 1e9
            with lock:
                if name == "OK":
                    tally["OK"] += 1
                elif name == "Wrong":
                    tally["Wrong"].append(f"an answer of the Python client ({way.__name__}) has wrong bytes")
                else:
                    tally["Named"][name] += 1
                if took > timeout + GRACE + stood:
                    tally["Late"].append(f"a request of the Python client ({way.__name__}) took {took:.3f} s of {timeout} s: {name}")
                tally["Slowest"] = max(tally["Slowest"], int(took * 1e9))
            if pause:
                time.sleep(pause / 2 + rng.random() * pause)

    threading.Thread(target=watch, daemon=True).start()
    all = [threading.Thread(target=run, args=(k,)) for k in range(int(threads))]
    for t in all:
        t.start()
    tell("ready")
    while not stopping.wait(1):
        pass
    faulthandler.dump_traceback_later(PATIENCE, exit=True)  # shows where a request hangs
    for t in all:
        t.join()
    tell("tally", tally)
    client.close()


# ---- victims


def victim(to_parent: int, step: str, after: int, rng: random.Random) -> None:
    def at(now: str) -> None:
        if after < 0 and now == step:
            os.write(to_parent, struct.pack("qq", time.time_ns(), 0))
            os.kill(os.getpid(), signal.SIGKILL)

    def be_killed_within(seconds: float) -> None:
        os.write(to_parent, struct.pack("qq", 0, int(seconds * 1e9)))

    if step == "dial":
        be_killed_within(0.0008)
    window = 1 + rng.randrange(8)
    client = rb.connect(model, socket=socket, window=window, wait=PATIENCE)
    while True:
        after -= 1
        if after < 0 and step == "random":
            be_killed_within(0.0015)
            step = ""
        x = some_rows(rng, 1 + rng.randrange(min(window, 3)))
        req = client.request(rows=len(x))
        at("claim")
        req.inputs["x"][: len(x) // 2] = x[: len(x) // 2]
        at("write")
        req.inputs["x"][...] = x
        req.commit()
        at("commit")
        if after < 0 and step == "wait":
            be_killed_within(0.0003)
            step = ""
        req.wait()
        at("read")
        check(x, req.outputs["y"])
        req.release()
        at("release")


def play_victims() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    tell("ready")
    for line in sys.stdin:
        step, after, seed = json.loads(line).split()
        r, w = os.pipe()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
                if os.getppid() == parent:
                    victim(w, step, int(after), random.Random(seed))
            except BaseException as e:
                print("victim:", repr(e), file=sys.stderr)
            os._exit(3)
        os.close(w)
        told, at = os.read(r, 16), 0
        if len(told) == 16:
            at, within = struct.unpack("qq", told)
            if not at:
                end = time.monotonic_ns() + random.Random(seed + "kill").randrange(within)
                while time.monotonic_ns() < end:
                    pass
                at = time.time_ns()
                os.kill(pid, signal.SIGKILL)
        os.close(r)
        _, status = os.waitpid(pid, 0)
        tell("died", {"Pid": pid, "At": at if os.WIFSIGNALED(status) else 0})


# ---- forks


def play_forks(who: str, seed: str) -> None:
    rng = random.Random(seed)
    child = 0

    def fork() -> int:
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the kernel kills it when its parent dies
        while pid == 0:
            signal.pause()
        return pid

    if who == "client":
        client = rb.connect(model, socket=socket)
        before = rng.randrange(3)
        fork_at = rng.randrange(before + 1)
        for i in range(before + 1):
            if i == fork_at:
                child = fork()
            rng.choice(WAYS)(client, some_rows(rng, 1), PATIENCE)
        if rng.random() < 0.5:  # end with a request in flight
            client.submit(some_rows(rng, 2))
        client.close()
    else:
        stop, batches = threading.Event(), 1 + rng.randrange(4)
        fork_at, seen = rng.randrange(batches), 0

        @rb.worker(model, inputs={"x": ("int64", (WIDTH,))}, outputs={"y": ("int64", (WIDTH,))}, version="any")
        def run(batch: rb.Batch) -> None:
            nonlocal child, seen
            if seen == fork_at:
                child = fork()
            batch.outputs["y"][...] = answer(batch.inputs["x"])
            seen += 1
            if seen == batches:
                stop.set()

        run.run(socket=socket, stop=stop, wait=PATIENCE)
    tell("ended", {"Child": child, "At": time.time_ns()})
    sys.stdin.read()  # this process lives on
    os.kill(child, signal.SIGKILL)


# ---- signals


class Struck(Exception):
    pass


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def play_signals(seed: str, seconds: str) -> None:
    """A timer's handler raises at any moment of connect, close, request, submit and a call."""
    rng = random.Random(seed)
    armed = False

    def strike(*_: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise (Struck if rng.random() < 0.5 else KeyboardInterrupt)

    signal.signal(signal.SIGALRM, strike)
    window = 8

    def connect_and_close() -> None:
        with rb.connect(model, socket=socket, window=1):
            pass

    def held(client: rb.Client) -> None:
        with client.request(timeout=PATIENCE) as req:
            req.inputs["x"][...] = 0
            req.run(timeout=PATIENCE)

    def submitted() -> None:
        nonlocal armed
        x = some_rows(rng, 1)
        future = client.submit(x, timeout=PATIENCE)
        armed = False  # concurrent.futures does not survive an exception while it waits
        check(x, future.result(2 * PATIENCE))

    with rb.connect(model, socket=socket, window=window) as client:
        connect_and_close()
        by_future(client, some_rows(rng, 1), PATIENCE)
        by_coroutine(client, some_rows(rng, 1), PATIENCE)
        baseline = descriptors()
        ways = {
            "connect": connect_and_close,
            "request": lambda: held(client),
            "submit": submitted,
            "call": lambda: by_call(client, some_rows(rng, 2), PATIENCE),
            # not asyncio: it does not survive an exception inside its own machinery
        }
        # measure each call, so that the signal falls inside it
        usual = {}
        for name, way in ways.items():
            start = time.monotonic()
            for _ in range(20):
                way()
            usual[name] = (time.monotonic() - start) / 20
        struck: collections.Counter = collections.Counter()
        tries, complaints = 0, []
        end = time.monotonic() + float(seconds)
        while time.monotonic() < end:
            name = rng.choice(list(ways))
            tries += 1
            error = None
            try:  # the handler raises once, and this catches it
                try:
                    armed = True
                    signal.setitimer(signal.ITIMER_REAL, max(1e-5, rng.random() * 1.2 * usual[name]))
                    ways[name]()
                except (rb.Error, WrongBytes) as e:
                    error = e
                finally:
                    armed = False
            except (Struck, KeyboardInterrupt):
                struck[name] += 1
            armed = False
            if error is not None and len(complaints) < 5:
                complaints.append(f"{name}, after {dict(struck)}: {type(error).__name__}: {error}")
        signal.setitimer(signal.ITIMER_REAL, 0)
        problems = complaints + whole_window(client, window) + settled_descriptors(baseline)
        tell("result", {"Tries": tries, "Struck": dict(struck), "Problems": problems})


def whole_window(client: rb.Client, window: int) -> list[str]:
    """Are all slots of the window still there?"""
    with contextlib.ExitStack() as all:
        try:
            for i in range(window):
                all.enter_context(client.request(timeout=PATIENCE))
        except rb.Error as e:
            return [f"only {i} of {window} slots are left: {type(e).__name__}"]
    return []


def settled_descriptors(baseline: int) -> list[str]:
    gc.collect()
    end = time.monotonic() + PATIENCE
    while (now := descriptors()) > baseline + 1:
        if time.monotonic() > end:
            return [f"{now} descriptors, {baseline} before"]
        time.sleep(0.01)
    return []


# ---- event loops


def play_loops(seed: str, rounds: str) -> None:
    """Close loops, drop coroutines and raise in callbacks while requests are in flight."""
    rng = random.Random(seed)
    window = 8
    with rb.connect(model, socket=socket, window=window) as client:
        by_coroutine(client, some_rows(rng, 1), PATIENCE)
        by_future(client, some_rows(rng, 1), PATIENCE)
        baseline = descriptors()
        done: collections.Counter = collections.Counter()
        problems = []
        for _ in range(int(rounds)):
            way = rng.choice([closed_loop, dropped_coroutine, cancelled_tasks, raising_callback])
            try:
                way(client, rng)
            except BaseException as e:
                problems.append(f"{way.__name__}: {type(e).__name__}: {e}")
                break
            done[way.__name__] += 1
        try:  # a new loop returns the slots of closed ones
            by_coroutine(client, some_rows(rng, 1), PATIENCE)
            by_future(client, some_rows(rng, 1), PATIENCE)
        except Exception as e:
            problems.append(f"no answer afterwards: {type(e).__name__}: {e}")
        problems += whole_window(client, window) + settled_descriptors(baseline)
        tell("result", {"Tries": sum(done.values()), "Struck": dict(done), "Problems": problems})
        if problems:
            os._exit(0)  # without closing the client, which may hang


def closed_loop(client: rb.Client, rng: random.Random) -> None:
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)
    tasks = [loop.create_task(client.ainfer(some_rows(rng, 1))) for _ in range(1 + rng.randrange(6))]
    for _ in range(rng.randrange(4)):
        loop.call_soon(loop.stop)
        loop.run_forever()
    loop.close()
    for t in tasks:
        t._log_destroy_pending = False
    del tasks


def dropped_coroutine(client: rb.Client, rng: random.Random) -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    async def start() -> None:
        c = client.ainfer(some_rows(rng, 1))
        with contextlib.suppress(StopIteration):
            c.send(None)
        c.close()  # GeneratorExit

    loop.run_until_complete(start())
    loop.close()
    asyncio.set_event_loop(None)


def cancelled_tasks(client: rb.Client, rng: random.Random) -> None:
    async def start() -> None:
        tasks = [asyncio.ensure_future(client.ainfer(some_rows(rng, 1))) for _ in range(1 + rng.randrange(12))]
        await asyncio.sleep(rng.random() * 0.001)
        for t in tasks:
            t.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(start())


def raising_callback(client: rb.Client, rng: random.Random) -> None:
    x = some_rows(rng, 1)
    future = client.submit(x)
    wrong = rng.choice([SystemExit, KeyboardInterrupt, ValueError])

    def raises(_: object) -> None:
        raise wrong("a callback's own")

    with contextlib.suppress(wrong):  # if the request has ended, the callback runs here
        future.add_done_callback(raises)
    check(x, future.result(PATIENCE))


if __name__ == "__main__":
    if sys.argv[1] == "load":
        sys.unraisablehook = lambda *_: None
    elif sys.argv[1] in ("signals", "loops"):
        faulthandler.dump_traceback_later(2 * PATIENCE, exit=True)  # where it hangs
    threading.excepthook = lambda *_: None
    plays = {"load": play_load, "victims": play_victims, "forks": play_forks, "signals": play_signals, "loops": play_loops}
    plays[sys.argv[1]](*sys.argv[4:])
