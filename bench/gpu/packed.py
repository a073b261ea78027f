#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Packed batches of an encoder, beside buckets and beside the bound, in one run; see docs/sizes.md.

    make gpu-bundle                                       # here: build/gpu
    OUT=results bash bench/gpu/run.sh packed              # on the GPU machine: under 200 s, with MPS

An encoder of 12 layers, 768 wide, in fp16; texts of 8 to 500 tokens, uniform. The bound is one
process that feeds itself: one CUDA graph of 8,192 tokens. Then 64 and 16 Python producers, each
with one text in flight, and two workers of each kind. Every part goes on when another fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

LAYERS, WIDTH = map(int, os.environ.get("ENCODER", "12x768").split("x"))
BUDGET, ROWS = 8192, 64  # of a packed batch, at most
BEGAN = time.monotonic()
ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [str(ROOT / "bench" / "gpu"), str(ROOT / "examples" / "python")]
sys.path[:0] = FOLDERS


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:5.1f} s] {text}", flush=True)


def some_texts(seed: int, count: int) -> list:
    import numpy as np

    rng = np.random.default_rng(seed)
    return [rng.integers(1, 30_000, n) for n in rng.integers(8, 501, count)]


# -- models, by their import path


def packed_model():
    from packed_encoder import encoder

    return encoder(LAYERS, WIDTH)


def padded_model():
    """The same weights, for padded rows and a mask."""
    import torch
    from packed_encoder import HEAD, encoder
    from torch.nn import functional as F

    class Padded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder(LAYERS, WIDTH)

        def forward(self, tokens, mask):
            rows, size = tokens.shape
            e = self.encoder
            x = e.norm(e.words(tokens) + e.places.weight[:size])
            for layer in e.layers:
                q, k, v = layer.qkv(x).view(rows, size, 3, -1, HEAD).permute(2, 0, 3, 1, 4)
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
                x = layer.after_attention(x, y.transpose(1, 2).flatten(2))
            return F.normalize(x.masked_fill(~mask[..., None], 0).sum(1, dtype=torch.float32), dim=1).to(x.dtype)

    return Padded().eval()


# -- the roles that this program plays itself


def bound() -> None:
    """Full batches of this process's own texts, two in flight. For each line of seconds it answers with sequences/s."""
    import numpy as np
    import torch

    model, batches = packed_model().half().cuda(), []
    for seed in range(32):
        texts = some_texts(seed, ROWS)
        while sum(map(len, texts)) > BUDGET:
            texts.pop()
        ends = np.cumsum([0, *map(len, texts)])
        tokens, offsets = torch.zeros(BUDGET, dtype=torch.int64), torch.full((ROWS + 1,), int(ends[-1]), dtype=torch.int32)
        tokens[: ends[-1]], offsets[: len(ends)] = torch.from_numpy(np.concatenate(texts)), torch.from_numpy(ends)
        batches.append((len(texts), tokens.pin_memory(), offsets.pin_memory()))
    tokens, offsets = batches[0][1].cuda(), batches[0][2].cuda()
    graph, done = torch.cuda.CUDAGraph(), [torch.cuda.Event() for _ in range(2)]
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            model(tokens, offsets)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = model(tokens, offsets)
        answers = [torch.empty(y.shape, dtype=y.dtype, pin_memory=True) for _ in range(2)]
        print("ready", flush=True)
        for line in sys.stdin:
            began, n, rows = time.monotonic(), 0, 0
            while time.monotonic() - began < float(line):
                count, some, ends = batches[n % len(batches)]
                done[n % 2].synchronize()
                tokens.copy_(some, non_blocking=True)
                offsets.copy_(ends, non_blocking=True)
                graph.replay()
                answers[n % 2].copy_(y, non_blocking=True)
                done[n % 2].record()
                n, rows = n + 1, rows + count
            torch.cuda.synchronize()
            took = time.monotonic() - began
            print(json.dumps({"rate": rows / took, "rows_per_batch": rows / n, "batch_ms": 1000 * took / n}), flush=True)


def producer(seed: int) -> None:
    """One text in flight. For each line "model begin end" it answers with begin and the microseconds of each call."""
    import ringbatch as rb

    texts, models = some_texts(seed, 64), {}
    print("ready", flush=True)
    for line in sys.stdin:
        name, begin, end = line.split()
        took, failed, n = [], "", seed
        try:
            model = models.get(name) or models.setdefault(name, rb.connect(name, wait=20))
            while (now := time.monotonic()) < float(end):
                model(texts[n % 64], timeout=10)
                n += 1
                if now > float(begin):
                    took.append(round((time.monotonic() - now) * 1e6))
        except Exception as e:
            failed = f"{type(e).__name__}: {e}"
        print(begin, json.dumps({"us": took, "failed": failed}), flush=True)


# -- measuring


