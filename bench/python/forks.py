# SPDX-License-Identifier: Apache-2.0
"""Forks of a process that is connected, of every kind that Python programs have.

    python bench/python/forks.py [--times 1000] [--at_once 4] [--only NAME] [--patience 60]

The parent has a connection and uses it all the while. Each child uses what it
inherited (or, where nothing is inherited, connects), twice: the first answer has
the child attach for itself, the second does not. Afterwards nothing may be left:
no child, no descriptor, no thread, no client at the broker. A child that does not
answer within --patience seconds is a hang; on a machine whose cores are all taken,
spawn's children need more than the minute only to import NumPy. Prints a table for docs/results.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing as mp
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its threads end at the first fork, and are not ours to count

import numpy as np  # noqa: E402
import ringbatch as rb  # noqa: E402

X = np.zeros(16, np.float32)
MODEL: rb.Model  # the parent's
HANG_S = 60.0  # --patience


def twice(fd: int, model: rb.Model | None = None) -> None:
    """Uses the model, and tells how long that took."""
    m = model or MODEL
    times = []
    for _ in range(2):
        start = time.perf_counter()
        m(X)
        times.append(time.perf_counter() - start)
    os.write(fd, struct.pack("dd", *times))


def fresh(fd: int) -> None:
    """For a child that inherits nothing."""
    start = time.perf_counter()
    with rb.connect("echo") as m:
        m(X)
        first = time.perf_counter() - start
        start = time.perf_counter()
        m(X)
        os.write(fd, struct.pack("dd", first, time.perf_counter() - start))


class Answers:
    """A pipe that children write to."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        self.times: list[tuple[float, float]] = []

    def take(self) -> None:
        self.times.append(struct.unpack("dd", os.read(self.read, 16)))

    def close(self) -> None:
        os.close(self.read)
        os.close(self.write)


def reap(pid: int) -> None:
    end = time.monotonic() + HANG_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            if status:
                raise SystemExit(f"child {pid} ended with {status}; its error is above")
            return
        if time.monotonic() > end:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            raise SystemExit(f"child {pid} hangs")
        time.sleep(0.0005)


def forked(use) -> int:
    """os.fork with a child that ends as soon as it has used the model."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            use()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def plain(n: int, at_once: int, a: Answers) -> None:
    for begin in range(0, n, at_once):
        pids = [forked(lambda: twice(a.write)) for _ in range(min(at_once, n - begin))]
        for pid in pids:
            reap(pid)
            a.take()


def from_a_thread(n: int, at_once: int, a: Answers) -> None:
    """While four other threads wait for answers."""
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            MODEL(X)

    others = [threading.Thread(target=busy) for _ in range(4)]
    forking = threading.Thread(target=plain, args=(n, at_once, a))
    for t in (*others, forking):
        t.start()
    forking.join()
    stop.set()
    for t in others:
        t.join()


def daemonised(n: int, at_once: int, a: Answers) -> None:
    """Two forks, the second in a session of its own; the first ends."""

    def leave() -> None:
        os.setsid()
        forked(lambda: twice(a.write))

    for begin in range(0, n, at_once):
        pids = [forked(leave) for _ in range(min(at_once, n - begin))]
        for pid in pids:
            reap(pid)
            a.take()


def of_multiprocessing(method: str):
    def run(n: int, at_once: int, a: Answers) -> None:
        context = mp.get_context(method)
        for begin in range(0, n, at_once):
            count = min(at_once, n - begin)
            if method == "fork":
                children = [context.Process(target=twice, args=(a.write,)) for _ in range(count)]
            else:
                children = [context.Process(target=_by_name, args=(a.name,)) for _ in range(count)]
            for c in children:
                c.start()
            for c in children:
                c.join(HANG_S)
                if c.exitcode != 0:
                    raise SystemExit(f"a child of {method} hangs" if c.exitcode is None else f"a child of {method} ended with {c.exitcode}")
                c.close()
                a.take()

    return run


def _by_name(path: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    fresh(fd)
    os.close(fd)


APPLICATION = """
import os, struct, sys
sys.path.insert(0, {here!r})
import forks, ringbatch as rb
forks.MODEL = rb.connect("echo", wait=20)
forks.MODEL(forks.X)

def app(environ, start_response):
    read, write = os.pipe()
    forks.twice(write)
    body = os.read(read, 16)
    start_response("200 OK", [("Content-Length", "16")])
    return [body]
