#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares a ring in device memory with one in host memory, in one run; see docs/gpu.md.

    make gpu-bundle                                               # here: build/gpu
    python3 bench/gpu/device_ring.py --out ring.json [PART…]       # on the GPU machine

Parts: echo (602,112 bytes there and back), latency (one producer, one request at a time),
resnet (ResNet-50 in fp16, images on the GPU, and the bound: the same module replayed on its
own buffers, without any transfer). The caller starts MPS.

device: the producer copies its row on the GPU and commits on the stream. host: the producer copies its
row into a slot in pinned host memory and waits for the copy. plain: the same, not pinned.
cpu: the rows are in host memory.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = Path(os.environ.get("BUNDLE", ROOT / "build" / "gpu"))
BINARY = os.environ.get("RINGBATCH_BINARY", str(BUNDLE / "ringbatch"))
ECHO = "f32[150528]"  # 602,112 bytes
IMAGE = "f32[3,224,224]"  # 602,112 bytes too
TICK = os.sysconf("SC_CLK_TCK")


# -- processes


class Process:
    """A process that prints "ready", and after a line "stop" a line of JSON."""

    def __init__(self, *command: str, **env: str) -> None:
        self.p = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env={**os.environ, **env})

    def wait_for(self, *words: str) -> str:
        for line in self.p.stdout:
            if line.startswith(words):
                return line
        raise RuntimeError(f"{self.p.args} ended with status {self.p.wait()}")

    def tell(self, text: str) -> None:
        self.p.stdin.write(text)
        self.p.stdin.flush()

    def cpu(self) -> float:
        return cpu_of(self.p.pid)

    def end(self) -> None:
        self.p.terminate()
        try:
            self.p.wait(20)
        except subprocess.TimeoutExpired:
            self.p.kill()
            self.p.wait()


def cpu_of(pid: int) -> float:
    """Seconds, of all its threads."""
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def mps_cpu() -> float:
    """Of the MPS daemon and its server."""
    found = 0.0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/comm") as f:
            if f.read().startswith("nvidia-cuda-mps"):
                found += cpu_of(int(pid))
    return found


@contextlib.contextmanager
def processes():
    """Ends every process that it started, the last one first."""
    started: list[Process] = []

    def start(*command: str, **env: str) -> Process:
        started.append(Process(*command, **env))
        return started[-1]

    try:
        yield start
    finally:
        for p in reversed(started):
            p.end()


def start_broker(start, folder: str) -> Process:
    socket = os.path.join(folder, "b.sock")
    os.environ["RINGBATCH_SOCKET"] = socket
    broker = start(BINARY, "broker", "--socket", socket, "--log-level", "error", "--drain-time", "1s")
    while not os.path.exists(socket):
        if broker.p.poll() is not None:
            raise RuntimeError("the broker did not start")
        time.sleep(0.01)
    return broker


def start_workers(start, count: int, module: str, name: str, memory: str, *flags: str) -> list[Process]:
    """Workers of one model; the first one declares it."""
    command = [sys.executable, "-m", "ringbatch.torch", module, "--name", name, "--memory", memory, *flags]
    return [start(*command, OMP_NUM_THREADS="1") for _ in range(count)]


def wait_for_all(started: list[Process]) -> None:
    for p in started:
        p.wait_for("serving", "ready")


# -- measuring


def measured(
    name: str, producers: list[Process], others: dict[str, list[Process]], seconds: float, go: str, warm: float = 0.5
) -> dict:
    """Runs the producers for some seconds. CPU time and items are counted after the warm-up."""
    roles = {"producers": producers, **others}

    def cpu() -> dict[str, float]:
        return {**{role: sum(p.cpu() for p in some) for role, some in roles.items()}, "mps": mps_cpu()}

    for p in producers:
        p.tell(go)
    time.sleep(warm)
    began, before = time.monotonic(), cpu()
    time.sleep(seconds)
    took, after = time.monotonic() - began, cpu()
    for p in producers:
        p.tell("stop\n")
    results = [json.loads(p.wait_for("{")) for p in producers]
    rate = sum(r["items"] / r["seconds"] for r in results)
    us = {role: round((after[role] - before[role]) / took / rate * 1e6, 1) for role in before}
    row = {
        "name": name, "items/s": round(rate), "wrong": sum(r["wrong"] for r in results),
        "p50_us": max(r["p50"] for r in results), "p99_us": max(r["p99"] for r in results),
        "cpu_us": {**us, "all": round(sum(us.values()), 1)},
    }  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


