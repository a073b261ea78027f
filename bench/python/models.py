# SPDX-License-Identifier: Apache-2.0
"""Served model files against the same models fed full batches by themselves, in one run.

    python bench/python/models.py [--only NAME] [--rounds 8] [--seconds 3] [--producers 64] [--threads N] [--apart load|all] [--json FILE]

onnx_fixed     a convolution on pictures of 3 x 64 x 64 (--side), `ringbatch onnx`
onnx_lengths   a small encoder (1 layer, 32 wide) on 8..500 tokens, `ringbatch onnx --mask mask`
torch_lengths  an encoder of that size in TorchScript, `ringbatch torch --mask mask`
gpu_lengths    an encoder of 12 layers, 768 wide, in float16 on a GPU, two processes (--workers) of
               `ringbatch torch encoder:make --mask mask --half`; only if asked for

The bound is what a process reaches that runs full batches of its own arrays:
the same file, the same engine and threads, no broker. onnx_fixed is also compared with
arrays that change from batch to batch, as what is served does: one array again and again
is still in the cache. With lengths it is
measured for each bucket, and the requests that were answered are counted
against their buckets' times: the same lengths, the same buckets, full batches.
Where there are several workers as many processes make the bound, at once. Before,
answers to some lengths are compared with what the model gives for them unpadded.
Both sides take turns of a few seconds, and the median counts: the machine's
other load then hits both. With --apart producers and broker run on the cores that the
session has no threads for (load), and worker and bound on the others (all). The same by CPU time (of the process that computes, on both
sides) hardly depends on other load; it does not see a worker that waits. Needs the installed package, onnxruntime, onnx and torch.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
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
BATCH, MOST, SHORTEST, LONGEST, WORDS = 32, 512, 8, 500, 1000
BUCKETS = (16, 32, 64, 128, 256, 512)
ONE_ARRAY, CHANGING = 0, 1  # what the bound of onnx_fixed is fed


# -- the models


def make(case: str, folder: str, side: int) -> str:
    """Writes the model's file."""
    path = str(Path(folder, case))
    if case == "gpu_lengths":
        return path  # made in each process
    if case == "torch_lengths":
        import torch

        torch.jit.script(torch_encoder()).save(path)
        return path
    import graphs

    return graphs.conv(path, side=side, channels=32) if case == "onnx_fixed" else graphs.encoder(path, width=32, layers=1, words=WORDS)


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


def command(case: str, path: str, socket: str, a: argparse.Namespace) -> list[str]:
    size = f"<={MOST}"
    if case.startswith("onnx"):
        flags = ["onnx", path, "--threads", str(a.threads), "--depth", str(a.depth), *([] if a.spin else ["--no_spin"])]
        flags += [] if case == "onnx_fixed" else ["--dim", f"seq={size}", "--mask", "mask"]
    elif case == "torch_lengths":
        flags = ["torch", path, "--input", f"tokens:i64[{size}]", "--mask", "mask", "--device", "cpu"]
    else:
        flags = ["torch", "encoder:make", "--input", f"tokens:i64[{size}]", "--mask", "mask", "--half"]
    return [rb.binary_path(), *flags, "--name", case, f"--max_batch_size={BATCH}", "--socket", socket]


def bucket(length: int) -> int:
    return next(b for b in BUCKETS if b >= length)


# -- the bound: processes of their own, which run a round for each line on standard input


def bound(case: str, path: str, a: argparse.Namespace) -> None:
    model, seconds = alone(case, path, a), a.seconds
    sizes = [ONE_ARRAY, CHANGING] if case == "onnx_fixed" else list(BUCKETS)
    for size in sizes * 2:
        model.run(size)
    model.finish()
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() != "go":
            print(compare(model, line.strip()), flush=True)
            continue
        took = {}
        for size in sizes:
            n, begun, used = 0, time.monotonic(), time.process_time()
            while n < 2 or time.monotonic() - begun < seconds / len(sizes):
                model.run(size)
                n += 1
            model.finish()
            took[size] = (time.monotonic() - begun) / n / BATCH, (time.process_time() - used) / n / BATCH
        print(json.dumps(took), flush=True)


def compare(model, file: str) -> float:
    """How far answers are from what the model gives without padding, as a part of the largest number."""
    asked = np.load(file)
    worst = 0.0
    for name in [k for k in asked if k.startswith("x")]:
        want, got = np.asarray(model.single(asked[name]), "float64"), asked["y" + name[1:]].astype("float64")
        worst = max(worst, float(np.abs(got - want).max() / np.abs(want).max()))
    return worst


