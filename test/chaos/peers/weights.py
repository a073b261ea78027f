# SPDX-License-Identifier: Apache-2.0
"""Plays publishers and workers of live weights that die, for test/chaos/weights.go.

    weights.py publisher SOCKET MODEL LABEL AFTER SEED FILE   publishes, and writes each version to the file
    weights.py follower  SOCKET MODEL LABEL AFTER SEED        answers with the least and the most of its weights

They die at the step of the label, after so many versions or batches. Without a label they live until SIGTERM.
Version n is filled with n, or with -n if no worker can load it. Messages are lines of JSON, as testbed.Child writes them.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import struct
import sys
import threading
import time

import numpy as np
import ringbatch as rb
from ringbatch.worker import following

PATIENCE = 100  # seconds
role, socket, model, label, after, seed = sys.argv[1:7]
rng, left = random.Random(seed), int(after)


def tell(name: str, data: object = None) -> None:
    sys.stdout.write(json.dumps({"name": name, "data": data}) + "\n")
    sys.stdout.flush()


def at(step: str) -> None:
    """Dies here, if this is the step of the label and its time has come."""
    if left < 0 and step == label:
        tell("dying", time.time_ns())
        os.kill(os.getpid(), signal.SIGKILL)


def perhaps_within(seconds: float) -> None:
    """Dies at a random instruction of the work that follows."""
    if left < 0 and label == "random":
        tell("dying", time.time_ns())
        signal.setitimer(signal.ITIMER_REAL, rng.random() * seconds + 1e-6)  # SIGALRM ends the process, without any clean-up


def play_publisher(path: str) -> None:
    global left
    file, tensors = os.open(path, os.O_RDWR), {"a": np.zeros(4000, "int64"), "b": np.zeros((), "int64")}
    publisher = rb.publisher(model, tensors, socket=socket, wait=PATIENCE)
    version, bad = rb.stats(socket)["weights"][0]["last"], True  # bad: never two in a row
    while True:
        version, left, bad = version + 1, left - 1, not bad and rng.random() < 0.02
        fill = -version if bad else version
        perhaps_within(0.0004)
        if left < 0 and label in ("half-written", "written"):
            buffer = ctypes.c_void_p()
            if publisher._lib.rb_publish_begin(publisher._handle, -1, ctypes.addressof(buffer)):
                sys.exit("no buffer")
            arrays = publisher._buffers.at(buffer.value).arrays
            arrays["a"][...] = fill
            at("half-written")
            arrays["b"][...] = fill
            at("written")
        for t in tensors.values():
            t[...] = fill
        if (published := publisher.publish(tensors)) != version:
            sys.exit(f"published version {published}, not {version}")
        at("published")
        if not bad:
            os.pwrite(file, struct.pack("q", version), 0)
        time.sleep(max(0.0, rng.random() - 0.5) / 1000)


class Load:
    """Loads positive versions, and counts how often they went back."""

    last = back = loads = 0

    def __call__(self, buffer) -> None:
        self.loads += 1
        if label == "loading" and self.loads > int(after):
            globals()["left"] = -1
            at("loading")
        fill = int(buffer.arrays["b"])
        if fill < 0:
            raise ValueError("negative weights")
        self.back += fill < self.last
        self.last = fill

    def done(self, wait: bool) -> bool:
        return True


@rb.worker(model, inputs={"x": ("int64", (16,))}, outputs={"y": ("int64", (16,))}, live_weights=True, version="any")
class Follower:
    def setup(self) -> None:
        self.load, self.batches = Load(), 0
        following.register(self.load)

    def __call__(self, batch) -> None:
        global left
        left, self.batches = left - 1, self.batches + 1
        at("taken")
        perhaps_within(0.0004)
        seen = []
        for _ in range(500 if self.batches % 64 == 0 else 2):  # publishers pass a slow batch by
            for w in batch.weights.values():
                seen += [w.min(), w.max()]
        batch.outputs["y"][:, 0] = min(seen)
        at("half-written")
        batch.outputs["y"][:, 1:3] = max(seen), self.load.back


if __name__ == "__main__":
    threading.excepthook = lambda *_: None
    if role == "publisher":
        play_publisher(sys.argv[7])
    else:
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        Follower._serve(socket, stop, PATIENCE, lambda: tell("attached"))
