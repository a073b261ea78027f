# SPDX-License-Identifier: Apache-2.0
"""Producers that decode JPEGs on every core, ringbatch against the plain multiprocessing way.

    python3 bench/peers/decode.py --model numpy                        # a small model on the CPU
    python3 bench/peers/decode.py --model resnet50 --producers 32      # PyTorch in float16 on a GPU
            [--build old=venv/bin/python] [--rounds 5] [--seconds 3] [--json FILE]

Each producer decodes a 640 x 480 JPEG, scales it to 224 x 224, sends it as float32 and
waits for the answer. It compares every answer with its first one. Plain has one model
process; ringbatch has one worker. The programs take turns; the table shows medians.
Needs numpy and Pillow; torch and torchvision for resnet50.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing as mp
import os
import sys
import time
from pathlib import Path

import busy
import numpy as np
import plain
import processes
from PIL import Image

SHAPE = (3, 224, 224)
CLASSES = {"numpy": 10, "resnet50": 1000}
LEAD_IN_S = 1.0


def photo(seed: int) -> bytes:
    """A JPEG with some detail, different for each producer."""
    small = np.random.default_rng(seed).integers(0, 256, (48, 64, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(small).resize((640, 480), Image.Resampling.BICUBIC).save(out, "JPEG", quality=85)
    return out.getvalue()


def decode(jpeg: bytes) -> np.ndarray:
    image = Image.open(io.BytesIO(jpeg)).resize(SHAPE[1:], Image.Resampling.BILINEAR)
    return np.ascontiguousarray(np.asarray(image, np.float32).transpose(2, 0, 1)) / 255


def numpy_model():
    rng = np.random.default_rng(0)
    first, second = (rng.standard_normal(s, np.float32) / 32 for s in ((3072, 512), (512, CLASSES["numpy"])))
    return lambda x: np.maximum(x.reshape(len(x), -1)[:, ::49] @ first, 0) @ second


def resnet50_model():
    import torch
    import torchvision

    torch.manual_seed(0)
    net = torchvision.models.resnet50(weights=None).eval().cuda().half().to(memory_format=torch.channels_last)

    def run(x: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return net(torch.from_numpy(x).cuda().half().to(memory_format=torch.channels_last)).float().cpu().numpy()

    return run


def plain_model(name: str, blocks: list, tasks, done: list, ready) -> None:
    run = {"numpy": numpy_model, "resnet50": resnet50_model}[name]()
    run(np.zeros((plain.MOST, *SHAPE), np.float32))
    ready.set()
    while True:
        batch = plain.take(tasks, 0.0)
        for i, y in zip(batch, run(np.stack([blocks[i][0] for i in batch]))):
            blocks[i][1][:] = y
            done[i].release()


class Plain:
    """A block of shared memory for each producer, a Queue to the model process, a semaphore back."""

    def __init__(self, name: str, producers: int) -> None:
        context = mp.get_context("fork")
        self.tasks, self.done = context.Queue(), [context.Semaphore(0) for _ in range(producers)]
        sizes = int(np.prod(SHAPE)), CLASSES[name]
        arrays = [[np.frombuffer(context.RawArray("f", n), np.float32) for n in sizes] for _ in range(producers)]
        self.blocks = [(x.reshape(SHAPE), y) for x, y in arrays]
        ready = context.Event()
        context.Process(target=plain_model, args=(name, self.blocks, self.tasks, self.done, ready), daemon=True).start()
        ready.wait()

    def call(self, i: int, x: np.ndarray) -> np.ndarray:
        self.blocks[i][0][:] = x
        self.tasks.put(i)
        self.done[i].acquire()
        return self.blocks[i][1]


def serve(name: str) -> None:
    """The worker of ringbatch."""
    if name == "resnet50":
        import ringbatch.torch
        import torch
        import torchvision

        torch.manual_seed(0)
        net = torchvision.models.resnet50(weights=None).eval()
        options = ringbatch.torch.Options(channels_last=True)
        flags = {"dtype": torch.float16, "options": options, "max_batch_size": plain.MOST, "wait": 60}
        ringbatch.torch.serve(net, "net", inputs=["x:f32[3,224,224]"], **flags)
        return
    import ringbatch as rb

    run = numpy_model()

    @rb.worker("net", inputs={"x": ("float32", SHAPE)}, outputs={"y": ("float32", (CLASSES[name],))}, max_batch_size=plain.MOST)
    def net(batch):
        return run(batch.inputs["x"])

    net.run(wait=20)


def producer(i: int, call, until: float, seconds: float, answers) -> None:
    jpeg = photo(i)
    want = np.array(call(i, decode(jpeg)))
    took = []
    while True:
        x = decode(jpeg)
        begin = time.monotonic()
        got = call(i, x)
        now = time.monotonic()
        if not np.allclose(got, want, rtol=0.02, atol=0.02 * float(np.abs(want).max())):
            answers.put("a wrong answer")
            return
        if now > until:
            break
        if now > until - seconds:
            took.append(now - begin)
    answers.put(took)


def measure(program: str, a: argparse.Namespace) -> None:
    """One turn of one program, in a process by itself."""
    context = mp.get_context("fork")
    if program == "plain":
        make = Plain(a.model, a.producers).call
    else:
        model = None

        def make(i: int, x: np.ndarray) -> np.ndarray:
            nonlocal model
            if model is None:
                import ringbatch as rb

                model = rb.connect("net", wait=120)
            return model(x)

    answers = context.Queue()
    until = time.monotonic() + LEAD_IN_S + 2 + a.seconds
    crowd = [context.Process(target=producer, args=(i, make, until, a.seconds, answers)) for i in range(a.producers)]
    for p in crowd:
        p.start()
    turns = [answers.get(timeout=120) for _ in crowd]
    if any(isinstance(t, str) for t in turns):
        raise SystemExit(f"{program}: {next(t for t in turns if isinstance(t, str))}")
    took = np.sort(np.concatenate([np.array(t) for t in turns])) * 1e3
    p50, p99 = (took[int(len(took) * q)] for q in (0.5, 0.99))
    print(json.dumps({"images_per_s": len(took) / a.seconds, "p50_ms": p50, "p99_ms": p99}), flush=True)
    for p in mp.active_children():
        p.kill()


def main() -> None:
    parser = busy.flags(__doc__, 3.0)
    parser.add_argument("--model", choices=CLASSES, default="numpy")
    parser.add_argument("--producers", type=int, default=2 * (os.cpu_count() or 1))
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.turn == "serve":
        return serve(a.model)
    if a.turn:
        return measure(a.turn, a)
    flags = ["--model", a.model, "--producers", str(a.producers), "--seconds", str(a.seconds)]
    commands = {"plain": ([sys.executable, __file__, "--turn", "plain", *flags], {**os.environ, **processes.ONE_THREAD})}
    with busy.rings(a.build, lambda python: [[python, __file__, "--turn", "serve", "--model", a.model]]) as started:
        commands.update((name, ([python, __file__, "--turn", "ring", *flags], env)) for name, (python, env) in started.items())
        found: dict[str, list[dict]] = {name: [] for name in commands}
        processes.same_priority()
        for r in range(a.rounds):
            for name, (command, env) in commands.items():
                found[name].append(busy.measured(command, env))
            print(f"round {r + 1} of {a.rounds}", file=sys.stderr, flush=True)
    print("| program | images/s | p50 ms | p99 ms |\n|---|---|---|---|")
    for name, turns in found.items():
        m = busy.medians(turns)
        print(f"| {name} | {m['images_per_s']:,.0f} | {m['p50_ms']:.2f} | {m['p99_ms']:.2f} |")
    if a.json:
        Path(a.json).write_text(json.dumps({"cores": os.cpu_count(), "producers": a.producers, "model": a.model, "turns": found}))


if __name__ == "__main__":
    main()
