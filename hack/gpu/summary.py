#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/gpu.md from what gpu-run.sh left: summary.py FOLDER"""

import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])


def read(name):
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


RUNS = [
    *(
        (name + suffix, what + how)
        for name, what in (
            ("fp32", "fp32, 128 producers, 3 workers, batch 32, wait 10 ms"),
            ("fp16", "fp16 channels_last, 128 producers, 3 workers, batch 32, wait 10 ms"),
            ("small", "fp32, 8 producers, 2 workers, batch 4, wait 3 ms"),
            ("single", "fp32, 1 producer, 1 worker, batch 1"),
        )
        for suffix, how in (("", ""), ("-ahead", ", the next image written meanwhile"), ("-launched", ", no CUDA graphs"), ("-as-is", ", no CUDA graphs, not frozen"))
    ),
    ("mlp-f32", "cuda-mlp f32, 16 producers × 8 in flight, 1 worker, batch 32"),
    ("mlp-f16", "cuda-mlp f16, the same"),
    ("mlp-bf16", "cuda-mlp bf16, the same"),
    ("echo-4-32", "cuda-echo 602,112 bytes, 14 producers × 4 in flight, batch 32"),
    ("echo-8-32", "cuda-echo, × 8 in flight, batch 32"),
    ("echo-8-16", "cuda-echo, × 8 in flight, batch 16, three batches on the GPU"),
]

print("| run | items/s | bound, same run | share | latency avg / p50 / p99, ms | in flight ÷ throughput, ms | bound, ms a batch | rows a batch | errors | stable |")
print("|---|---|---|---|---|---|---|---|---|---|")
for name, what in RUNS:
    r = read(name)
    if r is None:
        continue
    lat, cfg = r["latency_ms"], r["config"]
    little = 1e3 * cfg["worker_num"] * cfg["in_flight"] * cfg["worker_batch"] / r["items_per_s"]
    print(f"| {what} | {r['items_per_s']:,.0f} | {r['bound']['items_per_s']:,.0f} | {100 * r['ratio_to_bound']:.1f} % | "
          f"{lat['avg']:.2f} / {lat['p50']:.2f} / {lat['p99']:.2f} | {little:.2f} ({lat['avg'] / little:.2f} ×) | "
          f"{r['bound']['latency_ms']['avg']:.2f} | {r['batch_size']['avg']:.1f} | {r['errors'] or 'none'} | {r['stable']} |")

on, off = read("mps-on"), read("mps-off")
if on or off:
    print("\n| dtype | batch | processes | images/s with MPS | without |\n|---|---|---|---|---|")
    without = {(r["dtype"], r["batch"], r["processes"]): r["images_per_s"] for r in off or []}
    for r in on or []:
        key = (r["dtype"], r["batch"], r["processes"])
        print(f"| {key[0]} | {key[1]} | {key[2]} | {r['images_per_s']:,} | {without.get(key, 0):,} |")

k = read("kill")
if k:
    print(f"\nKill one of three (fp16): {k['items_per_s_before']:,.0f} images/s before, {k['items_per_s_without_it']:,.0f} with two, "
          f"{k['items_per_s_after']:,.0f} after; the new worker attached after {k['attached_after_s']:.1f} s, 95 % again "
          f"{k['recovered_after_s']:.1f} s after that; {k['requests']:,} requests, {k['requeued']} requeued, errors {k['errors'] or 'none'}.")