def echo(parts: list[str], seconds: float, folder: str) -> list[dict]:
    module = os.path.join(folder, "echo.jit")
    code = "import sys, torch; torch.jit.save(torch.jit.trace(torch.nn.Identity(), torch.ones(1, 4)), sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, module], check=True)
    with processes() as start:
        broker = start_broker(start, folder)
        flags = ("--input", f"x:{ECHO}", "--output", f"y:{ECHO}", "--max-batch-size", "32")
        flags += ("--no-cuda-graphs", "--no-freeze", "--slots", "1024")
        flags += ("--max-window", "64", "--depth", "3")
        workers = {("torch", m): start_workers(start, 3, module, f"torch-{m}", m, *flags) for m in ("host", "device")}
        for m, where in (("host", ""), ("device", "@device:0")):
            command = [BINARY, "worker", "echo", "--gpu", "0", "--name", f"native-{m}"]
            command += ["--input", f"x:{ECHO}{where}", "--max-batch-size", "32"]
            workers["native", m] = [start(*command, "--slots", "1024", "--max-window", "64", "--depth", "3") for _ in range(2)]
        producers = [start(sys.executable, __file__, "producer", OMP_NUM_THREADS="1") for _ in range(14)]
        wait_for_all(workers["torch", "host"] + workers["torch", "device"] + producers)
        rows = []

        def run(worker: str, kind: str, count: int, in_flight: int, group: int) -> None:
            memory = "device" if kind == "device" else "host"
            name = f"echo, {worker} worker, {kind}: {count} x {in_flight} in flight, by {group}"
            others = {"broker": [broker], "workers": workers[worker, memory]}
            rows.append(measured(name, producers[:count], others, seconds, f"go {worker}-{memory} {in_flight} {group} {kind}\n"))

        for worker in ("native", "torch"):
            if "latency" in parts:
                for kind in ("cpu", "host", "device"):
                    run(worker, kind, 1, 1, 1)
            if "echo" in parts:
                for kind, in_flight, group in (("cpu", 8, 1), ("host", 16, 4), ("device", 16, 4), ("device", 64, 16)):
                    if worker == "native" or kind == "cpu" or group == 16:
                        run(worker, kind, 14, in_flight, group)
        return rows


def resnet(seconds: float, folder: str) -> list[dict]:
    module = os.path.join(folder, "resnet50.jit")
    subprocess.run([sys.executable, str(ROOT / "bench" / "gpu" / "resnet50.py"), module], check=True)
    with processes() as start:
        broker = start_broker(start, folder)
        flags = ("--input", f"x:{IMAGE}", "--output", "y:f32[1000]@host", "--max-batch-size", "32")
        flags += ("--half", "--channels-last", "--slots", "2048", "--max-window", "64")
        bounds = [start(sys.executable, __file__, "bound", module, OMP_NUM_THREADS="1") for _ in range(3)]
        workers = {m: start_workers(start, 3, module, f"resnet-{m}", m, *flags) for m in ("host", "device")}
        producers = [start(sys.executable, __file__, "producer", OMP_NUM_THREADS="1") for _ in range(14)]
        wait_for_all(workers["host"] + workers["device"] + bounds + producers)
        rows = []

        def run(kind: str) -> None:
            memory = "device" if kind == "device" else "host"
            others = {"broker": [broker], "workers": workers[memory]}
            name = f"resnet, {kind}: 14 x 32 in flight, by 8"
            rows.append(measured(name, producers, others, seconds, f"go resnet-{memory} 32 8 {kind}\n", 1.0))

        for turn in range(2):
            rows.append(measured("resnet bound without any transfer", bounds, {}, seconds, "go\n"))
            for kind in ("host", "device") if turn else ("plain", "host", "device"):
                run(kind)
        return rows


# -- the roles that this program plays itself


