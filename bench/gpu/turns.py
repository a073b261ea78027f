#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two models of 60 % of a GPU's budget each, which must take turns: never above the budget, no request lost, nothing left when idle.

    make gpu-bundle                                       # here: build/gpu
    OUT=results bash bench/gpu/run.sh turns               # on the GPU machine: about four minutes, with MPS

Once with the memory of the models declared, once measured by the broker. Two clients ask in bursts while nvidia-smi
is sampled. Then each model is woken with free room; at last nobody asks, and the host must be idle.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from processes import ROOT, processes, start_broker

BUDGET_GIB, EACH_GIB, CONTEXT_GIB, MODELS = 40, 24, 1, ("one", "two")
HELD = []  # a worker's memory besides its net and CUDA's context


def net():
    """The worker's module."""
    import torch

    if torch.cuda.is_available():
        HELD.append(torch.empty((EACH_GIB - CONTEXT_GIB) << 30, dtype=torch.uint8, device="cuda"))
    return torch.nn.Linear(256, 256).eval()


def nvidia_smi(query: str) -> list:
    """The last column, in MiB."""
    out = subprocess.run(["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True).stdout
    columns = [line.split(",")[-1].strip() for line in out.splitlines()]
    return [int(x) for x in columns if x.isdigit()]


def used() -> int:
    return nvidia_smi("--query-gpu=memory.used")[0]


def by_process() -> list:
    return nvidia_smi("--query-compute-apps=pid,used_memory")


def ask_in_bursts(model, x, seed: int, end: float, found: dict) -> None:
    rng = random.Random(seed)
    while time.monotonic() < end:
        burst = time.monotonic() + rng.uniform(1, 4)
        while (began := time.monotonic()) < min(burst, end):
            try:
                model(x, timeout=120)
                found["answers"] += 1
            except Exception as e:
                found["failed"].append(repr(e))
            found["longest_s"] = max(found["longest_s"], time.monotonic() - began)
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 5))


def measure(seconds: float, declared: bool, folder: str) -> dict:
    import numpy as np
    import ringbatch as rb

    command = [sys.executable, "-m", "ringbatch.torch", "turns:net", "--input", "x:f32[256]", "--output", "y:f32[256]"]
    text = f'[[gpu]]\nnumber = 0\nmemory = "{BUDGET_GIB}GiB"\n'
    for name in MODELS:
        text += f'[[model]]\nname = "{name}"\ninputs = ["x:f32[256]"]\noutputs = ["y:f32[256]"]\nidle = "3s"\n[[model.worker]]\n'
        text += f"command = {json.dumps(command)}\ngpus = [0]\ninstances = [0, 1]\n" + declared * f'memory = "{EACH_GIB}GiB"\n'
    Path(folder, "ringbatch.toml").write_text(text)

    def wait_until_asleep() -> None:
        while any(m["staffing"]["state"] != "asleep" for m in rb.stats()["models"]):
            time.sleep(0.1)

    def sample() -> None:
        while not over.wait(0.2):
            found["most_mib"] = max(found["most_mib"], used() - before)
            found["largest_process_mib"] = max([found["largest_process_mib"], *by_process()])

    found = {"declared": declared, "budget_mib": BUDGET_GIB << 10, "most_mib": 0, "largest_process_mib": 0, "answers": 0, "failed": [],
        "longest_s": 0.0, "first_answers_ms": []}  # of a model that slept, and its start as the broker saw it  # fmt: skip
    before, over, x = used(), threading.Event(), np.ones(256, "float32")
    with processes() as start:
        broker = start_broker(start, folder, "--config", str(Path(folder, "ringbatch.toml")))
        models, end = {name: rb.connect(name, wait=60) for name in MODELS}, time.monotonic() + seconds
        threads = [threading.Thread(target=ask_in_bursts, args=(m, x, i, end, found), daemon=True) for i, m in enumerate(models.values())]
        threads.append(threading.Thread(target=sample, daemon=True))
        for t in threads:
            t.start()
        for t in threads[:-1]:
            t.join()
        for name in 2 * MODELS:
            wait_until_asleep()
            began = time.monotonic()
            models[name](x, timeout=120)
            took = 1000 * (time.monotonic() - began)
            time.sleep(0.2)
            found["first_answers_ms"].append([round(took), round(models[name].stats()["staffing"]["wake_ms"])])
        over.set()
        threads[-1].join()
        wait_until_asleep()
        found["staffing"] = [m["staffing"] for m in rb.stats()["models"]]
        time.sleep(2)
        cpu, began = broker.cpu(), time.monotonic()
        time.sleep(seconds / 3)
        found["idle_core_percent"] = 100 * (broker.cpu() - cpu) / (time.monotonic() - began)
        found.update(idle_workers=len(rb.stats()["processes"]), idle_mib=used() - before, idle_processes=by_process())
    found["kept"] = found["most_mib"] <= found["budget_mib"]
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the clients in turns; a third of it is the idle host's")
    parser.add_argument("--json", metavar="FILE")
    a = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "bench" / "gpu"), os.environ.get("PYTHONPATH", "")])
    found = []
    for declared in (True, False):
        with tempfile.TemporaryDirectory(prefix="rb") as folder:
            found.append(measure(a.seconds, declared, folder))
    if a.json:
        Path(a.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