@contextlib.contextmanager
def part(name: str, seconds: float):
    """Says why the block failed, or that it took too long."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(1, seconds))
    try:
        yield
    except Exception as e:
        say(f"FAILED: {name}: {type(e).__name__}: {e}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def measure(name: str, producers: list, seconds: float) -> dict:
    import ringbatch as rb

    def counts() -> tuple[int, int]:
        found = next(m for m in rb.stats()["models"] if m["name"] == name)
        return found["batches"], found["rows"]

    begin = time.monotonic() + 1.5
    for p in producers:
        p.tell(f"{name} {begin} {begin + seconds}\n")
    time.sleep(begin - time.monotonic())
    batches, rows = counts()
    time.sleep(max(0, begin + seconds - time.monotonic()))
    more_batches, more_rows = counts()
    answers = [json.loads(p.wait_for(f"{begin} ").split(" ", 1)[1]) for p in producers]
    for text in sorted({a["failed"] for a in answers if a["failed"]})[:3]:
        say(f"  a producer failed: {text[:300]}")
    us = sorted(t for a in answers for t in a["us"])
    return {
        "rate": len(us) / seconds, "rows_per_batch": (more_rows - rows) / max(1, more_batches - batches),
        "p50_ms": us[len(us) // 2] / 1000, "p99_ms": us[len(us) * 99 // 100] / 1000,
    }  # fmt: skip


def least_cosine() -> float:
    """Between the answers of the two models to the same texts."""
    import numpy as np
    import ringbatch as rb

    with rb.connect("packed", wait=5) as one, rb.connect("bucketed", wait=5) as other:
        pairs = [[np.array(m(text, timeout=10), "float32") for m in (one, other)] for text in some_texts(99, 16)]
        return min(float(np.dot(*pair)) for pair in pairs)


def run(a: argparse.Namespace, start, folder: str, results: dict[str, list[dict]]) -> None:
    from processes import start_broker

    start_broker(start, folder)
    flags = ["--input", "tokens:i64[<=512]", "--device", a.device, *(["--half"] if a.device == "cuda" else [])]
    commands = {
        "packed": ["packed:packed_model", "--packed", "tokens", f"--max-batch-size={ROWS}", f"--max-batch-cost={BUDGET}"],
        "bucketed": ["packed:padded_model", "--mask", "mask", "--max-batch-size=32"],
    }
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")])}
    itself = [sys.executable, __file__]
    ready = {"bound": [start(*itself, "bound", **env)] if a.device == "cuda" else []}
    for name, command in commands.items():
        ready[name] = [start(sys.executable, "-m", "ringbatch.torch", *command, "--name", name, *flags, **env) for _ in range(2)]
    ready["producers"] = producers = [start(*itself, "producer", str(i), **env) for i in range(max(a.producers))]
    works = []
    for name, some in ready.items():
        with part(name, a.limit - 60 - (time.monotonic() - BEGAN)):
            for p in some:
                p.wait_for("serving", "ready")
            say(f"{name}: ready")
            works += [name] * bool(some)
    with part("comparing the answers", 30):
        say(f"answers of the two models: cosine {least_cosine():.4f} at least")
    for name, count in a.rounds * [("bound", 0), *((name, n) for n in a.producers for name in commands)]:
        what = f"{name}, {count} producers" if count else name
        if time.monotonic() - BEGAN > a.limit - a.seconds - 5 or name not in works:
            say(f"left out: {what}")
            continue
        with part(what, a.seconds + 20):
            if not count:
                ready["bound"][0].tell(f"{a.seconds}\n")
            got = measure(name, producers[:count], a.seconds) if count else json.loads(ready["bound"][0].wait_for("{"))
            results.setdefault(what, []).append(got)
            say(f"{what}: " + ", ".join(f"{key} {value:,.1f}" for key, value in got.items()))


def main() -> int:
    from processes import processes

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--limit", type=float, default=185.0, help="seconds in all")
    p.add_argument("--producers", type=int, nargs="+", default=[64, 16])
    p.add_argument("--device", default="cuda", help="cpu: to try the program; there is no bound then")
    p.add_argument("--json", help="a file for the results")
    a = p.parse_args()
    results: dict[str, list[dict]] = {}
    with tempfile.TemporaryDirectory(prefix="rb") as folder, part("all", a.limit + 5), processes() as start:
        run(a, start, folder, results)
    rows = {what: {key: statistics.median(r[key] for r in some) for key in some[0]} for what, some in results.items()}
    ratios = {}
    for n in a.producers:
        packed, bucketed, self_fed = (rows.get(what, {}) for what in (f"packed, {n} producers", f"bucketed, {n} producers", "bound"))
        for text, one, other in (
            ("packed / bound", packed.get("rate"), self_fed.get("rate")),
            ("packed / bucketed", packed.get("rate"), bucketed.get("rate")),
            ("p99 / full batch", packed.get("p99_ms"), self_fed.get("batch_ms")),
        ):
            if one and other:
                ratios[f"{text}, {n} producers"] = one / other
    for what, row in rows.items():
        print(f"{what:<24}" + "".join(f"  {key} {value:>8,.1f}" for key, value in row.items()))
    for what, value in ratios.items():
        print(f"{what:<36} {value:.2f}")
    if a.json:
        Path(a.json).write_text(json.dumps({"encoder": f"{LAYERS}x{WIDTH}", "rows": rows, "ratios": ratios}, indent=1))
    return 0 if ratios else 1


if __name__ == "__main__":
    roles = {"bound": bound, "producer": lambda: producer(int(sys.argv[2]))}
    sys.exit(roles[sys.argv[1]]() if sys.argv[1:2] and sys.argv[1] in roles else main())
