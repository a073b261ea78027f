#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long callers wait when something is changed or killed under load, and how many of their requests fail.

A broker with a model in PyTorch (or, with --numpy, in NumPy), callers that ask all the time, and one
event after the other: a worker is killed, with and without a spare; workers are restarted and scaled;
the broker is restarted, taken over, killed. A pause is the longest time in which nobody got an answer,
from the event until 2 s after all was as before. Callers retry where the broker itself goes.

    python hack/pauses.py --binary bin/ringbatch --json pauses.json

The Python that runs it needs the packages ringbatch, numpy and torch.
"""

import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, Callable

import numpy as np
import ringbatch as rb

WIDTH = 256


def serve(kind: str) -> None:
    """What each worker process does: imports its framework, makes the model, warms up, attaches."""
    if kind == "torch":
        import torch

        torch.set_num_threads(1)
        net = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)])

        def compute(x: np.ndarray) -> np.ndarray:
            with torch.inference_mode():
                return net(torch.tensor(x)).numpy()
    else:
        weights = np.eye(WIDTH, dtype="float32")

        def compute(x: np.ndarray) -> np.ndarray:
            return x @ weights

    compute(np.zeros((8, WIDTH), "float32"))  # warm

    @rb.worker("m", inputs={"x": ("float32", (WIDTH,))}, outputs={"y": ("float32", (WIDTH,))})
    def forward(batch: Any) -> None:
        batch.outputs["y"][...] = compute(batch.inputs["x"])

    forward.run(wait=60)


class Rig:
    def __init__(self, binary: str, folder: pathlib.Path, kind: str, callers: int) -> None:
        self.binary, self.folder, self.kind = binary, folder, kind
        self.socket = str(folder / "broker.sock")
        self.config = folder / "ringbatch.toml"
        self.lock = threading.Lock()
        self.answers: list[float] = []  # when they came
        self.failed: list[str] = []
        self.stop = threading.Event()
        self.callers = callers
        self.broker: subprocess.Popen[bytes] | None = None

    def worker_command(self) -> list[str]:
        return [sys.executable, os.path.abspath(__file__), "--worker", self.kind]

    def configure(self, instances: int, spares: int) -> None:
        text = f'[[model]]\nname = "m"\ninputs = ["x:f32[{WIDTH}]"]\noutputs = ["y:f32[{WIDTH}]"]\nmax_batch_size = 8\n'
        if instances:
            text += f"[[model.worker]]\ncommand = {json.dumps(self.worker_command())}\ninstances = {instances}\n"
        if spares:
            text += f"spares = {spares}\n"
        self.config.write_text(text)

    def start_broker(self, *flags: str) -> None:
        self.broker = subprocess.Popen([self.binary, "broker", "--config", str(self.config), "--socket", self.socket, "--log_level", "warn", *flags])

    def command(self, *args: str) -> None:
        subprocess.run([self.binary, *args, "--socket", self.socket], check=True, stdout=subprocess.DEVNULL)

    def stats(self) -> dict[str, Any]:
        out = subprocess.run([self.binary, "stats", "--json", "--socket", self.socket], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
        return json.loads(out) if out else {"models": [], "processes": []}

    def workers(self) -> tuple[list[int], list[int]]:
        """Pids of those that serve, and of spares."""
        models = self.stats()["models"]
        list_ = models[0]["workers"] if models else []
        return [w["pid"] for w in list_ if w["state"] != "spare"], [w["pid"] for w in list_ if w["state"] == "spare"]

    def until(self, serving: int, spares: int, but: frozenset[int] = frozenset()) -> None:
        """Waits until so many serve, and are kept as spares, none of them one of those."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            w, s = self.workers()
            if len(w) == serving and len(s) == spares and not but & set(w + s):
                return
            time.sleep(0.05)
        sys.exit(f"never {serving} workers and {spares} spares: {self.stats()}")

    def ask(self) -> None:
        model = rb.connect("m", socket=self.socket, retry=60)
        x = np.ones(WIDTH, "float32")
        while not self.stop.is_set():
            try:
                model(x)
            except Exception as e:  # any: that is what is counted
                with self.lock:
                    self.failed.append(f"{type(e).__name__}: {e}")
                time.sleep(0.1)
                continue
            with self.lock:
                self.answers.append(time.monotonic())
        model.close()

    def event(self, change: Callable[[], None], settled: Callable[[], None]) -> dict[str, float]:
        """The longest time without an answer, and the failures."""
        with self.lock:
            self.answers, self.failed = self.answers[-1:], []
        begin = time.monotonic()
        change()
        settled()
        took = time.monotonic() - begin
        time.sleep(2)
        with self.lock:
            times = sorted([t for t in self.answers if t >= begin] + [begin])
            return {"pause_s": max(b - a for a, b in zip(times, times[1:])), "settled_s": took, "answers": len(times) - 1, "failed": len(self.failed)}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--worker", help=argparse.SUPPRESS)
    p.add_argument("--binary", default="bin/ringbatch")
    p.add_argument("--numpy", action="store_true", help="a model in NumPy: PyTorch is not needed")
    p.add_argument("--times", type=int, default=5, help="each event")
    p.add_argument("--callers", type=int, default=4)
    p.add_argument("--only", default="", help="only events whose name has this in it")
    p.add_argument("--json", type=pathlib.Path)
    a = p.parse_args()
    if a.worker:
        serve(a.worker)
        return 0
    kind = "numpy" if a.numpy else "torch"
    results: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="rbpause") as name:
        r = Rig(os.path.abspath(a.binary), pathlib.Path(name), kind, a.callers)
        r.configure(1, 0)
        r.start_broker()
        r.until(1, 0)
        threads = [threading.Thread(target=r.ask, daemon=True) for _ in range(a.callers)]
        for t in threads:
            t.start()
        while not r.answers:
            time.sleep(0.01)

        def reload(instances: int, spares: int) -> None:
            r.configure(instances, spares)
            assert r.broker
            r.broker.send_signal(signal.SIGHUP)
            r.until(instances, spares)

        def kill_worker(spares: int) -> dict[str, float]:
            reload(1, spares)
            (pid,), _ = r.workers()
            return r.event(lambda: os.kill(pid, signal.SIGKILL), lambda: r.until(1, spares, frozenset({pid})))

        def restart_workers() -> dict[str, float]:
            reload(1, 0)
            old = frozenset(r.workers()[0])
            return r.event(lambda: r.command("restart", "m"), lambda: r.until(1, 0, old))

        def scale() -> dict[str, float]:
            reload(1, 0)
            return r.event(lambda: (r.command("scale", "m", "3"), r.command("scale", "m", "1")), lambda: r.until(1, 0))  # type: ignore[func-returns-value]

        def change_broker(how: str, own: bool = False) -> dict[str, float]:
            """own: the worker is a process that the broker has not started, and outlives it."""
            if not own:
                reload(1, 0)
                assert r.broker
                return change_it(how, r.broker, frozenset(r.workers()[0]))
            again(0)
            worker = subprocess.Popen(r.worker_command(), env={**os.environ, "RINGBATCH_SOCKET": r.socket})
            r.until(1, 0)
            assert r.broker
            try:
                return change_it(how, r.broker, frozenset())
            finally:
                worker.terminate()
                worker.wait()
                again(1)

        def again(instances: int) -> None:
            """Another broker, for what follows."""
            assert r.broker
            r.broker.terminate()
            r.broker.wait()
            r.configure(instances, 0)
            r.start_broker()
            r.until(instances, 0)

        def change_it(how: str, old: "subprocess.Popen[bytes]", old_workers: frozenset[int]) -> dict[str, float]:

            def change() -> None:
                if how == "take-over":
                    r.start_broker("--take_over")
                else:
                    old.send_signal(signal.SIGKILL if how == "kill -9" else signal.SIGTERM)
                old.wait()
                if how != "take-over":
                    r.start_broker()

            return r.event(change, lambda: r.until(1, 0, old_workers))

        events: dict[str, Callable[[], dict[str, float]]] = {
            "worker killed, no spare": lambda: kill_worker(0),
            "worker killed, spares = 1": lambda: kill_worker(1),
            "ringbatch restart": restart_workers,
            "ringbatch scale 3, then 1": scale,
            "broker: SIGTERM, started again": lambda: change_broker("SIGTERM"),
            "broker: take-over": lambda: change_broker("take-over"),
            "broker: kill -9, started again": lambda: change_broker("kill -9"),
            "worker stays; broker: SIGTERM": lambda: change_broker("SIGTERM", own=True),
            "worker stays; broker: take-over": lambda: change_broker("take-over", own=True),
            "worker stays; broker: kill -9": lambda: change_broker("kill -9", own=True),
        }
        for event, run in events.items():
            if a.only in event:
                results[event] = [run() for _ in range(a.times)]
                s = [x["pause_s"] for x in results[event]]
                print(f"{event:32}  pause {statistics.median(s):6.3f} s (most {max(s):.3f})  failed {sum(x['failed'] for x in results[event]):.0f} of {sum(x['answers'] for x in results[event]):.0f}", flush=True)
        r.stop.set()
        for t in threads:
            t.join()
        assert r.broker
        r.broker.terminate()
        r.broker.wait()
    if a.json:
        a.json.write_text(json.dumps({"model": kind, "callers": a.callers, "events": results}, indent=1) + "\n")
    return 0 if not any(x["failed"] for list_ in results.values() for x in list_) else 1


if __name__ == "__main__":
    sys.exit(main())
