#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare wait_time auto with fixed waits on real processes, in turns.

The workers keep running. In each round every wait has its turn (`ringbatch set`) under the
same arrivals (`ringbatch bench --rate`), at shares of what the model can do. The table has
the mean latency of each wait, and the ratio of auto to the best fixed wait.

    make build && hack/wait-compare.py                        # a simulated model
    hack/wait-compare.py --instances 3 -- python3 -m ringbatch.torch net.pt --input x:f32[3,224,224] --name model

The command after -- is the worker's, of a model named "model".
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time

SIMULATED = ["worker", "simulated", "--name", "model", "--simulated-fixed", "5ms", "--simulated-item", "20us"]


class Stack:
    """A broker and its workers."""

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        self.args = args
        self.env = {**os.environ, "RINGBATCH_SOCKET": os.path.join(folder, "b.sock")}
        self.processes: list[subprocess.Popen] = []

    def start(self) -> None:
        self.processes.append(subprocess.Popen([self.args.ringbatch, "broker", "--log-level", "error"], env=self.env))
        while not os.path.exists(self.env["RINGBATCH_SOCKET"]):
            time.sleep(0.02)
        command = self.args.command or [self.args.ringbatch, *SIMULATED]
        for _ in range(self.args.instances):
            self.processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, env=self.env))
        for _ in range(600):
            if any(p.poll() is not None for p in self.processes):
                break
            models = json.loads(self.ringbatch("stats", "--json"))["models"] or []
            if any(m["name"] == "model" and len(m["workers"]) == self.args.instances for m in models):
                return
            time.sleep(0.2)
        sys.exit(f"{shlex.join(command)}: no model named model with {self.args.instances} workers")

    def stop(self) -> None:
        for p in reversed(self.processes):
            p.terminate()
        for p in reversed(self.processes):
            p.wait(20)

    def ringbatch(self, *arguments: str) -> str:
        return subprocess.run([self.args.ringbatch, *arguments], check=True, stdout=subprocess.PIPE, text=True, env=self.env).stdout

    def bench(self, *flags: str) -> dict:
        load = ["--clients", "8", "--duration", self.args.seconds, "--warmup", "1"]
        return json.loads(self.ringbatch("bench", "model", "--json", *load, *flags))


def compare(stack: Stack, load: float, capacity: float) -> str:
    waits: list[str] = stack.args.waits.split(",")
    means: dict[str, list[float]] = {wait: [] for wait in waits}
    for turn in range(stack.args.rounds):
        for wait in waits[turn % len(waits) :] + waits[: turn % len(waits)]:
            stack.ringbatch("set", "model", f"wait_time={wait}")
            result = stack.bench("--rate", f"{load * capacity:.1f}", "--seed", str(turn + 1))
            means[wait].append(result["latency_ms"]["avg"])
    average = {wait: sum(x) / len(x) for wait, x in means.items()}
    best = min((wait for wait in waits if wait != "auto"), key=lambda wait: average[wait])
    logs = [math.log(a / b) for a, b in zip(means["auto"], means[best])]
    mean = sum(logs) / len(logs)
    error = math.sqrt(sum((x - mean) ** 2 for x in logs) / max(1, len(logs) - 1) / len(logs))
    cells = " | ".join(f"{average[wait]:.2f}" for wait in waits)
    return f"| {load:.0%} | {cells} | {best} | {math.exp(mean):.3f} ± {2 * error:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ringbatch", default="bin/ringbatch")
    parser.add_argument("--waits", default="auto,0,500us,2ms,5ms,10ms")
    parser.add_argument("--loads", default="0.05,0.2,0.5,0.8")
    parser.add_argument("--instances", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", default="2")
    parser.add_argument("command", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rb") as folder:
        stack = Stack(args, folder)
        try:
            stack.start()
            windows = sorted(stack.bench("--in-flight", "32")["windows_items_per_s"])
            columns = ["load", *args.waits.split(","), "best fixed", "auto / best"]
            print(f"| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|")
            for load in args.loads.split(","):
                print(compare(stack, float(load), windows[len(windows) // 2]), flush=True)
        finally:
            stack.stop()


if __name__ == "__main__":
    main()
