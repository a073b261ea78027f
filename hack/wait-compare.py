#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hold wait_time auto against fixed waits on real processes, in turns.

Open loop at 5, 20, 50 and 80 % of what the model can do. The workers go on
running: in each round every wait has its turn (`ringbatch set`), in another order,
under the same arrivals (`ringbatch bench --rate`). What is judged is the ratio of
mean latencies, auto against the fixed wait with the best mean, in the same round,
with its 95 % interval over the rounds: a machine that is slower for a while is
so for both. With --goal, half and twice of what the model can do follow, with that
latency_goal and without. One JSON for each run in OUT, and a table at the end.

With --side_by_side the waits do not take turns but run at the same time, each with a
broker and workers of its own on a part of the cores; the waits change hands from round
to round, because one worker may be slower than another for as long as it lives (where its
memory lies). Where others use the machine's memory, too, turns are slow or quick by chance;
side by side all waits are. With --apart each wait has a broker and workers of its own, too,
and all take turns on the whole machine, as those that share a GPU must: what auto has
learned is then of its own turns only.

    make build && hack/wait-compare.py out                       # the CPU model and the simulated one, about 5 minutes
    hack/wait-compare.py out --models mlp --loads 0.2 --rounds 2 # 12 s
    hack/wait-compare.py out --goal 60ms --instances 2 -- python3 -m ringbatch.torch net.pt --input x:f32[3,224,224] --name model

What follows -- is the worker's command, of a model named model.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time

