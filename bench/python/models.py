# SPDX-License-Identifier: Apache-2.0
"""Served model files against the same models fed full batches by themselves, in one run.

    python bench/python/models.py [--only NAME] [--rounds 8] [--seconds 3] [--producers 64] [--json FILE]

onnx_fixed     a convolution on pictures of 3 x 64 x 64, `ringbatch onnx`
onnx_lengths   a small encoder (1 layer, 32 wide) on 8..500 tokens, `ringbatch onnx --mask mask`
torch_lengths  an encoder of that size in TorchScript, `ringbatch torch --mask mask`

The bound is what a process reaches that runs full batches of its own arrays:
the same file, the same engine and threads, no broker. With lengths it is
measured for each bucket, and the requests that were answered are counted
against their buckets' times: the same lengths, the same buckets, full batches.
Both sides take turns of a few seconds, and the median counts: the machine's
other load then hits both. The same by CPU time (of the process that computes, on both
sides) hardly depends on other load; it does not see a worker that waits. Needs the installed package, onnxruntime, onnx and torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import ringbatch as rb

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "python" / "tests"))
BATCH, MOST, SHORTEST, LONGEST, WORDS, SIDE = 32, 512, 8, 500, 1000, 64
BUCKETS = (16, 32, 64, 128, 256, 512)


# -- the models


def make(case: str, folder: str) -> str:
    """Writes the model's file."""
    path = str(Path(folder, case))
    if case == "torch_lengths":
        import torch

        torch.jit.script(torch_encoder()).save(path)
        return path
    import graphs

    return graphs.conv(path, side=SIDE, channels=32) if case == "onnx_fixed" else graphs.encoder(path, width=32, layers=1, words=WORDS)


def torch_encoder():
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.qkv, self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            y = torch.softmax(q @ k.transpose(1, 2) * x.shape[-1] ** -0.5 + bias, dim=-1) @ v
            return x + self.down(torch.relu(self.up(y)))

    class Encoder(nn.Module):
        def __init__(self, width: int = 32) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(WORDS, width), Layer(width)

        def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            bias = (1 - mask.to(torch.float32)).unsqueeze(1) * -1e4
            x = self.layer(self.table(tokens), bias)
            here = mask.to(torch.float32).unsqueeze(2)
            return (x * here).sum(1) / here.sum(1)

    torch.manual_seed(0)
    return Encoder().eval()


def command(case: str, path: str, socket: str) -> list[str]:
    size = f"<={MOST}"
    if case == "torch_lengths":
        flags = ["torch", path, "--input", f"tokens:i64[{size}]", "--mask", "mask", "--device", "cpu"]
    else:
        flags = ["onnx", path, "--no_spin", *(["--dim", f"seq={size}", "--mask", "mask"] if case == "onnx_lengths" else [])]
    return [rb.binary_path(), *flags, "--name", case, f"--max_batch_size={BATCH}", "--socket", socket]


def bucket(length: int) -> int:
    return next(b for b in BUCKETS if b >= length)


# -- the bound: a process of its own, which runs a round for each line on standard input


def bound(case: str, path: str, seconds: float) -> None:
    run = full_batches(case, path)
    sizes = [0] if case == "onnx_fixed" else list(BUCKETS)
    for size in sizes * 2:
        run(size)
    print("ready", flush=True)
    for _ in sys.stdin:
        took = {}
        for size in sizes:  # most of the time goes where most of the work is
            n, begun, used = 0, time.monotonic(), time.process_time()
            while n < 2 or time.monotonic() - begun < seconds / len(sizes):
                run(size)
                n += 1
            took[size] = (time.monotonic() - begun) / n / BATCH, (time.process_time() - used) / n / BATCH
        print(json.dumps(took), flush=True)


