# SPDX-License-Identifier: Apache-2.0
"""SimpleDBI's design, without its parts that this comparison does not use.

    python simpledbi.py --bytes 64 --clients 8 --seconds 2 --wait_ms 2

SimpleDBI is not on PyPI, so this is our own code for its design. A client has a
block of shared memory and a Pipe to a backend process. The backend has a thread for
every client, a batcher thread that concatenates inputs into one of three shared blocks,
a thread that hands the block to the model process over a Pipe, and a thread that scatters
the outputs. The client's thread copies its row into the client's block and answers
over the Pipe. One model process, batches up to 32.
"""

from __future__ import annotations

import multiprocessing as mp
import queue
import threading

import numpy as np
import load
from plain import MOST, arguments, block, take

BATCHES = 3  # shared blocks of whole batches: one is filled while another is computed


def model_process(inputs: list, output: np.ndarray, conn) -> None:
    while True:
        i, rows = conn.recv()
        output[:rows] = inputs[i][:rows].sum(axis=1, keepdims=True)
        conn.send(rows)


class Backend:
    """Runs in its own process."""

    def __init__(self, pairs: list, conns: list, inputs: list, output: np.ndarray, model, wait: float) -> None:
        self.pairs, self.conns, self.inputs, self.output, self.model, self.wait = pairs, conns, inputs, output, model, wait
        self.arrived: queue.Queue = queue.Queue()
        self.batched: queue.Queue = queue.Queue(maxsize=BATCHES)
        self.computed: queue.Queue = queue.Queue()
        self.free: queue.Queue = queue.Queue()
        self.answers = [queue.Queue(maxsize=1) for _ in conns]
        for i in range(BATCHES):
            self.free.put(i)

    def run(self) -> None:
        jobs = [self.batcher, self.model_handler, self.scatter, *(lambda i=i: self.client(i) for i in range(len(self.conns)))]
        threads = [threading.Thread(target=j, daemon=True) for j in jobs]
        for t in threads:
            t.start()
        for t in threads:
            t.join()

    def client(self, i: int) -> None:
        conn, answer = self.conns[i], self.pairs[i][1]
        while True:
            conn.recv()
            self.arrived.put(i)
            answer[:] = self.answers[i].get()
            conn.send(True)

    def batcher(self) -> None:
        while True:
            batch = take(self.arrived, self.wait)
            b = self.free.get()
            np.concatenate([self.pairs[i][0] for i in batch], out=self.inputs[b][: len(batch)])
            self.batched.put((b, batch))

    def model_handler(self) -> None:
        while True:
            b, batch = self.batched.get()
            self.model.send((b, len(batch)))
            rows = self.model.recv()
            outputs = self.output[:rows].copy()
            self.free.put(b)
            self.computed.put((batch, outputs))

    def scatter(self) -> None:
        while True:
            batch, outputs = self.computed.get()
            for row, i in enumerate(batch):
                self.answers[i].put(outputs[row])


def measure(size: int, clients: int, seconds: float, wait: float, computes: float = 0.0) -> dict:
    context = mp.get_context("fork")
    pairs = [block(context, size) for _ in range(clients)]
    inputs = [np.frombuffer(context.RawArray("B", MOST * size), np.float32).reshape(MOST, size // 4) for _ in range(BATCHES)]
    output = np.frombuffer(context.RawArray("B", MOST * 4), np.float32).reshape(MOST, 1)
    ours, theirs = zip(*(context.Pipe() for _ in range(clients)))
    near, far = context.Pipe()
    backend = Backend(pairs, list(theirs), inputs, output, near, wait)
    processes = [context.Process(target=model_process, args=(inputs, output, far), daemon=True),
        context.Process(target=backend.run, daemon=True)]
    for p in processes:
        p.start()

    def make(i: int, x: np.ndarray):
        mine, answer = pairs[i]
        conn = ours[i]

        def call() -> float:
            mine[0] = x
            conn.send(1)
            conn.recv()
            return answer[0]

        return call

    try:
        return load.measure(make, size, clients, seconds, computes)
    finally:
        for p in processes:
            p.kill()
            p.join()


if __name__ == "__main__":
    arguments(__doc__, measure)
