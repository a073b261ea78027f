#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lanes against whole batches, and against a loop that feeds itself: a greedy decoder whose rows differ in length.

    python bench/python/lanes.py                    # a GRU in NumPy
    python bench/python/lanes.py --device cuda      # a transformer of 0.1 B in torch: static cache, CUDA graph; cpu: a small one
            [--clients 64] [--rounds 3] [--seconds 3] [--json FILE]

Lengths are log-normal, and the model's cost is the same for each round of 32 lanes. `loop` is the model alone: it has the next row
at hand whenever a lane is free. `lanes` is a worker with lanes, `whole` the same model with batches of 32, which end with their
longest row. The three take turns; medians of the rounds. A round's cost beyond `step` is measured inside the worker with lanes.
Needs the installed package.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")  # before NumPy reads them
import numpy as np  # noqa: E402

LANES, MOST, MEDIAN, SIGMA = 32, 256, 24, 0.75
TENSORS = {"inputs": {"n": ("int32", (2,))}, "outputs": {"text": ("int32", (f"<={MOST}",))}}


def rows(seed: int):
    """Endless rows: the first token, and the length."""
    rng = np.random.default_rng(seed)
    while True:
        for length in np.clip(rng.lognormal(np.log(MEDIAN), SIGMA, 256), 1, MOST).astype(np.int32):
            yield np.array([rng.integers(256), length], np.int32)


class Gru:
    """One step of a GRU and its argmax, for all lanes."""

    def __init__(self, units: int = 384) -> None:
        rng = np.random.default_rng(0)
        self.h, self.token = np.zeros((LANES, units), np.float32), np.zeros(LANES, np.intp)
        self.w, self.u, self.v = (rng.normal(0, 0.1, s).astype(np.float32) for s in ((256, 3 * units), (units, 3 * units), (units, 256)))

    def begin(self, lanes: np.ndarray, first: np.ndarray) -> None:
        self.h[lanes], self.token[lanes] = 0, first

    def round(self) -> np.ndarray:
        n = self.h.shape[1]
        a, b = self.w[self.token], self.h @ self.u
        gates = 1 / (1 + np.exp(-(a[:, : 2 * n] + b[:, : 2 * n])))
        self.h = gates[:, :n] * self.h + (1 - gates[:, :n]) * np.tanh(a[:, 2 * n :] + gates[:, n:] * b[:, 2 * n :])
        self.token = (self.h @ self.v).argmax(1)
        return self.token.astype(np.int32)


class Transformer:
    """A decoder with a static cache for all lanes; on a GPU a round is one CUDA graph."""

    def __init__(self, device: str) -> None:
        import torch

        layers, width, heads, words = (12, 768, 12, 32000) if device == "cuda" else (2, 64, 4, 256)
        self.torch, dtype = torch, torch.bfloat16 if device == "cuda" else torch.float32
        torch.manual_seed(0)
        size = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
        made = {"device": device, "dtype": dtype}
        net = [{name: torch.randn(s, **made) / s[0] ** 0.5 for name, s in size.items()} for _ in range(layers)]
        embed, places = torch.randn(words, width, **made), torch.randn(MOST + 1, width, **made)
        keys, values = (torch.zeros(layers, LANES, heads, MOST + 1, width // heads, **made) for _ in range(2))
        self.token, self.at = (torch.zeros(LANES, dtype=torch.long, device=device) for _ in range(2))
        lane, head, place = (torch.arange(n, device=device) for n in (LANES, heads, MOST + 1))
        self.weights = sum(t.numel() for layer in net for t in layer.values()) + embed.numel()

        def step() -> None:
            x = embed[self.token] + places[self.at]
            here = (lane[:, None], head[None], self.at[:, None])
            seen = (place <= self.at[:, None])[:, None, None, :]
            for k, layer in enumerate(net):
                q, key, value = (torch.nn.functional.layer_norm(x, (width,)) @ layer["qkv"]).view(LANES, 3, heads, -1).unbind(1)
                keys[k].index_put_(here, key)
                values[k].index_put_(here, value)
                y = torch.nn.functional.scaled_dot_product_attention(q[:, :, None], keys[k], values[k], attn_mask=seen)
                x = x + y.reshape(LANES, width) @ layer["out"]
                x = x + torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, (width,)) @ layer["up"]) @ layer["down"]
            self.token.copy_((torch.nn.functional.layer_norm(x, (width,)) @ embed.T).argmax(1))
            self.at.add_(1).clamp_(max=MOST)

        self.step = self._graph(step) if device == "cuda" else step

    def _graph(self, step):
        torch = self.torch
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def begin(self, lanes: np.ndarray, first: np.ndarray) -> None:
        at = self.torch.from_numpy(lanes).to(self.token.device)
        self.token[at], self.at[at] = self.torch.from_numpy(first.astype(np.int64)).to(self.token.device), 0

    def round(self) -> np.ndarray:
        with self.torch.inference_mode():
            self.step()
            return self.token.to(self.torch.int32).cpu().numpy()


def network(device: str):
    return Gru() if device == "numpy" else Transformer(device)


class Decoder:
    """The worker with lanes. It notes the time between two steps, by the rows that left and came."""

    def __init__(self, device: str) -> None:
        self.device, self.gaps = device, {}
        self.left, self.came, self.gone, self.starting, self.ended = np.zeros(LANES, np.int32), 0, 0, 0.0, 0.0

    def setup(self) -> None:
        self.net = network(self.device)

    def start(self, lanes, rows) -> None:
        began = time.perf_counter()
        self.net.begin(lanes, rows.inputs["n"][:, 0])
        self.left[lanes] = rows.inputs["n"][:, 1]
        self.came += len(lanes)
        self.starting += time.perf_counter() - began

    def step(self, lanes):
        gap = time.perf_counter() - self.ended - self.starting
        if self.ended and len(lanes) > LANES // 2:
            self.gaps.setdefault((self.gone, self.came), []).append(gap)
        text = self.net.round()
        self.left[lanes] -= 1
        done = self.left <= 0
        self.came, self.starting, self.gone = 0, 0.0, int(done[lanes].sum())
        self.ended = time.perf_counter()
        return {"text": text}, done