"""


def gunicorn(n: int, at_once: int, a: Answers) -> None:
    """gunicorn --preload, with a new worker for every request."""
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "application.py"), "w") as f:
            f.write(APPLICATION.format(here=os.path.dirname(os.path.abspath(__file__))))
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        p = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", "--preload", "--max-requests", "1", "-w", str(at_once), "-b", f"127.0.0.1:{port}", "--log-level", "critical", "application:app"],
            cwd=folder,
        )
        try:
            end = time.monotonic() + HANG_S
            while len(a.times) < n:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=HANG_S) as reply:
                        a.times.append(struct.unpack("dd", reply.read()))
                        end = time.monotonic() + HANG_S
                except OSError:  # it is starting, or between two workers
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.005)
        finally:
            p.terminate()
            p.wait(HANG_S)


def data_loader(n: int, at_once: int, a: Answers) -> None:
    """Workers of PyTorch's DataLoader, which are forked for every epoch."""
    import torch.utils.data as data

    class Items(data.Dataset):
        def __len__(self) -> int:
            return at_once

        def __getitem__(self, i: int) -> float:
            twice(a.write)
            return float(MODEL(X)[0])

    for _ in range(n // at_once):
        for _ in data.DataLoader(Items(), num_workers=at_once, batch_size=1):
            a.take()


KINDS = {
    "os.fork": plain,
    "fork from a thread while four others wait": from_a_thread,
    "daemonising (two forks, setsid)": daemonised,
    "multiprocessing fork": of_multiprocessing("fork"),
    "multiprocessing spawn": of_multiprocessing("spawn"),
    "multiprocessing forkserver": of_multiprocessing("forkserver"),
    "gunicorn --preload": gunicorn,
    "DataLoader": data_loader,
}


def clients() -> int:
    return next(m["clients"] for m in rb.stats()["models"] if m["name"] == "echo")


def held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def left(before: tuple[int, tuple[int, int]]) -> str:
    """What is still there, once it had time to go."""
    end = time.monotonic() + 10
    while (clients(), held()) != before and time.monotonic() < end:
        time.sleep(0.05)
    now = clients(), held()
    return "nothing" if now == before else f"**clients, (descriptors, threads): {before} before, {now} after**"


def main() -> None:
    global MODEL, HANG_S
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--at_once", type=int, default=4)
    parser.add_argument("--only", choices=KINDS, action="append")
    parser.add_argument("--patience", type=float, default=HANG_S, help="seconds that a child may take")
    o = parser.parse_args()
    HANG_S = o.patience
    with tempfile.TemporaryDirectory(prefix="rb") as folder, contextlib.ExitStack() as running:
        os.chmod(folder, 0o700)
        os.environ["RINGBATCH_SOCKET"] = os.path.join(folder, "b.sock")
        for command in (["broker", "--log_level", "error"], ["worker", "--model", "echo", "--wait_time", "0s", "--wait_for_broker", "20s"]):
            p = subprocess.Popen([rb.binary_path(), *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            running.callback(p.wait, 20)
            running.callback(p.terminate)
        MODEL = running.enter_context(rb.connect("echo", wait=20))
        MODEL(X)
        print("| kind | children | first answer, with attaching: median, p99, most | second answer: median, p99, most | left behind |\n|---|---|---|---|---|", flush=True)
        for name in o.only or KINDS:
            a = Answers()
            a.name = os.path.join(folder, "answers")
            os.mkfifo(a.name)
            keep = os.open(a.name, os.O_RDWR)
            if name in ("multiprocessing spawn", "multiprocessing forkserver"):
                os.dup2(keep, a.read)
                warm = mp.get_context(name.split()[1]).Process(target=len, args=((),))  # it starts helpers of its own, once
                warm.start()
                warm.join()
            before = clients(), held()
            try:
                KINDS[name](o.times, o.at_once, a)
            except ImportError as e:
                print(f"| {name} | not run: {e} | | | |", flush=True)
                continue
            finally:
                os.unlink(a.name)
            MODEL(X)  # the parent is undisturbed
            columns = []
            for k in (0, 1):
                ms = sorted(1e3 * t[k] for t in a.times)
                columns.append(f"{statistics.median(ms):.2f}, {ms[int(0.99 * len(ms))]:.2f}, {ms[-1]:.2f} ms")
            print(f"| {name} | {len(a.times)} | {columns[0]} | {columns[1]} | {left(before)} |", flush=True)
            os.close(keep)
            a.close()


if __name__ == "__main__":
    main()