class Commands:
    """The parent's commands: each "go …" until the next "stop"."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self._queue: collections.deque[list[str]] = collections.deque()
        self._arrived = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            if line.startswith("stop"):
                self.running.clear()
                continue
            with self._arrived:
                self.running.set()
                self._queue.append(line.split()[1:])
                self._arrived.notify()
        os._exit(0)

    def next(self) -> list[str]:
        with self._arrived:
            self._arrived.wait_for(lambda: self._queue)
            return self._queue.popleft()


def report(items: int, began: float, wrong: int, times: list[float]) -> None:
    took = sorted(times) or [0.0]
    print(json.dumps({"items": items, "seconds": time.monotonic() - began, "wrong": wrong,
                      "p50": took[len(took) // 2] * 1e6, "p99": took[len(took) * 99 // 100] * 1e6}), flush=True)  # fmt: skip


def producer() -> None:
    """Rows on the GPU or in host memory, several requests in flight, committed in groups."""
    import numpy as np
    import ringbatch as rb
    import torch

    torch.manual_seed(os.getpid())
    rows = [torch.rand(150528, device="cuda") for _ in range(8)]
    on_host = [r.cpu() for r in rows]
    stream = torch.cuda.Stream()
    models: dict[str, rb.Model] = {}
    torch.cuda.synchronize()
    commands = Commands()
    print("ready", flush=True)
    while True:
        name, in_flight, group, kind = commands.next()
        if name not in models:
            models[name] = m = rb.connect(name, window=64, wait=30)
        m = models[name]
        if kind == "host" and not hasattr(m, "keep"):  # pinned memory makes the copy quick
            mapping = m.mapping()
            if int(torch.cuda.cudart().cudaHostRegister(mapping.base, mapping.bytes, 1)):
                raise RuntimeError("cudaHostRegister")
            m.keep = mapping
        with torch.cuda.stream(stream), torch.inference_mode():
            images = [r.reshape(m.inputs[0].shape) for r in (on_host if kind == "cpu" else rows)]
            echo = [r.numpy() for r in on_host] if m.outputs[0].shape == (150528,) else None
            _produce(m, images, echo, stream, int(in_flight), int(group), commands, np, torch)


def _produce(model, images, echo, stream, in_flight, group, commands, np, torch) -> None:
    """An answer must be the echo, or, of another model, its first answer to the same row."""
    on_device = model.inputs[0].on_device
    flight: collections.deque = collections.deque()
    first: dict[int, np.ndarray] = dict(enumerate(echo)) if echo else {}
    times: list[float] = []
    items = wrong = sent = 0
    began = time.monotonic()
    while commands.running.is_set() or flight:
        while commands.running.is_set() and len(flight) + group <= in_flight:
            at, some = time.monotonic(), [model.request() for _ in range(group)]
            if on_device:  # one kernel
                torch._foreach_copy_([r.inputs["x"] for r in some], [images[(sent + i) % 8] for i in range(group)])
            else:
                for i, r in enumerate(some):
                    torch.from_numpy(np.asarray(r.inputs["x"])).copy_(images[(sent + i) % 8], non_blocking=True)
                stream.synchronize()
            flight.extend((r, (sent + i) % 8, at) for i, r in enumerate(some))
            sent += group
            model.commit(some)
        r, image, at = flight.popleft()
        r.wait()
        times.append(time.monotonic() - at)
        if items % 64 == image:
            y = r.outputs["y"]
            y = np.array(y.cpu() if hasattr(y, "cpu") else y, np.float32)
            want = first.setdefault(image, y)
            wrong += not np.allclose(y, want, atol=0.02 * np.abs(want).max())
        r.release()
        items += 1
    report(items, began, wrong, times)


def bound(path: str) -> None:
    """The module replayed on fixed buffers: two batches in flight as in a worker, without transfers."""
    import torch
    from ringbatch.binding.tensors import parse
    from ringbatch.torch.lanes import Engine
    from ringbatch.torch.module_call import torch_types
    from ringbatch.torch.preparing import prepare, settle_memory, short_sleeps
    from ringbatch.worker.axes import Axes, Input

    module, device, rows = torch.jit.load(path, "cuda"), torch.device("cuda", 0), 32
    short_sleeps()
    inputs = [f"x:{IMAGE}"]
    brought = [Input.of(parse(text)) for text in inputs]
    compute, *_ = prepare(module, Axes(brought, None), device, True, False, True, True, rows=rows)
    engine = Engine(compute, [(dtype, i.shape) for i, dtype in zip(brought, torch_types(brought))], rows, device, 2, None)
    for lane in engine.lanes:
        for x in lane.inputs:
            x.copy_(torch.rand_like(x))
    settle_memory()
    commands = Commands()
    print("ready", flush=True)

    def replay(lane) -> None:
        lane.began = time.monotonic_ns()
        lane.graphs[rows, ()][0].replay()
        lane.finished.record(engine.computing)

    while True:
        commands.next()
        items, began = 0, time.monotonic()
        with engine.current():
            for lane in engine.lanes:
                replay(lane)
            while commands.running.is_set():
                for lane in engine.lanes:
                    lane.wait()
                    lane.release()
                    items += rows
                    replay(lane)
            engine.check()
        report(items, began, 0, [])


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("parts", nargs="*", default=["latency", "echo", "resnet"])
    p.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    p.add_argument("--out", help="a file for the rows, as JSON")
    a = p.parse_args()
    rows: list[dict] = []
    for parts in (["latency", "echo"], ["resnet"]):
        wanted = [x for x in parts if x in a.parts]
        if not wanted:
            continue
        with tempfile.TemporaryDirectory(prefix="rb") as folder:
            try:
                rows += resnet(a.seconds, folder) if wanted == ["resnet"] else echo(wanted, a.seconds, folder)
            except (RuntimeError, OSError, subprocess.SubprocessError) as e:
                print(f"{', '.join(wanted)} failed: {e}", flush=True)
        if a.out:
            Path(a.out).write_text(json.dumps(rows, indent=1))
    for r in rows:
        print(f"{r['name']:<62} {r['items/s']:>9,}/s  p50 {r['p50_us']:>8.1f} us  p99 {r['p99_us']:>8.1f} us  "
              f"CPU us/item: {', '.join(f'{role} {us}' for role, us in r['cpu_us'].items())}  wrong {r['wrong']}")  # fmt: skip
    return 1 if any(r["wrong"] for r in rows) or not rows else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["producer"]:
        producer()
    elif sys.argv[1:2] == ["bound"]:
        bound(sys.argv[2])
    else:
        sys.exit(main())