class Alone:
    """The model without a broker, on the CPU."""

    def __init__(self, call) -> None:
        rng = np.random.default_rng(0)
        self.call = call
        self.tokens = {size: rng.integers(1, WORDS, (BATCH, size)) for size in BUCKETS}
        self.masks = {size: np.arange(size) < rng.integers(size // 2 + 1, size + 1, (BATCH, 1)) for size in BUCKETS}

    def run(self, size: int) -> None:
        self.call(self.tokens[size], self.masks[size])

    def finish(self) -> None:
        """Waits for what runs."""

    def single(self, tokens: np.ndarray):
        return self.call(tokens[None], np.ones((1, len(tokens)), bool))[0]


def alone(case: str, path: str, a: argparse.Namespace) -> Alone:
    if case == "gpu_lengths":
        return on_gpu()
    if case == "torch_lengths":
        import torch

        torch.set_num_threads(a.threads)
        module = torch.jit.freeze(torch.jit.load(path).eval())
        torch.jit.set_fusion_strategy([("DYNAMIC", len(BUCKETS))])

        def run(tokens: np.ndarray, mask: np.ndarray):
            with torch.inference_mode():
                return module(torch.from_numpy(tokens), torch.from_numpy(mask)).numpy()

        return Alone(run)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = a.threads
    if not a.spin:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(path, options)
    if case == "onnx_fixed":
        batches = itertools.cycle(np.random.default_rng(0).random((6, BATCH, 3, a.side, a.side), "float32"))
        first, made = next(batches), Alone(None)
        made.run = lambda what: session.run(None, {"x": first if what == ONE_ARRAY else next(batches)})
        return made
    return Alone(lambda tokens, mask: session.run(None, {"tokens": tokens, "mask": mask.astype("int64")})[0])


def on_gpu() -> Alone:
    """A CUDA graph for each bucket, fed from pinned memory; two batches in flight."""
    import encoder
    import torch

    module = encoder.make().eval().half().cuda()

    @torch.inference_mode()
    def call(tokens: np.ndarray, mask: np.ndarray):
        return module(torch.from_numpy(tokens).cuda(), torch.from_numpy(mask).cuda()).cpu().numpy()

    made = Alone(call)
    stream, events, recorded = torch.cuda.Stream(), [torch.cuda.Event(), torch.cuda.Event()], {}
    with torch.inference_mode(), torch.cuda.stream(stream):
        for size in BUCKETS:
            host, mask = torch.from_numpy(made.tokens[size]).pin_memory(), torch.from_numpy(made.masks[size]).cuda()
            tokens = host.cuda()
            module(tokens, mask)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                y = module(tokens, mask)
            recorded[size] = graph, tokens, host, y, torch.empty(y.shape, dtype=y.dtype, pin_memory=True)
    stream.synchronize()

    def run(size: int) -> None:
        graph, tokens, host, y, out = recorded[size]
        with torch.inference_mode(), torch.cuda.stream(stream):
            tokens.copy_(host, non_blocking=True)
            graph.replay()
            out.copy_(y, non_blocking=True)
            events[0].record(stream)
        events.reverse()
        events[0].synchronize()  # of the batch before

    made.run, made.finish = run, stream.synchronize
    return made


# -- the load


def producer(case: str, socket: str, side: int, seed: int, turns, go, idle, over, answers) -> None:
    """In its turns one request at a time while go is set; notes when each was answered, how long it took and how long it was."""
    rng, noted = np.random.default_rng(seed), []
    with rb.connect(case, socket=socket, window=1, wait=120) as model:
        picture = rng.random((3, side, side), "float32")
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

    def __init__(self, case: str, socket: str, side: int, producers: int) -> None:
        context = mp.get_context("fork")
        self.turns, self.idle, self.go, self.over = context.Semaphore(0), context.Semaphore(0), context.Event(), context.Event()
        self.pipes = [context.Pipe(duplex=False) for _ in range(producers)]
        self.processes = [
            context.Process(target=producer, args=(case, socket, side, seed, self.turns, self.go, self.idle, self.over, w)) for seed, (_, w) in enumerate(self.pipes)
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


def stats_of(case: str, socket: str) -> dict:
    answer = subprocess.run([rb.binary_path(), "stats", "--json", "--socket", socket], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    models = json.loads(answer.stdout or "{}").get("models") or []
    return next((m for m in models if m["name"] == case), {})


def workers_of(case: str, socket: str) -> int:
    return len(stats_of(case, socket).get("workers") or [])


def batches_of(case: str, socket: str) -> tuple[int, int]:
    model = stats_of(case, socket)
    return model["batches"], model["rows"]


@contextlib.contextmanager
def on_cores(cores: list[int]):
    """What is started in here runs on these cores; all of them: anywhere."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cores_of(a: argparse.Namespace) -> tuple[list[int], list[int]]:
    """Of what computes, and of producers and broker; none: all. Hyperthreads of one core stay together."""

    def place(cpu: int) -> tuple[int, ...]:
        return *(int(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/{what}").read_text()) for what in ("physical_package_id", "core_id")), cpu

    cores = sorted(os.sched_getaffinity(0), key=place)
    if not a.apart or a.threads >= len(cores):
        return [], []
    return cores[: a.threads] if a.apart == "all" else [], cores[a.threads :]


@contextlib.contextmanager
def running(*command: str, **options):
    p = subprocess.Popen(command, **options)
    try:
        yield p
    finally:
        p.terminate()
        p.wait()


def measure(case: str, a: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="rb") as folder, contextlib.ExitStack() as started:
        os.chmod(folder, 0o700)
        socket = str(Path(folder, "b.sock"))
        own = [sys.executable, __file__, "--threads", str(a.threads), "--side", str(a.side), *(["--spin"] if a.spin else [])]
        subprocess.run([*own, "--make", case, folder], check=True)
        path, processes = str(Path(folder, case)), a.workers if case == "gpu_lengths" else 1
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(a.threads)}
        computing, loading = cores_of(a)
        with on_cores(loading):
            started.enter_context(running(rb.binary_path(), "broker", "--socket", socket, "--log_level", "error"))
        share = [*own, "--bound", case, path, "--seconds", str(a.seconds)]
        with on_cores(computing):
            workers = [started.enter_context(running(*command(case, path, socket, a), env=env)) for _ in range(processes)]
            bounds = [Bound(started.enter_context(running(*share, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))) for _ in range(processes)]
        for b in bounds:
            b.answer()
        while workers_of(case, socket) < processes:
            assert all(w.poll() is None for w in workers), "a worker ended"
            time.sleep(0.1)
        difference = 0.0 if case == "onnx_fixed" else float(bounds[0].ask(answers_to_some(case, socket, folder)))
        full = json.loads(bounds[0].ask("go"))  # while nothing else runs
        with on_cores(loading):
            load = Load(case, socket, a.side, a.producers)
        load.on(0, 1)
        took, windows, before, used, begun = [], [], batches_of(case, socket), sum(cpu_of(w.pid) for w in workers), time.monotonic()
        for _ in range(a.rounds):
            for b in bounds:
                b.tell("go")
            took.append(together([json.loads(b.answer()) for b in bounds]))
            windows.append(load.on(a.settle, a.seconds))
        after, used = batches_of(case, socket), sum(cpu_of(w.pid) for w in workers) - used
        noted = [n for n in load.stop() if n[0] > begun]
        found = summary(case, noted, windows, took, (after[1] - before[1]) / (after[0] - before[0]), used)
        return {**found, "full_batch_ms": 1e3 * BATCH * max(wall for wall, _ in full.values()), "difference": difference}


class Bound:
    """A process that feeds itself."""

    def __init__(self, process: subprocess.Popen) -> None:
        assert process.stdin and process.stdout
        self.into, self.out = process.stdin, process.stdout

    def tell(self, line: str) -> None:
        self.into.write(line + "\n")
        self.into.flush()

    def answer(self) -> str:
        return self.out.readline()

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.answer()


def together(each: list[dict[str, list[float]]]) -> dict[int, tuple[float, float]]:
    """Seconds a row, of several processes at once; and of CPU time."""
    return {int(size): (1 / sum(1 / e[size][0] for e in each), statistics.mean(e[size][1] for e in each)) for size in each[0]}


def answers_to_some(case: str, socket: str, folder: str) -> str:
    """Sends some lengths, all at once; gives the file of what was asked and answered."""
    rng = np.random.default_rng(7)
    xs = [rng.integers(1, WORDS, int(n)) for n in rng.integers(SHORTEST, LONGEST + 1, 48)]
    with rb.connect(case, socket=socket, window=len(xs), wait=120) as model:
        answers = [r.result() for r in [model.submit(x) for x in xs]]
    ys = [next(iter(y.values())) if isinstance(y, dict) else y for y in answers]  # the first output
    file = str(Path(folder, "answers.npz"))
    np.savez(file, **{f"x{i}": x for i, x in enumerate(xs)}, **{f"y{i}": y for i, y in enumerate(ys)})
    return file


def cpu_of(pid: int) -> float:
    """Seconds of CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def summary(
    case: str, noted: list[tuple[float, float, int]], windows: list[tuple[float, float]], bounds: list[dict[int, list[float]]], rows: float, used: float
) -> dict[str, float]:
    def key(n: int) -> int:
        return ONE_ARRAY if case == "onnx_fixed" else bucket(n)

    ratios, answered, ideals, changing = [], [], 0.0, []
    cpu = {size: statistics.median(took[size][1] for took in bounds) for size in bounds[0]}
    for (begun, end), took in zip(windows, bounds):
        answers = [a for a in noted if begun < a[0] <= end]
        ideal = sum(took[key(n)][0] for _, _, n in answers)
        ratios.append(ideal / (end - begun))
        if CHANGING in took:
            changing.append(len(answers) * took[CHANGING][0] / (end - begun))
        answered += answers
        ideals += ideal
    waits = sorted(s for _, s, _ in answered)
    return {
        "ratio": statistics.median(ratios), "ratio_least": min(ratios), "ratio_most": max(ratios), "cpu_ratio": sum(cpu[key(n)] for _, _, n in noted) / used,
        "requests_per_s": len(answered) / sum(end - begun for begun, end in windows), "bound_per_s": len(answered) / ideals, "rows_per_batch": rows,
        "p50_ms": 1e3 * waits[len(waits) // 2], "p99_ms": 1e3 * waits[len(waits) * 99 // 100],
        **({"ratio_changing": statistics.median(changing), "changing_least": min(changing), "changing_most": max(changing)} if changing else {}),
    }  # fmt: skip


CASES = ("onnx_fixed", "onnx_lengths", "torch_lengths", "gpu_lengths")


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--only", action="append", choices=CASES)
    p.add_argument("--rounds", type=int, default=8)
    p.add_argument("--seconds", type=float, default=3)
    p.add_argument("--settle", type=float, default=1, help="seconds of load before it counts")
    p.add_argument("--producers", type=int, default=64)
    p.add_argument("--workers", type=int, default=2, help="processes on the GPU")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the worker and of the bound, on the CPU (default: one per core)")
    p.add_argument("--apart", choices=("load", "all"), help="producers and broker on the cores that are left; all: worker and bound on the first ones")
    p.add_argument("--spin", action="store_true", help="ONNX Runtime's threads spin, in the worker and in the bound; that counts as CPU time")
    p.add_argument("--depth", type=int, default=2, help="of `ringbatch onnx`")
    p.add_argument("--side", type=int, default=64, help="of the pictures")
    p.add_argument("--json")
    p.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    p.add_argument("--bound", nargs=2, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.make:
        make(*a.make, a.side)
    elif a.bound:
        bound(*a.bound, a)
    else:
        results = {case: measure(case, a) for case in a.only or CASES[:3]}
        for case, r in results.items():
            print(f"{case}: {r['ratio']:.1%} of full batches fed by themselves ({r['ratio_least']:.1%} to {r['ratio_most']:.1%}; {r['requests_per_s']:.0f} of {r['bound_per_s']:.0f} requests/s), {r['cpu_ratio']:.1%} by the worker's CPU time, "
                  f"{r['rows_per_batch']:.1f} rows a batch, p50 {r['p50_ms']:.1f} ms, p99 {r['p99_ms']:.1f} ms; a full batch of the largest by itself takes {r['full_batch_ms']:.1f} ms; "
                  f"answers differ from unpadded ones by {r['difference']:.2g} of the largest number at most")  # fmt: skip
            if "ratio_changing" in r:
                print(f"  {r['ratio_changing']:.1%} ({r['changing_least']:.1%} to {r['changing_most']:.1%}) where the arrays that the bound is fed change from batch to batch")
        if a.json:
            Path(a.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