class Whole:
    """The same network with whole batches."""

    def __init__(self, device: str) -> None:
        self.device = device

    def setup(self) -> None:
        self.net = network(self.device)

    def __call__(self, batch):
        n = batch.inputs["n"]
        self.net.begin(np.arange(len(n)), n[:, 0])
        text = np.stack([self.net.round()[: len(n)] for _ in range(n[:, 1].max())], 1)
        return [row[:length] for row, length in zip(text, n[:, 1])]


def loop(device: str, asked) -> None:
    """The network alone. For each number of seconds it answers with its rows."""
    net, left, some = network(device), np.zeros(LANES, np.int32), rows(1)
    net.round()
    asked.send("ready")
    while seconds := asked.recv():
        count, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            free = np.flatnonzero(left <= 0)
            if free.size:
                new = np.stack([next(some) for _ in free])
                net.begin(free, new[:, 0])
                left[free] = new[:, 1]
            net.round()
            left -= 1
            count += int((left <= 0).sum())
        asked.send(count / seconds)


def server(name: str, device: str, asked) -> None:
    import ringbatch as rb

    made = {"lanes": Decoder, "whole": Whole}[name](device)
    how = {"lanes": {"lanes": LANES}, "whole": {"max_batch_size": LANES}}[name]
    worker, stop = rb.worker(name, **TENSORS, slots=1024, **how)(made), threading.Event()
    threading.Thread(target=lambda: (asked.recv(), stop.set()), daemon=True).start()
    worker.run(stop=stop, wait=60)
    asked.send({f"{gone} out, {came} in": (statistics.median(g) * 1e6, len(g)) for (gone, came), g in getattr(made, "gaps", {}).items()})


def client(seed: int, asked) -> None:
    """For each (model, begin, end) it answers with its calls' times between the two."""
    import ringbatch as rb

    some = rows(100 + seed)
    with rb.connect("lanes", wait=120, window=1) as lanes, rb.connect("whole", wait=120, window=1) as whole:
        asked.send("ready")
        while turn := asked.recv():
            model, took, now = {"lanes": lanes, "whole": whole}[turn[0]], [], 0.0
            while now < turn[2]:
                row, began = next(some), time.monotonic()
                text = model(row)
                now = time.monotonic()
                assert len(text) == row[1], "an answer of another length"
                if turn[1] < now < turn[2]:
                    took.append(now - began)
            asked.send(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["numpy", "cpu", "cuda"], default="numpy")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", metavar="FILE")
    a = parser.parse_args()
    import ringbatch as rb

    context, found = mp.get_context("fork"), {"loop": [], "lanes": [], "whole": []}
    with tempfile.TemporaryDirectory(prefix="rb") as folder, contextlib.ExitStack() as stack:
        os.environ["RINGBATCH_SOCKET"] = os.path.join(folder, "b.sock")
        broker = context.Process(target=os.execv, args=(rb.binary_path(), [rb.binary_path(), "broker", "--log-level", "error"]))
        processes = [broker]

        def started(target, *args):
            mine, its = context.Pipe()
            processes.append(context.Process(target=target, args=(*args, its), daemon=True))
            processes[-1].start()
            return mine

        broker.start()
        stack.callback(lambda: [p.terminate() for p in processes])
        servers = {name: started(server, name, a.device) for name in ("lanes", "whole")}
        bound = started(loop, a.device)
        crowd = [started(client, i) for i in range(a.clients)]
        for p in (bound, *crowd):
            p.recv()
        for turn in range(a.rounds + 1):  # the first one warms up
            bound.send(a.seconds)
            rows_per_s = bound.recv()
            if turn:
                found["loop"].append({"rows_per_s": rows_per_s})
            for name in servers:
                begin = time.monotonic() + 1
                for p in crowd:
                    p.send((name, begin, begin + a.seconds))
                took = np.sort(np.concatenate([p.recv() for p in crowd])) * 1e3
                if not turn:
                    continue
                if not len(took):
                    raise SystemExit(f"{name}: no answer in {a.seconds} s: take longer, --seconds")
                p50, p99 = (float(took[int(len(took) * q)]) for q in (0.5, 0.99))
                found[name].append({"rows_per_s": len(took) / a.seconds, "p50_ms": p50, "p99_ms": p99})
        for p in servers.values():
            p.send(None)
        gaps = servers["lanes"].recv()
    rate = {name: statistics.median(t["rows_per_s"] for t in turns) for name, turns in found.items()}
    out = {
        "device": a.device, "clients": a.clients, "rows_per_s": rate, "lanes_over_whole": rate["lanes"] / rate["whole"],
        "lanes_over_loop": rate["lanes"] / rate["loop"], "turns": found,
        "us_beyond_step": {name: us for name, (us, n) in sorted(gaps.items()) if n >= 20},
    }  # fmt: skip
    print(json.dumps({**out, "turns": None}))
    for name, turns in found.items():
        p = [statistics.median(t[k] for t in turns) for k in ("p50_ms", "p99_ms")] if name != "loop" else ["", ""]
        print(f"| {name} | {rate[name]:,.0f} | {p[0]:.3} | {p[1]:.4} |" if p[0] else f"| {name} | {rate[name]:,.0f} | | |")
    if a.json:
        Path(a.json).write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