MODELS = {  # the worker's command after "ringbatch", instances
    "mlp": (["worker", "--model", "mlp", "--name", "model"], 1),
    "simulated": (["worker", "--model", "simulated", "--name", "model", "--simulated_fixed", "5ms", "--simulated_item", "20us"], 3),
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


CLOSED_LOOP = ("--in_flight", "32", "--warmup", "1")


def milliseconds(duration: str) -> float:
    number, unit = re.fullmatch(r"([0-9.]+)(us|ms|s)", duration).groups()
    return float(number) * {"us": 0.001, "ms": 1, "s": 1000}[unit]


def median_window(result: dict) -> float:
    return sorted(result["windows_items_per_s"])[1]  # of three


def verdict(low: float, high: float) -> str:
    if high <= LIMIT:
        return "holds"
    return "worse" if low > LIMIT else "not decided"


def table_line(name: str, load: float, waits: list[str], means: dict[str, list[float]], tails: dict[str, list[float]]) -> str:
    average = {w: sum(x) / len(x) for w, x in means.items()}
    best = min((w for w in waits if w != "auto"), key=lambda w: average[w])
    ratio, low, high = interval([a / b for a, b in zip(means["auto"], means[best])])
    tail, *_ = interval([a / b for a, b in zip(tails["auto"], tails[best])])
    return (f"| {name} | {load:.0%} | " + " | ".join(f"{average[w]:.2f}" for w in waits)
            + f" | {best} | {ratio:.3f} ({low:.3f}–{high:.3f}) | {tail:.2f} | {verdict(low, high)} |")  # fmt: skip


class Comparison:
    """One model."""

    def __init__(self, args: argparse.Namespace, name: str, command: list[str], instances: int) -> None:
        self.args, self.name, self.command, self.instances = args, name, command, instances
        self.out: pathlib.Path = args.out / name
        self.out.mkdir(parents=True, exist_ok=True)

    def start(self, *arguments: str) -> subprocess.Popen:
        command = [self.args.ringbatch, *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.env)

    def output(self, started: subprocess.Popen) -> str:
        out, err = started.communicate()
        if started.returncode:
            sys.exit(f"{shlex.join(started.args)}: exit {started.returncode}\n{out}{err}")
        return out

    def ringbatch(self, *arguments: str) -> str:
        return self.output(self.start(*arguments))

    @contextlib.contextmanager
    def running(self):
        """A broker of our own and the workers."""
        with tempfile.TemporaryDirectory(prefix="rb") as folder:  # mode 0700, a short path
            socket = os.path.join(folder, "b.sock")
            self.env = {**os.environ, "RINGBATCH_SOCKET": socket}
            self.processes = processes = []
            try:
                processes.append(subprocess.Popen([self.args.ringbatch, "broker", "--log_level", "error"], env=self.env))
                while not os.path.exists(socket):
                    time.sleep(0.02)
                processes += [subprocess.Popen(self.command, stdout=subprocess.DEVNULL, env=self.env) for _ in range(self.instances)]
                self.attached(processes)
                yield
            finally:
                for p in reversed(processes):
                    p.terminate()
                for p in reversed(processes):
                    p.wait(20)

    def attached(self, processes: list[subprocess.Popen]) -> None:
        for _ in range(600):
            if any(p.poll() is not None for p in processes):
                sys.exit(f"{shlex.join(self.command)}: ended before it served")
            models = json.loads(self.ringbatch("stats", "--json"))["models"] or []
            if any(m["name"] == "model" and len(m["workers"]) == self.instances for m in models):
                return
            time.sleep(0.2)
        sys.exit(f"{shlex.join(self.command)}: no model named model with {self.instances} workers after 120 s")

    def set(self, *settings: str) -> None:
        self.ringbatch("set", "model", *settings)

    def bench(self, name: str, *flags: str) -> dict:
        return self.benched(name, self.start_bench(*flags))

    def start_bench(self, *flags: str) -> subprocess.Popen:
        return self.start("bench", "model", "--json", "--clients", "8", "--seconds", self.args.seconds, "--warmup", self.args.warmup, *flags)

    def benched(self, name: str, started: subprocess.Popen) -> dict:
        text = self.output(started)
        (self.out / f"{name}.json").write_text(text)
        return json.loads(text)

    def pin(self, cores: list[int]) -> None:
        """What runs, and what is started from now on, runs on these cores."""
        for p in self.processes:
            for thread in os.listdir(f"/proc/{p.pid}/task"):
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    os.sched_setaffinity(int(thread), cores)

    def compare(self) -> list[str]:
        with self.running():
            capacity = median_window(self.bench("capacity", *CLOSED_LOOP))
            print(f"{self.name}: capacity {capacity:.0f} requests/s (closed loop, 256 in flight)", flush=True)
            lines = [self.at(float(load), capacity) for load in self.args.loads.split(",") if load]
            if self.args.goal:
                self.goals(capacity)
        return lines

    def at(self, load: float, capacity: float) -> str:
        waits: list[str] = self.args.waits.split(",")
        means: dict[str, list[float]] = {w: [] for w in waits}
        tails: dict[str, list[float]] = {w: [] for w in waits}
        self.set("wait_time=auto")
        self.bench(f"{load}-settling", "--rate", f"{load * capacity:.1f}")  # the load before is forgotten
        for turn in range(self.args.rounds):
            first = turn % len(waits)
            for wait in waits[first:] + waits[:first]:
                self.set(f"wait_time={wait}")
                r = self.bench(f"{load}-{wait}-{turn}", "--rate", f"{load * capacity:.1f}", "--seed", str(turn + 1))
                means[wait].append(r["latency_ms"]["avg"])
                tails[wait].append(r["latency_ms"]["p99"])
            print(f"{self.name}, load {load:.0%}, round {turn + 1}: " + ", ".join(f"{w} {means[w][-1]:.2f} ms" for w in waits), flush=True)
        return table_line(self.name, load, waits, means, tails)

    def goals(self, capacity: float) -> None:
        """Half and twice the capacity, with the goal and without, in turns."""
        for load, turn in itertools.product((0.5, 2), range(self.args.rounds)):
            for goal in (self.args.goal, "0s"):
                self.set("wait_time=auto", f"latency_goal={goal}")
                r = self.bench(f"goal-{goal}-{load}-{turn}", "--rate", f"{load * capacity:.1f}", "--seed", str(turn + 1), "--in_flight", "128")
                ms = r["latency_ms"]
                print(f"{self.name}, {load:.0%} of the capacity, latency_goal {goal}, round {turn + 1}: {r['throughput']:.0f} requests/s answered "
                      f"({r['throughput'] / capacity:.1%} of the capacity), mean {ms['avg']:.1f} ms, p99 {ms['p99']:.1f} ms "
                      f"({ms['p99'] / milliseconds(self.args.goal):.3f} of {self.args.goal}), max {ms['max']:.1f} ms, "
                      f"{r['batch_size']['avg']:.1f} rows a batch, errors {r['errors']}", flush=True)  # fmt: skip


class Stacks:
    """One model, a Comparison for each wait: all at once, or apart."""

    def __init__(self, args: argparse.Namespace, name: str, command: list[str], instances: int) -> None:
        self.args, self.name = args, name
        self.waits: list[str] = args.waits.split(",")
        stacks = self.waits if args.apart else range(1, len(self.waits) + 1)  # side by side the waits change hands
        self.stacks = [Comparison(args, f"{name}-{stack}", command, instances) for stack in stacks]
        cores = sorted(os.sched_getaffinity(0))
        share = len(cores) // len(self.waits)
        self.parts = [cores[i * share : (i + 1) * share] for i in range(len(self.waits))]

    def compare(self) -> list[str]:
        with contextlib.ExitStack() as running:
            for stack, wait in zip(self.stacks, self.waits):
                running.enter_context(stack.running())
                stack.set(f"wait_time={wait}")
            capacities = [median_window(r) for r in self.bench("capacity", *CLOSED_LOOP)]
            capacity = min(capacities)
            how = "in turns" if self.args.apart else "side by side"
            each = ", ".join(f"{c:.0f}" for c in capacities)
            print(f"{self.name}: capacity {capacity:.0f} requests/s (closed loop, 256 in flight, the least of {each} {how})", flush=True)
            return [self.at(float(load), capacity) for load in self.args.loads.split(",") if load]

    def bench(self, name: str, *flags: str, first: int = 0) -> list[dict]:
        """Each stack on its part of the cores, all at once; or apart, from the first given on."""
        if self.args.apart:
            results = {stack.name: stack.bench(name, *flags) for stack in self.stacks[first:] + self.stacks[:first]}
            return [results[stack.name] for stack in self.stacks]
        started = []
        mine = os.sched_getaffinity(0)
        for stack, part in zip(self.stacks, self.parts):
            stack.pin(part)
            os.sched_setaffinity(0, part)  # which the load inherits
            started.append(stack.start_bench(*flags))
        os.sched_setaffinity(0, mine)
        return [stack.benched(name, p) for stack, p in zip(self.stacks, started)]

    def turn(self, name: str, turn: int, *flags: str) -> list[tuple[str, dict]]:
        """Each wait with what came of it."""
        n = turn % len(self.waits)
        if self.args.apart:
            return list(zip(self.waits, self.bench(name, *flags, first=n)))
        waits = self.waits[n:] + self.waits[:n]
        for stack, wait in zip(self.stacks, waits):
            stack.set(f"wait_time={wait}")
        return list(zip(waits, self.bench(name, *flags)))

    def at(self, load: float, capacity: float) -> str:
        rate = ("--rate", f"{load * capacity:.1f}")
        means: dict[str, list[float]] = {w: [] for w in self.waits}
        tails: dict[str, list[float]] = {w: [] for w in self.waits}
        self.bench(f"{load}-settling", *rate)
        for turn in range(self.args.rounds):
            for wait, r in self.turn(f"{load}-{turn}", turn, *rate, "--seed", str(turn + 1)):
                means[wait].append(r["latency_ms"]["avg"])
                tails[wait].append(r["latency_ms"]["p99"])
            print(f"{self.name}, load {load:.0%}, round {turn + 1}: " + ", ".join(f"{w} {means[w][-1]:.2f} ms" for w in self.waits), flush=True)
        line = table_line(self.name, load, self.waits, means, tails)
        print(line, flush=True)
        return line


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=pathlib.Path)
    p.add_argument("--ringbatch", default="bin/ringbatch")
    p.add_argument("--models", default=",".join(MODELS), help="which of " + ", ".join(MODELS))
    p.add_argument("--instances", type=int, default=1, help="how many workers the command after -- is started as")
    p.add_argument("--waits", default="auto,0,500us,2ms,10ms", help="auto and at least one other")
    p.add_argument("--loads", default="0.05,0.2,0.5,0.8", help="of the capacity; empty: none")
    p.add_argument("--goal", help="at last, half and twice the capacity with this latency_goal, such as 60ms, and without")
    p.add_argument("--seconds", default="1.5", help="length of a turn")
    p.add_argument("--warmup", default="0.5", help="seconds of load before that")
    p.add_argument("--side_by_side", action="store_true", help="all waits at the same time, each on its part of the cores")
    p.add_argument("--apart", action="store_true", help="a broker and workers for each wait, in turns")
    p.add_argument("--rounds", type=int, default=4, help="at least 2")
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    a = p.parse_args(given[:at])
    waits = a.waits.split(",")
    if "auto" not in waits or len(set(waits)) < 2 or len(set(waits)) < len(waits):
        p.error("--waits must have auto and at least one other, each once")
    if a.apart and (a.goal or a.side_by_side):
        p.error("--apart has no --goal, and not --side_by_side")
    if a.side_by_side and (a.goal or len(os.sched_getaffinity(0)) < len(waits)):
        p.error("--side_by_side needs a core for each wait, and has no --goal")
    if a.rounds < 2:
        p.error("--rounds must be at least 2: an interval needs two")
    unknown = [name for name in a.models.split(",") if name not in MODELS]
    if unknown:
        p.error(f"--models: no model {unknown[0]}; there are {', '.join(MODELS)}")
    models = {name: ([a.ringbatch, *MODELS[name][0]], MODELS[name][1]) for name in a.models.split(",")}
    if at < len(given):
        models = {"model": (given[at + 1 :], a.instances)}
    began = time.monotonic()
    lines: list[str] = []
    for name, (command, instances) in models.items():
        lines += (Stacks if a.side_by_side or a.apart else Comparison)(a, name, command, instances).compare()
    print(f"\nmean in ms, {a.rounds} rounds, {time.monotonic() - began:.0f} s; the limit is {LIMIT} × the best fixed wait\n")
    print("| model | load | " + " | ".join(waits) + " | best fixed | auto / best (95 %) | p99 | verdict |")
    print("|" + "---|" * (len(waits) + 6))
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
