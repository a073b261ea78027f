# SPDX-License-Identifier: Apache-2.0
"""app.py on a simulated cluster of three nodes, each with a broker and a worker of
its own, and what it costs beside Serve's own batching with the same model.

    check.py [SECONDS]

It fails if an answer is wrong or missing, if a replica used another node's
ring, or if a node's ring had nothing to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import ray
from app import Classifier
from ray import serve
from ray.cluster_utils import Cluster
from worker import classify

NODES, CALLERS, MILLISECONDS = 3, 64, 5.0
HERE = Path(__file__).resolve().parent


@serve.deployment(ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=64)
class Plain:
    """The same model in the replica itself, batched by Serve."""

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.002)
    async def run(self, rows: list[np.ndarray]) -> list[np.ndarray]:
        x = np.stack(rows)
        return list(await asyncio.to_thread(classify, x, MILLISECONDS))

    async def __call__(self, x: np.ndarray) -> np.ndarray:
        return await self.run(x)


def on_every_node(deployment: serve.Deployment, name: str, per_node: int) -> serve.handle.DeploymentHandle:
    spread = deployment.options(name=name, num_replicas=NODES * per_node, max_replicas_per_node=per_node)
    return serve.run(spread.bind(), name=name, route_prefix=None)


async def load(handle: serve.handle.DeploymentHandle, seconds: float) -> tuple[float, float, float]:
    """Requests/s, and the median and 99th percentile of their times in ms."""
    took: list[float] = []
    end = time.monotonic() + seconds

    async def caller(k: int) -> None:
        n = 0
        while (begin := time.monotonic()) < end:
            x = np.full(64, k * 1000 + n % 1000, np.float32)
            y = await handle.remote(x)
            assert y.shape == (1,) and abs(float(y[0]) - 64 * float(x[0])) < 1, f"{x[0]} became {y}"
            took.append(time.monotonic() - begin)
            n += 1

    await asyncio.gather(*(caller(k) for k in range(CALLERS)))
    took.sort()
    return len(took) / seconds, 1e3 * took[len(took) // 2], 1e3 * took[len(took) * 99 // 100]


def stats(socket: str) -> dict:
    out = subprocess.run(["ringbatch", "stats", "--json"], env={**os.environ, "RINGBATCH_SOCKET": socket}, check=True, capture_output=True, text=True)
    return next(m for m in json.loads(out.stdout)["models"] if m["name"] == "classifier")


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 5
    with contextlib.ExitStack() as ends:
        folder = ends.enter_context(tempfile.TemporaryDirectory())
        sockets = [f"{folder}/{n}.sock" for n in range(NODES)]
        cluster = Cluster()
        ends.callback(cluster.shutdown)
        for socket in sockets:
            env = {**os.environ, "RINGBATCH_SOCKET": socket}
            # It starts the node's broker, too.
            worker = subprocess.Popen([sys.executable, str(HERE / "worker.py"), str(MILLISECONDS)], env=env, stderr=subprocess.DEVNULL)
            ends.callback(worker.wait)
            ends.callback(worker.terminate)
            cluster.add_node(num_cpus=2, object_store_memory=100 << 20, env_vars={"RINGBATCH_SOCKET": socket})
        ray.init(address=cluster.address, runtime_env={"env_vars": {"PYTHONPATH": str(HERE)}}, log_to_driver=False)
        ends.callback(ray.shutdown)
        ends.callback(serve.shutdown)
        kinds = {"ring": on_every_node(Classifier, "ring", 2), "plain": on_every_node(Plain, "plain", 1)}

        async def in_turns() -> dict[str, list[tuple[float, float, float]]]:
            all: dict[str, list[tuple[float, float, float]]] = {name: [] for name in kinds}
            for turn in range(4):
                for name, handle in kinds.items():
                    figures = await load(handle, seconds if turn else 1)  # the first one warms up
                    if turn:
                        all[name].append(figures)
            return all

        for name, figures in asyncio.run(in_turns()).items():
            rate, middle, worst = sorted(figures)[len(figures) // 2]
            print(f"{name:5s}  {rate:6.0f} requests/s, {middle:5.1f} ms median, {worst:5.1f} ms p99")
        for n, socket in enumerate(sockets):
            s = stats(socket)
            print(f"node {n}: {s['clients']} clients, {s['requests']} requests in {s['batches']} batches of {s['rows'] / max(1, s['batches']):.1f}")
            assert s["clients"] == 2, "each node has the two replicas that Ray placed there"
            assert s["requests"] > 0, "every node's ring has work"
            assert not sum(n for status, n in s["ended"].items() if status != "OK"), s["ended"]


if __name__ == "__main__":
    main()
