#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs three checks that need a GPU, in about four minutes; each prints one line of JSON.

    export PYTHONPATH=build/gpu/python RINGBATCH_LIBRARY=build/gpu/libringbatch.so RINGBATCH_BINARY=build/gpu/ringbatch # of make gpu-bundle
    python3 bench/gpu/right.py [PART…]        # --device cpu tries the script itself

padding   TorchScript encoders without and with a mask: only those with a mask may get buckets, with and without CUDA graphs
lengths   64 producers with lengths 8 to 500, two workers, no buckets: requests a second (47 where each size is compiled)
hung      three workers under MPS, lease 4 s, one request whose kernel never ends: what becomes of the requests of others
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import ringbatch as rb

POISON, HEALED_S = -1.0, 90.0  # longer is not waited for


def make_encoder(file: str, masked: bool, small: bool) -> None:
    """The encoder of bench/python as TorchScript; without a mask it attends to padding, too."""
    import torch

    import encoder

    if small:
        encoder.LAYERS, encoder.WIDTH = 2, 96
    class Maskless(encoder.Encoder):
        def forward(self, tokens):
            return super().forward(tokens, torch.ones_like(tokens, dtype=torch.bool))

    torch.manual_seed(0)
    tokens, made = torch.ones(2, 32, dtype=torch.int64), encoder.Encoder() if masked else Maskless()
    torch.jit.save(torch.jit.trace(made.eval(), (tokens, tokens > 0) if masked else (tokens,)), file)


def broker(folder: str, *flags: str) -> tuple[subprocess.Popen, str]:
    socket = os.path.join(folder, "b.sock")
    p = subprocess.Popen([rb.binary_path(), "broker", "--socket", socket, "--log_level", "error", *flags])
    while not os.path.exists(socket) and p.poll() is None:
        time.sleep(0.01)
    return p, socket


def end(*processes: subprocess.Popen) -> None:
    for p in processes:
        p.terminate()
        p.wait(60)


def serve_encoder(socket: str, file: str, name: str, a: argparse.Namespace, *flags: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "ringbatch.serve.torch_cli", file, "--name", name, "--device", a.device]
    command += ["--input", "tokens:i64[<=512]"]
    flags += ("--socket", socket) if a.device == "cpu" else ("--socket", socket, "--half")
    return subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def padding(a: argparse.Namespace, folder: str) -> dict:
    """Which of the four set-ups have buckets; all are started at once."""
    b, socket = broker(folder)
    served, files = {}, {masked: os.path.join(folder, f"{masked}.jit") for masked in ("maskless", "masked")}
    for name, file in files.items():
        make_encoder(file, name == "masked", a.device == "cpu")
        for how, flags in {"graphs": [], "no_cuda_graphs": ["--no_cuda_graphs"]}.items():
            mask = ["--mask", "mask"] if name == "masked" else []
            served[f"{name} {how}"] = serve_encoder(socket, file, f"{name}-{how}", a, "--max_batch_size=8", *mask, *flags)
    buckets = {name: "rounded up" in next((line for line in p.stdout if line.startswith("serving ")), "") for name, p in served.items()}
    end(*served.values(), b)
    return {"buckets": buckets, "right": all(got == name.startswith("masked") for name, got in buckets.items())}


