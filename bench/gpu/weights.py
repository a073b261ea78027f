#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Live weights of ResNet-50 in fp16, 128 producers, 3 workers: what ten updates a second cost, and how soon all workers have them.

    make gpu-bundle                                       # here: build/gpu
    OUT=results bash bench/gpu/run.sh weights             # on the GPU machine: about two minutes, with MPS

The learner's net is on the GPU. It publishes in device memory, and then, beside new workers, in host memory. Windows
with and without updates take turns. The time until all workers have a version ends when the last has loaded it; its
first answer follows after one batch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

from processes import BINARY, ROOT, processes, start_broker, start_workers, wait_for_all

MODEL, BATCH, WORKERS, EVERY_S = "resnet", 32, 3, 0.1
FLAGS = ["--input", "x:f16[3,224,224]", "--half", "--channels-last", f"--max-batch-size={BATCH}", "--wait-time=0.01", "--live-weights"]


def snapshot() -> tuple[float, int, int]:
    """The time, and the model's answers and batches so far."""
    import ringbatch as rb

    found = next(m for m in rb.stats()["models"] if m["name"] == MODEL)
    return time.monotonic(), found["ended"].get("OK", 0), found["batches"]


def watch() -> None:
    """A process that looks at the version that each worker has loaded, all the time. It prints when all have it, or a later one."""
    from ctypes import addressof, c_size_t, string_at

    from ringbatch.binding.library import load

    lib, out, before, looks = load(), c_size_t(), 0, 0
    while lib.rb_stats(None, 10**9, addressof(out)) == 0:
        text = string_at(out.value)
        lib.rb_free(out.value)
        followers = text[text.index(b'"followers"') :]
        least = min(map(int, re.findall(rb'"version": ?(\d+)', followers[: followers.index(b"]")])))
        if least > before:
            print(time.monotonic(), least, looks, flush=True)
            before = least
        looks += 1


def window(seconds: float, publish) -> tuple[dict, dict[int, float]]:
    """The figures of a window, and when each version was published."""
    began, answers, batches = snapshot()
    begun: dict[int, float] = {}
    took = []
    while publish and (at := time.monotonic()) < began + seconds - EVERY_S:
        begun[publish()] = at
        took.append(1000 * (time.monotonic() - at))
        time.sleep(max(0.0, at + EVERY_S - time.monotonic()))
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    ended, more, later = snapshot()
    row = {"images_per_s": (more - answers) / (ended - began), "batch_ms": WORKERS * 1000 * (ended - began) / (later - batches)}
    return {**row, **({"publish_ms": statistics.median(took)} if took else {})}, begun


def measure(memory: str | None, seconds: float, rounds: int, folder: str) -> dict:
    import resnet50
    import ringbatch as rb

    with processes() as start:
        start_broker(start, folder)
        net = resnet50.make().half().cuda()
        workers = start_workers(start, WORKERS, "resnet50:make", MODEL, "host", *FLAGS)
        with rb.publisher(MODEL, net, memory=memory, wait=120) as publisher:
            publisher.publish(net)
            wait_for_all(workers)
            command = [BINARY, "bench", MODEL, "--clients=1", "--duration=1h", "--json"]
            for _ in range(128):
                start(*command, GOMAXPROCS="2")
            began = time.monotonic()
            while snapshot()[1] < 20_000 and time.monotonic() < began + 60:
                time.sleep(0.1)
            watcher = start(sys.executable, __file__, "--watch")
            rows, begun = [], {}
            for _ in range(rounds):
                for publish in (None, lambda: publisher.publish(net)):
                    row, published = window(seconds, publish)
                    rows.append(row)
                    begun |= published
                    print(json.dumps(row), flush=True)
            watcher.p.terminate()
            looked = [(float(at), int(version), int(looks)) for at, version, looks in map(str.split, watcher.p.stdout)]
            look_ms = 1000 * (looked[-1][0] - looked[0][0]) / (looked[-1][2] - looked[0][2])
    rates = {on: statistics.median(r["images_per_s"] for r in rows if ("publish_ms" in r) == on) for on in (False, True)}
    delays = sorted(1000 * (next(at for at, v, _ in looked if v >= version) - start) for version, start in begun.items())
    found = {
        "memory": memory or "host", "images_per_s": rates[False], "with_updates": rates[True], "share": rates[True] / rates[False],
        "batch_ms": statistics.median(r["batch_ms"] for r in rows), "updates": len(delays),
        "publish_ms": statistics.median(r["publish_ms"] for r in rows if "publish_ms" in r), "look_ms": look_ms,
        "loaded_p50_ms": delays[len(delays) // 2], "loaded_p99_ms": delays[int(0.99 * (len(delays) - 1))], "rows": rows,
    }  # fmt: skip
    print(json.dumps({k: v for k, v in found.items() if k != "rows"}), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a window")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--watch", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.watch:
        return watch()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "bench" / "gpu"), os.environ.get("PYTHONPATH", "")])
    found = []
    for memory in ("device", None):
        with tempfile.TemporaryDirectory(prefix="rb") as folder:
            found.append(measure(memory, a.seconds, a.rounds, folder))
    if a.json:
        Path(a.json).write_text(json.dumps(found, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
