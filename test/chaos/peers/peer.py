# SPDX-License-Identifier: Apache-2.0
"""Plays honest clients and victims of test/cmd/chaos with the Python package.

    peer.py load SOCKET MODEL SEED THREADS PAUSE_US TIMEOUT_MS   honest requests until SIGTERM
    peer.py victims SOCKET MODEL                                 for each line '"STEP AFTER SEED"' a client that dies there
    peer.py forks SOCKET MODEL client|worker SEED                ends a session in good order while a forked child lives on

Its messages are lines of JSON, as testbed.Child writes them.
"""

from __future__ import annotations

import asyncio
import collections
import ctypes
import faulthandler
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


if __name__ == "__main__":
    if sys.argv[1] == "load":
        sys.unraisablehook = lambda *_: None
    threading.excepthook = lambda *_: None
    plays = {"load": play_load, "victims": play_victims, "forks": play_forks}
    plays[sys.argv[1]](*sys.argv[4:])