def ask(model: str, socket: str, seed: str) -> None:
    """Asks as a producer process until standard input ends, then prints its counts."""
    stop, choose = threading.Event(), random.Random(seed)
    took: list[float] = []
    gap, failed = [0.0, 0.0], collections.Counter()
    with rb.connect(model, socket=socket, wait=200) as m:
        print("ready", flush=True)
        sys.stdin.readline()
        threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
        last = time.monotonic()
        while not stop.is_set():
            x = np.full(choose.randint(8, 500), 7, "int64") if model == "encoder" else np.full(4, choose.random(), "float32")
            began = time.monotonic()
            try:
                y = m(x, timeout=HEALED_S)
                assert model == "encoder" or (y == 2 * x).all(), "a wrong answer"
            except (rb.Error, AssertionError) as e:
                failed[f"{type(e).__name__}: {str(e).splitlines()[0][:90]}"] += 1
                continue
            now = time.monotonic()
            took.append(now - began)
            gap, last = max(gap, [last, now], key=lambda g: g[1] - g[0]), now
    print(json.dumps({"ok": len(took), "took": sorted(took)[:: max(1, len(took) // 100)], "gap": gap, "failed": failed}), flush=True)


def asking(n: int, model: str, socket: str) -> list[subprocess.Popen]:
    """All are connected when this returns, and have begun."""
    command = [sys.executable, __file__, "--ask", model, socket]
    found = [subprocess.Popen([*command, str(i)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for i in range(n)]
    assert all(p.stdout.readline() == "ready\n" for p in found)
    for p in found:
        print(file=p.stdin, flush=True)
    return found


def answers(found: list[subprocess.Popen]) -> list[dict]:
    for p in found:
        p.stdin.close()
    return [json.loads(p.stdout.read()) for p in found]


def lengths(a: argparse.Namespace, folder: str) -> dict:
    b, socket = broker(folder)
    make_encoder(file := os.path.join(folder, "encoder.jit"), False, a.device == "cpu")
    served = serve_encoder(socket, file, "encoder", a, "--no_buckets", "--max_batch_size=32", "--processes=2")
    found = asking(64, "encoder", socket)
    began = time.monotonic()
    time.sleep(15)
    told, spent = answers(found), time.monotonic() - began  # with the requests that were in flight
    end(served, b)
    took, rate = sorted(t for one in told for t in one["took"]), sum(one["ok"] for one in told) / spent
    failed, p50 = sum(sum(one["failed"].values()) for one in told), took[len(took) // 2] if took else 0
    return {"requests_per_s": round(rate, 1), "p50_ms": round(1e3 * p50, 1), "failed": failed, "before": 47}


def hang(device: str) -> None:
    """A worker of the third part, which doubles its input and never comes back from POISON."""
    import torch

    @rb.worker("m", inputs={"x": ("float32", (4,))}, outputs={"y": ("float32", (4,))}, max_batch_size=8)
    def run(batch):
        x = torch.from_numpy(np.array(batch.inputs["x"])).to(device)
        if (x == POISON).any():
            torch.cuda._sleep(2**62) if device == "cuda" else time.sleep(1000)
        return (2 * x).cpu().numpy()

    run.run(wait=60)


def hung(a: argparse.Namespace, folder: str) -> dict:
    model = '[[model]]\nname = "m"\ninputs = ["x:f32[4]"]\noutputs = ["y:f32[4]"]\nmax_batch_size = 8\nlease = "4s"\n'
    command, config = json.dumps([sys.executable, os.path.abspath(__file__), "--hang", a.device]), Path(folder, "b.toml")
    config.write_text(f"mps = {str(a.device != 'cpu').lower()}\n{model}[[model.worker]]\ncommand = {command}\ninstances = 3\n")
    b, socket = broker(folder, "--config", str(config))

    def workers() -> int:
        models = json.loads(subprocess.check_output([rb.binary_path(), "stats", "--json", "--socket", socket])).get("models") or []
        return sum(len(m.get("workers") or []) for m in models)

    def wait_for_all(until: float) -> float | None:
        while (there := workers()) < 3 and time.monotonic() < until:
            time.sleep(0.1)
        return time.monotonic() if there == 3 else None

    assert wait_for_all(time.monotonic() + HEALED_S), "the workers did not start"
    found = asking(16, "m", socket)
    time.sleep(3)
    began = time.monotonic()
    with rb.connect("m", socket=socket) as m:
        e = m.submit(np.full(4, POISON, "float32"), timeout=HEALED_S).exception()
        poison = f"{type(e).__name__}: {str(e).splitlines()[0][:90]}"
    poison_s, healed = time.monotonic() - began, wait_for_all(began + HEALED_S)
    time.sleep(3)
    told = answers(found)
    end(b)
    failed = sum((collections.Counter(one["failed"]) for one in told), collections.Counter())
    gap = max((one["gap"] for one in told), key=lambda g: g[1] - g[0])
    others = {"ok": sum(one["ok"] for one in told), "failed": sum(failed.values()), "why": dict(failed.most_common(5))}
    times = {"longest_wait_s": gap[1] - gap[0], "poison_s": poison_s, "three_workers_after_s": (healed or math.inf) - began}
    return {"others": others, "poison": poison, **{name: round(s, 1) for name, s in times.items()}}


def main() -> None:
    parts = {"padding": padding, "lengths": lengths, "hung": hung}
    p = argparse.ArgumentParser()
    p.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    p.add_argument("--device", default="cuda")
    a = p.parse_args()
    for name in a.parts or parts:
        with tempfile.TemporaryDirectory(prefix="rb") as folder:
            began, result = time.monotonic(), parts[name](a, folder)
            print(json.dumps({"part": name, **result, "seconds": round(time.monotonic() - began)}), flush=True)


if __name__ == "__main__":
    role = {"--ask": ask, "--hang": hang}.get("".join(sys.argv[1:2]))
    role(*sys.argv[2:]) if role else main()
