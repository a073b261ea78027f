# SPDX-License-Identifier: Apache-2.0
"""The Python package against the Go client, as ratios measured in one run.

    python bench/python/ratios.py [--json FILE] [--only NAME] [--rounds N] [--seconds S]

round_trip   model(x) and request() against the Go client (`ringbatch bench`): 64 bytes, one at a time, a Go worker that echoes
calls        CPU time of a call with timeout=, by name and with retry=, and of request(), beside model(x)
asyncio      32 requests in flight from one process against one at a time
torch        a small PyTorch module on the CPU, one row at a time: ringbatch.torch against @rb.worker (only if torch is installed)
worker       requests/s of a Python worker that does nothing, batch 32, from 8 Go clients with 8 requests in flight each

The two sides of a ratio take turns, and the median of the rounds counts: other load then hits both. Needs the installed package.
`make peers` compares with shared_memory + Queue + semaphore.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import ringbatch as rb

NOTHING = """
import ringbatch as rb

@rb.worker("nothing", inputs={"x": ("float32", (16,))}, outputs={"y": ("float32", (16,))}, max_batch_size=32, wait_time=0.002, slots=4096)
def nothing(batch):
    batch.outputs["y"]

nothing.run(wait=20)
"""

MODULE = """
import ringbatch as rb
import ringbatch.torch
import torch

net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).eval()
"""

SERVED = MODULE + """
ringbatch.torch.serve(net, "served", inputs=["x:f32[256]"], outputs=["y:f32[10]"], device="cpu", wait=20)
"""

WRITTEN = MODULE + """
@rb.worker("written", inputs={"x": ("float32", (256,))}, outputs={"y": ("float32", (10,))})
def written(batch):
    with torch.inference_mode():
        return net(torch.from_numpy(batch.inputs["x"])).numpy()

