# SPDX-License-Identifier: Apache-2.0
"""Producer processes: each sends one item at a time, and the broker makes batches.

    python examples/python/numpy_worker.py &
    python examples/python/producers.py
"""

import multiprocessing as mp
import signal
import sys

import numpy as np
import ringbatch as rb


def produce(seed: int, count: int) -> int:
    rng = np.random.default_rng(seed)
    with rb.connect("classifier", wait=60) as model:  # in each process
        for _ in range(count):
            with model.request() as req:
                rng.standard_normal(dtype="float32", out=req.inputs["x"])  # written in place: no copy
                p = req.run(timeout=30).outputs["p"]
                assert abs(p.sum() - 1) < 1e-3
    return count


if __name__ == "__main__":
    processes, count = (int(a) for a in (sys.argv[1:] or (8, 200)))
    with mp.Pool(processes, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:  # this process has not connected, so it may fork
        total = sum(pool.starmap(produce, [(i, count) for i in range(processes)]))
    with rb.connect("classifier") as model:
        stats = model.stats()
    print(f"{total} requests in {stats['batches']} batches")
