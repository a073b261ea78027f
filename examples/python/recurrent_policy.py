# SPDX-License-Identifier: Apache-2.0
"""A recurrent policy: actors share a GRU whose state stays beside their slots, and survives the worker.

    python examples/python/recurrent_policy.py [actors] [steps]

In the middle, actor 0 kills the worker. No actor sees it: the steps run on another worker, with the same state.
"""

import argparse
import concurrent.futures
import multiprocessing as mp
import os
import signal
import sys

import numpy as np
import ringbatch as rb

OBS, HIDDEN, ACTIONS = 16, 64, 4
rng = np.random.default_rng(0)
W, U, OUT = (rng.normal(0, 0.2, shape).astype("float32") for shape in ((3, OBS, HIDDEN), (3, HIDDEN, HIDDEN), (HIDDEN, ACTIONS)))


def gru(x, h):
    update, keep = (1 / (1 + np.exp(-(x @ W[i] + h @ U[i]))) for i in (0, 1))
    return (1 - update) * h + update * np.tanh(x @ W[2] + (keep * h) @ U[2])


@rb.worker("policy", inputs={"obs": ("float32", (OBS,))}, outputs={"logits": ("float32", (ACTIONS,)), "pid": ("int64", ())},
           state={"h": ("float32", (HIDDEN,))}, max_batch_size=32)  # fmt: skip
def policy(batch):
    h = batch.state["h"] = gru(batch.inputs["obs"], batch.state["h"])  # each row has its actor's state
    return {"logits": h @ OUT, "pid": np.full(batch.rows, os.getpid())}


def act(actor: int, steps: int) -> int:
    rng, h, right = np.random.default_rng(actor), np.zeros(HIDDEN, "float32"), 0
    with rb.connect("policy", wait=60) as model, model.sequence() as seq:
        for step in range(steps):
            obs = rng.standard_normal(OBS, "float32")  # of an environment
            answer = seq.step(obs)
            h = gru(obs, h)  # only to compare: the client needs no net
            right += np.allclose(answer["logits"], h @ OUT, atol=1e-4)
            if actor == 0 and step == steps // 2:
                os.kill(int(answer["pid"]), signal.SIGKILL)
            if rng.random() < 0.02:  # the episode ends
                seq.reset()
                h[:] = 0
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Actors share a GRU whose state survives the worker.")
    parser.add_argument("actors", type=int, nargs="?", default=8)
    parser.add_argument("steps", type=int, nargs="?", default=200, help="of each actor")
    a = parser.parse_args()
    server = mp.Process(target=rb.serve, args=(policy,), kwargs={"processes": 2}, daemon=True)
    server.start()
    quiet = (signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends an actor without a traceback
    pool = concurrent.futures.ProcessPoolExecutor(a.actors, initializer=signal.signal, initargs=quiet)
    try:
        right = sum(pool.map(act, range(a.actors), [a.steps] * a.actors))
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        while children := mp.active_children():  # the server and the actors
            for p in children:
                p.terminate()
                p.join(2)
    print(f"{right} of {a.actors * a.steps} steps as in one process, and a worker was killed")
