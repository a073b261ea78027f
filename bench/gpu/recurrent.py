#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Actors with a recurrent policy on the GPU: an LSTM of 512 units whose state stays in device memory.

    make gpu-bundle                                       # here: build/gpu
    OUT=results bash bench/gpu/run.sh recurrent           # on the GPU machine: under a minute

128 Python processes compute 100 µs for each step (a simulated environment that keeps a core busy) and then ask the
policy. The bound is the same processes with random actions. Windows of both take turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from processes import ROOT, processes, start_broker, start_workers, wait_for_all

OBS, UNITS, ACTIONS = 256, 512, 18


def policy():
    import torch

    class Policy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = torch.nn.LSTMCell(OBS, UNITS), torch.nn.Linear(UNITS, ACTIONS)

        def forward(self, obs, h, c):
            h, c = self.cell(obs, (h, c))
            return self.head(h).argmax(1), h, c

    torch.manual_seed(0)
    return Policy().eval()


def simulated_environment(seconds: float) -> None:
    """Keeps a core busy."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def actor(seed: int, step_s: float) -> None:
    """For each line "policy|random begin end" it answers with begin and its steps between begin and end."""
    import numpy as np
    import ringbatch as rb

    obs = np.random.default_rng(seed).random(OBS, "float32")
    with rb.connect("policy", wait=60) as model, model.sequence() as sequence:
        sequence.step(obs)
        print("ready", flush=True)
        for line in sys.stdin:
            kind, begin, end = line.split()
            steps = 0
            while (now := time.monotonic()) < float(end):
                simulated_environment(step_s)
                action = int(sequence.step(obs)) if kind == "policy" else random.randrange(ACTIONS)
                assert 0 <= action < ACTIONS
                steps += now > float(begin)
            print(begin, steps, flush=True)


def measure(roles: dict[str, list], kind: str, seconds: float) -> dict[str, float]:
    """Steps per second, and the CPU time of a step by role, in µs."""
    begin = time.monotonic() + 1
    for p in roles["actors"]:
        p.tell(f"{kind} {begin} {begin + seconds}\n")
    time.sleep(begin - time.monotonic())
    before = {role: sum(p.cpu() for p in some) for role, some in roles.items()}
    time.sleep(begin + seconds - time.monotonic())
    steps = {f"{role}_us": sum(p.cpu() for p in some) - before[role] for role, some in roles.items()}
    count = sum(int(p.wait_for(f"{begin} ").split()[1]) for p in roles["actors"])
    return {"per_s": count / seconds, **{role: round(1e6 * s / count, 1) for role, s in steps.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, default=128)
    parser.add_argument("--step_us", type=float, default=100.0, help="of an actor's own work in each step")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[3, 4])
    parser.add_argument("--max_batch_size", type=int, nargs="+", default=[16])
    parser.add_argument("--memory", default="@device:0", help="of the state; empty: host memory")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--actor", type=int, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.actor is not None:
        return actor(a.actor, a.step_us / 1e6)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "bench" / "gpu"), os.environ.get("PYTHONPATH", "")])
    flags = ["--input", f"obs:f32[{OBS}]", "--output", "action:i64[]"]
    flags += [f"--state={name}:f32[{UNITS}]{a.memory}" for name in "hc"]
    found = []
    for batch, workers in itertools.product(a.max_batch_size, a.workers):
        with tempfile.TemporaryDirectory(prefix="rb") as folder, processes() as start:
            broker = start_broker(start, folder)
            serving = start_workers(start, workers, "recurrent:policy", "policy", "host", *flags, f"--max-batch-size={batch}")
            wait_for_all(serving)
            command = [sys.executable, __file__, f"--step_us={a.step_us}"]
            actors = [start(*command, f"--actor={i}", OMP_NUM_THREADS="1") for i in range(a.actors)]
            wait_for_all(actors)
            roles = {"actors": actors, "workers": serving, "broker": [broker]}
            turns = [[measure(roles, kind, a.seconds) for kind in ("random", "policy")] for _ in range(a.rounds)]
        runs = [{**p, "share": p["per_s"] / r["per_s"], "random_per_s": r["per_s"]} for r, p in turns]
        row = {"max_batch_size": batch, "workers": workers, "runs": runs}
        print(json.dumps(row), flush=True)
        found.append(row)
    if a.json:
        Path(a.json).write_text(json.dumps({"actors": a.actors, "step_us": a.step_us, "rows": found}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