def full_batches(case: str, path: str):
    rng = np.random.default_rng(0)
    xs = {size: rng.integers(1, WORDS, (BATCH, size)) for size in BUCKETS}
    masks = {size: np.arange(size) < rng.integers(size // 2 + 1, size + 1, (BATCH, 1)) for size in BUCKETS}
    if case == "torch_lengths":
        import torch

        module = torch.jit.freeze(torch.jit.load(path).eval())
        torch.jit.set_fusion_strategy([("DYNAMIC", len(BUCKETS))])

        def run(size: int) -> None:
            with torch.inference_mode():
                module(torch.from_numpy(xs[size]), torch.from_numpy(masks[size]))

        return run
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # what spins would count as work
    session = onnxruntime.InferenceSession(path, options)
    pictures = rng.random((BATCH, 3, SIDE, SIDE), "float32")
    if case == "onnx_fixed":
        return lambda _: session.run(None, {"x": pictures})
    return lambda size: session.run(None, {"tokens": xs[size], "mask": masks[size].astype("int64")})


# -- the load


def producer(case: str, socket: str, seed: int, turns, go, idle, over, answers) -> None:
    """In its turns one request at a time while go is set; notes when each was answered, how long it took and how long it was."""
    rng, noted = np.random.default_rng(seed), []
    with rb.connect(case, socket=socket, window=1, wait=120) as model:
        picture = rng.random((3, SIDE, SIDE), "float32")
        while True:
            if not go.is_set():
                idle.release()
                turns.acquire()  # not an event: who is not scheduled while it is set would miss it
            if over.is_set():
                break
            n = int(rng.integers(SHORTEST, LONGEST + 1))
            x = picture if case == "onnx_fixed" else rng.integers(1, WORDS, n)
            begun = time.monotonic()
            model(x)
            now = time.monotonic()
            noted.append((now, now - begun, n))
    answers.send(noted)
    answers.close()


class Load:
    """Producer processes that are on or off."""

    def __init__(self, case: str, socket: str, producers: int) -> None:
        context = mp.get_context("fork")
        self.turns, self.idle, self.go, self.over = context.Semaphore(0), context.Semaphore(0), context.Event(), context.Event()
        self.pipes = [context.Pipe(duplex=False) for _ in range(producers)]
        self.processes = [
            context.Process(target=producer, args=(case, socket, seed, self.turns, self.go, self.idle, self.over, w)) for seed, (_, w) in enumerate(self.pipes)
        ]
        for p in self.processes:
            p.start()
        for _ in self.processes:
            self.idle.acquire()

    def on(self, settle: float, seconds: float) -> tuple[float, float]:
        """Loads for so long; gives when the part that counts began and ended."""
        self.start()
        time.sleep(settle)
        begun = time.monotonic()
        time.sleep(seconds)
        end = time.monotonic()
        self.go.clear()
        for _ in self.processes:
            self.idle.acquire()
        return begun, end

    def start(self) -> None:
        self.go.set()
        for _ in self.processes:
            self.turns.release()

    def stop(self) -> list[tuple[float, float, int]]:
        self.over.set()
        self.start()
        noted = [a for r, _ in self.pipes for a in r.recv()]
        for p in self.processes:
            p.join()
        return noted


def batches_of(case: str, socket: str) -> tuple[int, int]:
    answer = subprocess.run([rb.binary_path(), "stats", "--json", "--socket", socket], stdout=subprocess.PIPE, check=True)
    model = next(m for m in json.loads(answer.stdout)["models"] if m["name"] == case)
    return model["batches"], model["rows"]


@contextlib.contextmanager
def running(*command: str, **options):
    p = subprocess.Popen(command, **options)
    try:
        yield p
    finally:
        p.terminate()
        p.wait()


def measure(case: str, rounds: int, seconds: float, settle: float, producers: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="rb") as folder:
        os.chmod(folder, 0o700)
        socket = str(Path(folder, "b.sock"))
        subprocess.run([sys.executable, __file__, "--make", case, folder], check=True)
        path = str(Path(folder, case))
        alone_command = [sys.executable, __file__, "--bound", case, path, "--seconds", str(seconds)]
        env = {**os.environ, "PYTHON": sys.executable}
        with (
            running(rb.binary_path(), "broker", "--socket", socket, "--log_level", "error"),
            running(*command(case, path, socket), env=env) as worker,
            running(*alone_command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as alone,
        ):
            assert alone.stdin and alone.stdout
            alone.stdout.readline()
            load = Load(case, socket, producers)
            load.on(0, 1)
            bounds, windows, before, used, begun = [], [], batches_of(case, socket), cpu_of(worker.pid), time.monotonic()
            for _ in range(rounds):
                alone.stdin.write("go\n")
                alone.stdin.flush()
                bounds.append({int(size): s for size, s in json.loads(alone.stdout.readline()).items()})
                windows.append(load.on(settle, seconds))
            after, used = batches_of(case, socket), cpu_of(worker.pid) - used
            noted = [a for a in load.stop() if a[0] > begun]
            return summary(case, noted, windows, bounds, (after[1] - before[1]) / (after[0] - before[0]), used)


def cpu_of(pid: int) -> float:
    """Seconds of CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def summary(
    case: str, noted: list[tuple[float, float, int]], windows: list[tuple[float, float]], bounds: list[dict[int, list[float]]], rows: float, used: float
) -> dict[str, float]:
    def key(n: int) -> int:
        return 0 if case == "onnx_fixed" else bucket(n)

    ratios, answered, ideals = [], [], 0.0
    cpu = {size: statistics.median(took[size][1] for took in bounds) for size in bounds[0]}
    for (begun, end), took in zip(windows, bounds):
        answers = [a for a in noted if begun < a[0] <= end]
        ideal = sum(took[key(n)][0] for _, _, n in answers)
        ratios.append(ideal / (end - begun))
        answered += answers
        ideals += ideal
    waits = sorted(s for _, s, _ in answered)
    return {
        "ratio": statistics.median(ratios), "ratio_least": min(ratios), "ratio_most": max(ratios), "cpu_ratio": sum(cpu[key(n)] for _, _, n in noted) / used,
        "requests_per_s": len(answered) / sum(end - begun for begun, end in windows), "bound_per_s": len(answered) / ideals, "rows_per_batch": rows,
        "p50_ms": 1e3 * waits[len(waits) // 2], "p99_ms": 1e3 * waits[len(waits) * 99 // 100],
        "full_batch_ms": 1e3 * BATCH * statistics.median(max(wall for wall, _ in took.values()) for took in bounds),
    }  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--only", action="append")
    p.add_argument("--rounds", type=int, default=8)
    p.add_argument("--seconds", type=float, default=3)
    p.add_argument("--settle", type=float, default=1, help="seconds of load before it counts")
    p.add_argument("--producers", type=int, default=64)
    p.add_argument("--json")
    p.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    p.add_argument("--bound", nargs=2, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.make:
        make(*a.make)
    elif a.bound:
        bound(*a.bound, a.seconds)
    else:
        results = {case: measure(case, a.rounds, a.seconds, a.settle, a.producers) for case in a.only or ["onnx_fixed", "onnx_lengths", "torch_lengths"]}
        for case, r in results.items():
            print(f"{case}: {r['ratio']:.1%} of full batches fed by themselves ({r['ratio_least']:.1%} to {r['ratio_most']:.1%}; {r['requests_per_s']:.0f} of {r['bound_per_s']:.0f} requests/s), {r['cpu_ratio']:.1%} by the worker's CPU time, "
                  f"{r['rows_per_batch']:.1f} rows a batch, p50 {r['p50_ms']:.0f} ms, p99 {r['p99_ms']:.0f} ms; a full batch of the largest takes {r['full_batch_ms']:.0f} ms")  # fmt: skip
        if a.json:
            Path(a.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