written.run(wait=20)
"""


@contextlib.contextmanager
def running(*command: str):
    p = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield p
    finally:
        p.terminate()
        p.wait(20)


def echo_worker():
    return running(rb.binary_path(), "worker", "echo", "--wait-time", "0s", "--wait", "20s")


def go_clients(model: str, clients: int, in_flight: int, seconds: float) -> dict:
    flags = {"clients": clients, "in-flight": in_flight, "duration": seconds, "warmup": 0.2}
    return json.loads(subprocess.check_output([rb.binary_path(), "bench", model, "--json", *(f"--{k}={v}" for k, v in flags.items())]))


def median_us(call, seconds: float) -> float:
    took, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter_ns()
        call()
        took.append(time.perf_counter_ns() - start)
    return statistics.median(took) / 1e3


def in_place(m: rb.Model, x: np.ndarray) -> None:
    with m.request() as req:
        req.inputs["x"][...] = x
        req.run().outputs["y"]


def round_trip(rounds: int, seconds: float) -> dict:
    x = np.zeros(16, np.float32)
    times: dict[str, list[float]] = {"go": [], "model(x)": [], "request()": []}
    with echo_worker(), rb.connect("echo", wait=20) as m:
        for _ in range(rounds):
            times["go"].append(1e3 * go_clients("echo", 1, 1, seconds)["latency_ms"]["p50"])
            times["model(x)"].append(median_us(lambda: m(x), seconds))
            times["request()"].append(median_us(lambda: in_place(m, x), seconds))
    against = {name: statistics.median(a / b for a, b in zip(t, times["go"])) for name, t in times.items()}
    us = {name: statistics.median(t) for name, t in times.items()}
    return {"ratio": against["model(x)"], "want": "<= 1.5", "request": against["request()"], "us": us}


def call_forms(rounds: int, seconds: float) -> dict:
    x = np.zeros(16, np.float32)
    with echo_worker(), rb.connect("echo", wait=20) as m, rb.connect("echo", wait=20, retry=True) as retrying:
        forms = {
            "model(x)": lambda: m(x), "timeout=": lambda: m(x, timeout=5.0), "by name": lambda: m(x=x), "retry=": lambda: retrying(x),
            "request()": lambda: in_place(m, x),
        }  # fmt: skip
        us: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(10 * rounds):
            for name, call in forms.items():
                calls, end, began = 0, time.perf_counter() + seconds / 20, time.process_time()
                while time.perf_counter() < end:
                    call()
                    calls += 1
                us[name].append(1e6 * (time.process_time() - began) / calls)
    cost = {name: statistics.median(t) for name, t in us.items()}
    more = {name: t - cost["model(x)"] for name, t in cost.items()}
    return {"ratio": cost["model(x)"] / cost["request()"], "want": ">= 0.8; others <= 3 us more", "more_us": more}


def asyncio_ratio(rounds: int, seconds: float) -> dict:
    x = np.zeros(16, np.float32)
    one: list[float] = []
    many: list[float] = []

    async def rate(m: rb.Model, in_flight: int) -> float:
        end = time.perf_counter() + seconds

        async def loop() -> int:
            calls = 0
            while time.perf_counter() < end:
                await m.ainfer(x)
                calls += 1
            return calls

        return sum(await asyncio.gather(*(loop() for _ in range(in_flight)))) / seconds

    async def main(m: rb.Model) -> None:
        await rate(m, 32)
        for _ in range(rounds):
            one.append(await rate(m, 1))
            many.append(await rate(m, 32))

    with echo_worker(), rb.connect("echo", wait=20, window=32) as m:
        asyncio.run(main(m))
    ratio = statistics.median(a / b for a, b in zip(many, one))
    return {"ratio": ratio, "want": ">= 5", "one_per_s": statistics.median(one), "many_per_s": statistics.median(many)}


def worker_rate(rounds: int, seconds: float) -> dict:
    with running(sys.executable, "-c", NOTHING):
        rb.connect("nothing", wait=20).close()
        results = [go_clients("nothing", 8, 8, seconds) for _ in range(rounds)]
    rate = statistics.median(r["throughput"] for r in results)
    cpu = {k: statistics.median(r["cpu_us_per_request"][k] for r in results) for k in results[0]["cpu_us_per_request"]}
    return {"ratio": rate / 50_000, "want": ">= 1, that is 50,000 requests/s", "requests_per_s": rate, "cpu_us_per_request": cpu}


def torch_worker(rounds: int, seconds: float) -> dict:
    x = np.zeros(256, np.float32)
    us: dict[str, list[float]] = {"served": [], "written": []}
    with contextlib.ExitStack() as stack:
        for code in (SERVED, WRITTEN):
            stack.enter_context(running(sys.executable, "-c", code))
        models = {name: stack.enter_context(rb.connect(name, wait=60)) for name in us}
        for _ in range(rounds):
            for name, m in models.items():
                us[name].append(median_us(lambda m=m: m(x), seconds))
    p50 = {name: statistics.median(t) for name, t in us.items()}
    return {"ratio": p50["served"] / p50["written"], "want": "<= 30 us more", "more_us": p50["served"] - p50["written"], "us": p50}


MEASUREMENTS = {"round_trip": round_trip, "calls": call_forms, "asyncio": asyncio_ratio, "worker": worker_rate}
if importlib.util.find_spec("torch"):
    MEASUREMENTS["torch"] = torch_worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--only", choices=MEASUREMENTS, action="append", help="measure only this (repeatable)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a turn")
    a = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory(prefix="rb") as folder:
        os.environ["RINGBATCH_SOCKET"] = os.path.join(folder, "b.sock")
        with running(rb.binary_path(), "broker", "--log-level", "error"):
            for name in a.only or MEASUREMENTS:
                results[name] = MEASUREMENTS[name](a.rounds, a.seconds)
                print(name, json.dumps(results[name], indent=None), flush=True)
    if a.json:
        Path(a.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
