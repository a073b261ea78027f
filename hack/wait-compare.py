#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hold wait_time auto against fixed waits on real processes, in turns.

Open loop at 5, 20, 50 and 80 % of what the model can do; in each round every
wait has its turn, in another order. What is judged is the ratio of mean
latencies, auto against the fixed wait with the best mean, in the same round,
with its 95 % interval over the rounds: a machine that is slower for a while is
so for both. One JSON for each run in OUT, and a table at the end.

    make build && hack/wait-compare.py out                 # the CPU model and the simulated one
    hack/wait-compare.py out --rounds 8 -- --model_type mlp   # what follows -- goes to bench as it is
"""

import argparse
import json
import math
import pathlib
import shlex
import subprocess
import sys
import time

MODELS = {
    "mlp": "--model_type mlp",
    "simulated": "--model_type simulated --simulated_fixed 5ms --simulated_item 20us --model_num 3",
}
LIMIT = 1.03
# 97.5 % quantile of Student's t, by degrees of freedom.
STUDENT = [math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13]


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Geometric mean of ratios and its 95 % interval."""
    logs = [math.log(r) for r in ratios]
    n = len(logs)
    mean = sum(logs) / n
    if n < 2:
        return math.exp(mean), 0.0, math.inf
    deviation = math.sqrt(sum((x - mean) ** 2 for x in logs) / (n - 1))
    t = STUDENT[n - 1] if n <= len(STUDENT) else 2.1
    half = t * deviation / math.sqrt(n)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def verdict(low: float, high: float) -> str:
    if high <= LIMIT:
        return "holds"
    return "worse" if low > LIMIT else "not decided"


class Comparison:
    """One model."""

    def __init__(self, args: argparse.Namespace, name: str, model: list[str]) -> None:
        self.args, self.name, self.model = args, name, model
        self.out: pathlib.Path = args.out / name
        self.out.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, *flags: str) -> dict:
        path = self.out / f"{name}.json"
        common = ["--duration", self.args.seconds, "--warmup", "0.8", "--max_windows", "3", "--stability", "100", "--bound=false"]
        command = [self.args.bench, *self.model, *common, "--worker_num", "8", *flags, "--json", str(path)]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(f"{shlex.join(command)}: exit {done.returncode}\n{done.stdout}")
        return json.loads(path.read_text())

    def compare(self) -> list[str]:
        capacity = self.run("capacity", "--in_flight", "32", "--wait_time", "auto")["throughput"]
        print(f"{self.name}: capacity {capacity:.0f} requests/s (closed loop, 256 in flight)", flush=True)
        waits: list[str] = self.args.waits.split(",")
        fixed = [w for w in waits if w != "auto"]
        lines = []
        for load in self.args.loads.split(","):
            means: dict[str, list[float]] = {w: [] for w in waits}
            tails: dict[str, list[float]] = {w: [] for w in waits}
            for turn in range(self.args.rounds):
                first = turn % len(waits)
                for wait in waits[first:] + waits[:first]:
                    r = self.run(f"{load}-{wait}-{turn}", "--rate", f"{float(load) * capacity:.1f}", "--wait_time", wait)
                    means[wait].append(r["latency_ms"]["avg"])
                    tails[wait].append(r["latency_ms"]["p99"])
                print(f"{self.name}, load {float(load):.0%}, round {turn + 1}: "
                      + ", ".join(f"{w} {means[w][-1]:.2f} ms" for w in waits), flush=True)
            average = {w: sum(x) / len(x) for w, x in means.items()}
            best = min(fixed, key=lambda w: average[w])
            ratio, low, high = interval([a / b for a, b in zip(means["auto"], means[best])])
            tail, *_ = interval([a / b for a, b in zip(tails["auto"], tails[best])])
            lines.append(f"| {self.name} | {float(load):.0%} | " + " | ".join(f"{average[w]:.2f}" for w in waits)
                         + f" | {best} | {ratio:.3f} ({low:.3f}–{high:.3f}) | {tail:.2f} | {verdict(low, high)} |")
        return lines


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=pathlib.Path)
    p.add_argument("--bench", default="bin/bench")
    p.add_argument("--waits", default="auto,0,500us,2ms,10ms", help="auto and at least one other")
    p.add_argument("--loads", default="0.05,0.2,0.5,0.8")
    p.add_argument("--seconds", default="0.5", help="length of a window; each run has three, after 0.8 s of warm-up")
    p.add_argument("--rounds", type=int, default=4, help="at least 2")
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    a = p.parse_args(given[:at])
    waits = a.waits.split(",")
    if "auto" not in waits or len(set(waits)) < 2 or len(set(waits)) < len(waits):
        p.error("--waits must have auto and at least one other, each once")
    if a.rounds < 2:
        p.error("--rounds must be at least 2: an interval needs two")
    models = {name: shlex.split(flags) for name, flags in MODELS.items()}
    if at < len(given):
        models = {"model": given[at + 1 :]}
    began = time.monotonic()
    lines: list[str] = []
    for name, flags in models.items():
        lines += Comparison(a, name, flags).compare()
    print(f"\nmean in ms, {a.rounds} rounds, {time.monotonic() - began:.0f} s; the limit is {LIMIT} × the best fixed wait\n")
    print("| model | load | " + " | ".join(waits) + " | best fixed | auto / best (95 %) | p99 | verdict |")
    print("|" + "---|" * (len(waits) + 6))
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
