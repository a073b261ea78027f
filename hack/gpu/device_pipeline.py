#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A pipeline of three stages whose tensors lie in one ring in device memory, and the same in host memory.

    python3 hack/gpu/device_pipeline.py [--seconds 2]      # with RINGBATCH_BINARY and RINGBATCH_LIBRARY, as hack/gpu/device_ring.py

Producers have images of bytes on the GPU; scale turns them into numbers, sums adds up pieces of them, and check makes two
numbers of the sums. All of it is whole numbers, so every answer is known exactly, and each one is compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time

import ringbatch as rb

SHAPE, PIECES = (3, 224, 224), 147  # pieces of 1,024 numbers
FORMS = 64


def stages(memory: str) -> list[rb.Worker]:
    """The three, with every tensor but the last one there."""
    import torch

    def here(x):
        return x if torch.is_tensor(x) else torch.tensor(x, device="cuda")

    def answer(y, like):
        return y if torch.is_tensor(like) else y.cpu().numpy()

    place = () if memory == "host" else (memory,)

    @rb.worker("scale", inputs={"raw": ("uint8", SHAPE, *place)}, outputs={"x": ("float16", SHAPE, *place)}, max_batch_size=32)
    def scale(batch):
        raw = batch.inputs["raw"]
        batch.outputs["x"][:] = answer(here(raw).half() * 2, raw)

    @rb.worker("sums", inputs={"x": ("float16", SHAPE, *place)}, outputs={"y": ("float32", (PIECES,), *place)}, max_batch_size=32)
    def sums(batch):
        x = batch.inputs["x"]
        batch.outputs["y"][:] = answer(here(x).float().reshape(len(x), PIECES, 1024).sum(2), x)

    @rb.worker("check", inputs={"y": ("float32", (PIECES,), *place)}, outputs={"s": ("float64", (2,))}, max_batch_size=32)
    def check(batch):
        y = here(batch.inputs["y"]).double()
        batch.outputs["s"][:] = torch.stack([y.sum(1), (y * torch.arange(PIECES, device="cuda")).sum(1)], 1).cpu().numpy()

    return [scale, sums, check]


def serve(memory: str) -> None:
    rb.pipeline(f"images-{memory[:6]}", stages(memory), processes=[1, 1, 1], broker=False, slots=512, max_window=64)


def produce(model: str, seconds: float, in_flight: int = 16) -> None:
    import numpy as np
    import torch

    torch.manual_seed(os.getpid())
    images = torch.randint(0, 256, (FORMS, *SHAPE), dtype=torch.uint8, device="cuda")
    y = 2 * images.long().reshape(FORMS, PIECES, 1024).sum(2)
    want = torch.stack([y.sum(1), (y * torch.arange(PIECES, device="cuda")).sum(1)], 1).cpu().numpy()
    done = wrong = sent = 0
    flight = []
    with rb.connect(model, wait=60, window=64) as m, torch.cuda.stream(torch.cuda.Stream()):
        on_device, before = m.inputs[0].on_device, 0
        print("ready", flush=True)
        sys.stdin.readline()
        warm = began = time.monotonic()  # the first to run a kernel loads it
        while flight or time.monotonic() < warm + 1 + seconds:
            if began == warm and time.monotonic() > warm + 1:
                began, before = time.monotonic(), done
            while len(flight) < in_flight and time.monotonic() < warm + 1 + seconds:
                r = m.request()
                if on_device:
                    r.inputs["raw"].copy_(images[sent % FORMS])
                else:
                    torch.from_numpy(np.asarray(r.inputs["raw"])).copy_(images[sent % FORMS])
                r.commit()
                flight.append((r, sent % FORMS))
                sent += 1
            r, form = flight.pop(0)
            r.wait()
            wrong += not (np.asarray(r.outputs["s"]) == want[form]).all()
            r.release()
            done += 1
        print(json.dumps({"done": done, "wrong": wrong, "rate": (done - before) / (time.monotonic() - began)}), flush=True)


def run(memory: str, producers: int, seconds: float, folder: str) -> bool:
    command, model = [sys.executable, __file__, "--memory", memory, "--seconds", str(seconds)], f"images-{memory[:6]}"
    with contextlib.ExitStack() as ending:

        def start(*what: str) -> subprocess.Popen:
            p = subprocess.Popen([*command, *what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            ending.callback(p.wait)
            ending.callback(p.terminate)
            return p

        start("serve")
        running = [start("produce", model) for _ in range(producers)]
        for p in running:
            while (line := p.stdout.readline()) != "ready\n":
                if not line:
                    raise RuntimeError(f"a producer ended with status {p.wait()}")
        for p in running:
            p.stdin.write("go\n")
            p.stdin.flush()
        results = [json.loads(p.stdout.readline()) for p in running]
    done, wrong = sum(r["done"] for r in results), sum(r["wrong"] for r in results)
    rate = sum(r["rate"] for r in results)
    print(f"three stages, {memory}: {producers} producers, {done} requests, {wrong} wrong, {rate:,.0f}/s", flush=True)
    return done > 0 and wrong == 0


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", nargs="*", help=argparse.SUPPRESS)
    p.add_argument("--seconds", type=float, default=2.0)
    p.add_argument("--producers", type=int, default=4)
    p.add_argument("--memory", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.what[:1] == ["serve"]:
        serve(a.memory)
    elif a.what[:1] == ["produce"]:
        produce(a.what[1], a.seconds)
    else:
        with tempfile.TemporaryDirectory(prefix="rb") as folder:
            os.environ["RINGBATCH_SOCKET"] = socket = os.path.join(folder, "b.sock")
            binary = os.environ.get("RINGBATCH_BINARY", "ringbatch")
            broker = subprocess.Popen([binary, "broker", "--socket", socket, "--log_level", "error", "--drain_time", "1s"])
            try:
                return 0 if all([run(memory, a.producers, a.seconds, folder) for memory in ("device:0", "host")]) else 1
            finally:
                broker.terminate()
                broker.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
