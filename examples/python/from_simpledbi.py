# SPDX-License-Identifier: Apache-2.0
"""The example of SimpleDBI (a ResNet behind a backend, clients that call
Session.forward), rewritten; docs/migrating.md goes through it
line by line. The model here is a stand-in that needs no GPU.

    python examples/python/from_simpledbi.py [producers] [requests of each]
"""

import multiprocessing as mp
import os
import signal
import subprocess
import sys
import time

import numpy as np
import ringbatch as rb


# In SimpleDBI: class Resnet50 with Run(self, input_batch).
@rb.worker(
    "resnet50",
    inputs={"x": ("float32", (3, 64, 64))},
    outputs={"y": ("float32", (8,))},
    max_batch_size=4,  # max_batch_size
    wait_time=0.003,  # wait_time, here in seconds
)
def run(batch):
    images = batch.inputs["x"]  # (n, 3, 64, 64): already a batch, nothing to concatenate
    batch.outputs["y"][...] = images.reshape(len(images), -1)[:, :8] * 2


# In SimpleDBI: the client process with its Session.
def producer(index: int, count: int) -> int:
    with rb.connect("resnet50", wait=60) as session:
        for i in range(count):
            image = np.full((3, 64, 64), index + i, "float32")
            y = session(image)  # session.forward(image)
            assert (y == 2 * (index + i)).all()
    return count


def main(producers: int, count: int) -> None:
    server = subprocess.Popen([sys.executable, os.path.abspath(__file__), "serve"])
    try:
        start = time.monotonic()
        with mp.Pool(producers, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
            total = sum(pool.starmap(producer, [(i, count) for i in range(producers)]))
        print(f"{total} requests, {total / (time.monotonic() - start):.0f} per second with the start")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        rb.serve(run, processes=2)  # in SimpleDBI: the backend with model_num=2
    else:
        main(*(int(a) for a in (sys.argv[1:] or (8, 50))))
