#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Workers under load for a while: are answers right, and does a worker's memory grow?

    soak.py --seconds 480 --device cuda --bundle build/gpu --out DIR     # hack/gpu-soak.sh
    soak.py --seconds 300 --device cpu --model small --bundle bin        # PyTorch on the CPU
    soak.py --seconds 300 --device numpy --model small --bundle bin      # @ringbatch.worker

Two models, some workers of each, producers that stamp every input and check that
the stamp comes back, and a few kills. Now and then it reads what each worker
has in memory of its own (RssAnon: not the ring, which is shared), and from that
says whether the growth ends. Exits with 1 if an answer was wrong or a request failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ENDED = 8.0  # bytes a batch: less than that in the last third counts as no growth
STAMP = 4  # numbers of a row that come back as they were


def shape(model: str) -> tuple[int, ...]:
    return (3, 224, 224) if model == "resnet50" else (3, 8, 8)


def make_module(model: str, file: str) -> int:
    """Writes a TorchScript module that ends its outputs with the input's stamp; says how many there are."""
    import torch

    if model == "resnet50":
        import torchvision

        net = torchvision.models.resnet50(weights=None)
    else:
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 64), torch.nn.ReLU(), torch.nn.Linear(64, 12))

    class Stamped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.net(x), x[:, 0, 0, :STAMP]], 1)

    torch.manual_seed(1)
    with torch.inference_mode():
        example = torch.rand(2, *shape(model))
        traced = torch.jit.trace(Stamped().eval(), example)
        torch.jit.save(traced, file)
        return int(traced(example).shape[1])


def play_numpy(a: argparse.Namespace) -> None:
    """A worker in NumPy: the row's sum, and its stamp."""
    import ringbatch as rb

    @rb.worker(a.play[1], inputs={"x": ("float32", shape(a.model))}, outputs={"y": ("float32", (1 + STAMP,))}, max_batch_size=a.batch, wait_time=a.wait)
    def run(batch: rb.Batch) -> None:
        x = batch.inputs["x"]
        y = batch.outputs["y"]
        y[:, 0] = x.reshape(len(x), -1).sum(1)
        y[:, 1:] = x[:, 0, 0, :STAMP]

    run.run(socket=a.socket, wait=30)


