#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ResNet-50 in 1, 2, 4 and 8 processes that feed themselves: mps_table.py FILE OUT.json

Run once with and once without an MPS daemon ($CUDA_MPS_PIPE_DIRECTORY): batch
1 and 32, f32 and f16 (channels last), each process one batch after the other
from pinned memory, launched kernel by kernel.
"""

import json
import multiprocessing as mp
import sys
import time

COUNTS, ROWS, WARM, SECONDS = (1, 2, 4, 8), (1, 32), 0.3, 1.2


def process(path, orders, results):
    for half, rows in iter(orders.get, None):
        measure(path, half, rows, orders, results)


def measure(path, half, rows, orders, results):
    """Runs a window for every beginning that is ordered, until one is 0."""
    import torch
    from ringbatch.torch.alone import alone

    module = torch.jit.load(path, map_location="cuda" if torch.cuda.is_available() else "cpu")
    window = [0.0, 0.0, 0]  # begin, end, batches in between

    def go_on():
        if time.monotonic() < window[1]:
            return True
        results.put(window[2] * rows / SECONDS)  # of the window that is over; at first: ready
        begin = orders.get()
        window[:] = [begin, begin + SECONDS if begin else 0.0, 0]
        return bool(begin)

    def done():
        window[2] += window[0] <= time.monotonic() < window[1]

    spec = f"x:{'f16' if half else 'f32'}[3,224,224]"
    alone(module, [spec], rows, go_on, done, half=half, bfloat16=False, channels_last=half, freeze=True, cuda_graphs=False, depth=1)


def main():
    path, out = sys.argv[1:]
    context = mp.get_context("spawn")
    workers = []
    for _ in range(max(COUNTS)):
        orders, results = context.Queue(), context.Queue()
        context.Process(target=process, args=(path, orders, results), daemon=True).start()
        workers.append((orders, results))
    table = []
    for half in (False, True):
        for rows in ROWS:
            for orders, _ in workers:
                orders.put((half, rows))
            for _, results in workers:
                results.get(timeout=90)
            for n in COUNTS:
                begin = time.monotonic() + WARM
                for orders, _ in workers[:n]:
                    orders.put(begin)
                rate = sum(results.get(timeout=60) for _, results in workers[:n])
                table.append(dict(dtype="float16" if half else "float32", processes=n, batch=rows, images_per_s=round(rate)))
                print(table[-1], flush=True)
            for orders, _ in workers:
                orders.put(0)
    for orders, _ in workers:
        orders.put(None)
    with open(out, "w") as f:
        json.dump(table, f, indent=1)


if __name__ == "__main__":
    main()
