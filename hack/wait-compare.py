#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hold wait_time auto against fixed waits on real processes, in turns.

Open loop at 5, 20, 50 and 80 % of what the model can do, one JSON per run and a
table of mean latencies at the end; what follows -- goes to bench as it is.

    hack/wait-compare.py out/mlp -- --model_type mlp
    hack/wait-compare.py out/simulated -- --model_type simulated --simulated_fixed 5ms --simulated_item 20us --model_num 3
"""

import argparse
import json
import pathlib
import subprocess
import sys


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=pathlib.Path)
    p.add_argument("--bench", default="bin/bench")
    p.add_argument("--waits", default="auto,0,2ms,10ms")
    p.add_argument("--loads", default="0.05,0.2,0.5,0.8")
    p.add_argument("--seconds", default="2", help="length of a window; each run has three, after one of warm-up")
    p.add_argument("--rounds", type=int, default=1)
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    a = p.parse_args(given[:at])
    model = given[at + 1 :]
    a.out.mkdir(parents=True, exist_ok=True)

    def run(name: str, *flags: str) -> dict:
        path = a.out / f"{name}.json"
        common = ["--duration", a.seconds, "--warmup", "1", "--max_windows", "3", "--stability", "100", "--bound=false"]
        command = [a.bench, *model, *common, *flags, "--json", str(path)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}")
        return json.loads(path.read_text())

    capacity = run("capacity", "--worker_num", "8", "--in_flight", "32", "--wait_time", "auto")["throughput"]
    print(f"capacity {capacity:.0f} requests/s (closed loop, 256 in flight)", flush=True)
    waits = a.waits.split(",")
    table: dict[str, dict[str, list[float]]] = {}
    for load in a.loads.split(","):
        table[load] = {w: [] for w in waits}
        for round_ in range(a.rounds):
            for wait in waits:  # in turns
                r = run(f"{load}-{wait}-{round_}", "--worker_num", "8", "--rate", f"{float(load) * capacity:.1f}", "--wait_time", wait)
                table[load][wait].append(r["latency_ms"]["avg"])
                print(f"load {load}, wait_time {wait}: avg {r['latency_ms']['avg']:.2f} p99 {r['latency_ms']['p99']:.2f} ms, "
                      f"{r['batch_size']['avg']:.1f} rows a batch", flush=True)
    print("\n| load | " + " | ".join(waits) + " | auto / best fixed |\n|" + "---|" * (len(waits) + 2))
    for load, row in table.items():
        mean = {w: sum(x) / len(x) for w, x in row.items()}
        best = min(mean[w] for w in waits if w != "auto") if len(waits) > 1 else 0
        ratio = f"{mean['auto'] / best:.3f}" if best and "auto" in mean else ""
        print(f"| {float(load):.0%} | " + " | ".join(f"{mean[w]:.2f}" for w in waits) + f" | {ratio} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