def play_producer(a: argparse.Namespace) -> None:
    """Sends stamped rows until SIGTERM; its last line is what it saw."""
    import numpy as np
    import ringbatch as rb

    right, wrong, failed, going = 0, 0, {}, True

    def stop(*_: object) -> None:
        nonlocal going
        going = False

    signal.signal(signal.SIGTERM, stop)
    name, number = a.play[1], int(a.play[2])
    x = np.random.default_rng(number).random(shape(a.model), dtype=np.float32)
    with rb.connect(name, socket=a.socket, window=2, wait=120) as model:
        while going:
            # whole numbers below 2,048 are exact in float16 too
            stamp = np.array([number, right % 2000, right // 2000 % 2000, (right * 7 + number) % 2000], dtype=np.float32)
            x[0, 0, :STAMP] = stamp
            try:
                y = model(x, timeout=30)
            except rb.Error as e:
                failed[type(e).__name__] = failed.get(type(e).__name__, 0) + 1
                continue
            if (y[-STAMP:] == stamp).all() and np.isfinite(y).all():
                right += 1
            else:
                wrong += 1
    print(json.dumps({"right": right, "wrong": wrong, "failed": failed}), flush=True)


def memory(pid: int) -> dict[str, float] | None:
    """MiB of a process: RssAnon is its own, RssShmem the ring it has touched."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    found = {k: int(v.split()[0]) / 1024 for k, _, v in (line.partition(":") for line in lines) if k in ("VmRSS", "RssAnon", "RssFile", "RssShmem")}
    return found if found.get("VmRSS") else None


class Soak:
    def __init__(self, a: argparse.Namespace, folder: str) -> None:
        self.a, self.folder = a, folder
        self.socket = f"{folder}/broker.sock"
        self.began = time.monotonic()
        self.readings: dict[int, list[dict[str, float]]] = {}  # by pid
        self.env = dict(os.environ, PYTHONUNBUFFERED="1", RINGBATCH_SOCKET=self.socket, OMP_NUM_THREADS="1")
        self.log = open(f"{a.out}/workers.log", "w")
        self.broker = subprocess.Popen([f"{a.bundle}/ringbatch", "broker", "--socket", self.socket, "--log_level", "warn"], env=self.env)
        self.models = [f"soak{i}" for i in range(a.models)]
        self.file, self.outputs = f"{folder}/module.jit", 0
        if a.device != "numpy":
            self.outputs = make_module(a.model, self.file)
        self.workers = [(m, self.worker(m)) for i in range(a.workers) for m in [self.models[i % a.models]]]
        self.producers = [self.me(subprocess.PIPE, "producer", self.models[i % a.models], str(i)) for i in range(a.producers)]

    def me(self, out: int | None, *play: str) -> subprocess.Popen[bytes]:
        a = self.a
        return subprocess.Popen(
            [sys.executable, __file__, "--socket", self.socket, "--model", a.model, "--batch", str(a.batch), "--wait", str(a.wait), "--play", *play],
            env=self.env, stdout=out, stderr=self.log,
        )

    def worker(self, model: str) -> subprocess.Popen[bytes]:
        a = self.a
        if a.device == "numpy":
            return self.me(None, "numpy", model)
        dims = ",".join(map(str, shape(a.model)))
        flags = ["--half", "--channels_last"] if a.device == "cuda" and a.model == "resnet50" else []
        return subprocess.Popen(
            [sys.executable, "-m", "ringbatch.serve.torch_cli", self.file, "--name", model, "--device", a.device, "--socket", self.socket, f"--input=x:f32[{dims}]",
             f"--output=y:f32[{self.outputs}]", f"--max_batch_size={a.batch}", f"--wait_time={a.wait}s", *flags, *a.torch_args.split()],
            env=self.env, stdout=self.log, stderr=self.log,
        )

    def stats(self) -> dict[int, int]:
        """Batches that each worker has done."""
        text = subprocess.run([f"{self.a.bundle}/ringbatch", "stats", "--json", "--socket", self.socket], capture_output=True, env=self.env).stdout
        try:
            models = json.loads(text)["models"] or []
        except (ValueError, KeyError):
            return {}
        return {w["pid"]: w.get("batches", 0) for m in models for w in m.get("workers") or []}

    def read(self) -> None:
        at, batches = time.monotonic() - self.began, self.stats()
        line = []
        for model, p in self.workers:
            if m := memory(p.pid):
                m.update(at=at, batches=batches.get(p.pid, 0))
                self.readings.setdefault(p.pid, []).append(m)
                line.append(f"{model}/{p.pid} {m['RssAnon']:.2f}+{m['RssShmem']:.0f} MiB {m['batches']:.0f} batches")
        print(f"{at:6.0f} s  " + "; ".join(line), flush=True)
        with open(f"{self.a.out}/memory.json", "w") as f:
            json.dump(self.readings, f)

    def run(self) -> int:
        a = self.a
        deaths = [a.seconds * (i + 1) / (a.kills + 2) for i in range(a.kills)]
        next_reading = 0.0
        while (at := time.monotonic() - self.began) < a.seconds:
            if deaths and at >= deaths[0]:
                deaths.pop(0)
                model, victim = self.workers.pop(0)  # the oldest of a model; the others live to the end
                print(f"{at:6.0f} s  kill {model}/{victim.pid}", flush=True)
                victim.kill()
                victim.wait()
                self.workers.insert(0, (model, self.worker(model)))
            for model, p in self.workers:
                if p.poll() is not None:
                    print(f"worker {model}/{p.pid} ended by itself: {p.returncode}; see {a.out}/workers.log", flush=True)
                    return 1
            if at >= next_reading:
                next_reading += a.every
                self.read()
            time.sleep(0.2)
        self.read()
        return self.judge()

    def judge(self) -> int:
        right, wrong, failed = 0, 0, {}
        for p in self.producers:
            p.send_signal(signal.SIGTERM)
        for p in self.producers:
            out, _ = p.communicate(timeout=60)
            seen = json.loads(out.splitlines()[-1])
            right, wrong = right + seen["right"], wrong + seen["wrong"]
            for name, n in seen["failed"].items():
                failed[name] = failed.get(name, 0) + n
        lines = [f"{right} right, {wrong} wrong, failed {failed or 'none'}; {self.a.seconds:.0f} s, {self.a.kills} kills, device {self.a.device}, model {self.a.model}", ""]
        lines += [f"| worker | lived, s | batches | RssAnon, MiB | growth in thirds of its life after {self.a.settling:.0f} s, bytes a batch | verdict |", "|---|---|---|---|---|---|"]
        for pid, all in self.readings.items():
            lines.append(verdict(pid, all, self.a.settling))
        text = "\n".join(lines)
        print("\n" + text)
        Path(f"{self.a.out}/soak.md").write_text(text + "\n")
        return 1 if wrong or failed or not right else 0

    def end(self) -> None:
        for p in [*self.producers, *(p for _, p in self.workers), self.broker]:
            if p.poll() is None:
                p.kill()
            p.wait()


def verdict(pid: int, all: list[dict[str, float]], settling: float) -> str:
    late = [r for r in all if r["at"] - all[0]["at"] >= settling]
    row = f"| {pid} | {all[-1]['at'] - all[0]['at']:.0f} | {all[-1]['batches']:.0f} | {all[0]['RssAnon']:.1f} to {all[-1]['RssAnon']:.1f} |"
    third = len(late) // 3
    if third < 3:
        return row + " | too short to judge |"
    growth = []
    for part in (late[: third + 1], late[third : 2 * third + 1], late[2 * third :]):
        batches = part[-1]["batches"] - part[0]["batches"]
        growth.append((part[-1]["RssAnon"] - part[0]["RssAnon"]) * 2**20 / max(1, batches))
    ends = "the growth ends" if growth[-1] < ENDED else "it grows"
    return row + " " + ", ".join(f"{g:.1f}" for g in growth) + f" | {ends} |"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seconds", type=float, default=480)
    p.add_argument("--device", default="cuda", help="cuda, cpu, or numpy: workers without PyTorch")
    p.add_argument("--model", default="resnet50", choices=["resnet50", "small"])
    p.add_argument("--models", type=int, default=2)
    p.add_argument("--workers", type=int, default=4)
    p.add_argument("--producers", type=int, default=24)
    p.add_argument("--kills", type=int, default=3)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--wait", type=float, default=0.001)
    p.add_argument("--every", type=float, default=10, help="seconds between two readings")
    p.add_argument("--settling", type=float, default=60, help="seconds in which a worker may still warm up; a small model needs fewer")
    p.add_argument("--torch_args", default="", help="more flags of ringbatch torch, such as --no_cuda_graphs")
    p.add_argument("--bundle", default="bin", help="folder with the ringbatch command")
    p.add_argument("--out", default=".", help="folder for soak.md, memory.json and workers.log")
    p.add_argument("--socket", help=argparse.SUPPRESS)
    p.add_argument("--play", nargs="+", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.play:
        {"producer": play_producer, "numpy": play_numpy}[a.play[0]](a)
        return 0
    os.makedirs(a.out, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rb") as folder:
        s = Soak(a, folder)
        try:
            return s.run()
        finally:
            s.end()


if __name__ == "__main__":
    sys.exit(main())
