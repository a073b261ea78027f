#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A table of the figures that bench/gpu/run.sh left: summary.py FOLDER"""

import json
import sys
from pathlib import Path

RUNS = {
    "fp32": "fp32, 128 producers, 3 workers, batch 32, wait 10 ms",
    "fp16": "fp16 channels_last, 128 producers, 3 workers, batch 32, wait 10 ms",
    "small": "fp32, 8 producers, 2 workers, batch 4, wait 3 ms",
    "single": "fp32, 1 producer, 1 worker, batch 1",
}

print("| run | items/s | bound, same run | share | latency avg / p50 / p99, ms | bound, ms a batch | rows a batch | errors | stable |")
print("|---|---|---|---|---|---|---|---|---|")
for name, what in RUNS.items():
    path = Path(sys.argv[1], f"{name}.json")
    if not path.exists():
        continue
    r = json.loads(path.read_text())
    lat, bound = r["latency_ms"], r["bound"]
    print(
        f"| {what} | {r['items_per_s']:,.0f} | {bound['items_per_s']:,.0f} | {100 * r['ratio_to_bound']:.1f} % | "
        f"{lat['avg']:.2f} / {lat['p50']:.2f} / {lat['p99']:.2f} | {bound['latency_ms']['avg']:.2f} | "
        f"{r['batch_size']['avg']:.1f} | {r['errors'] or 'none'} | {r['stable']} |"
    )
