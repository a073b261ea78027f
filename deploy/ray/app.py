# SPDX-License-Identifier: Apache-2.0
"""Ray Serve replicas as producers of their node's ring.

Ray places, scales and restarts the replicas. A replica holds no model: it puts
its request into the ring of its node, where requests of all replicas of that node
become one batch, and one worker per GPU runs it. On every node run

    ringbatch broker
    ringbatch worker …        # or `python worker.py`, or `ringbatch relay` to GPU hosts

(as a systemd unit, a DaemonSet, or beside `ray start`), then

    serve run app:app
"""

from __future__ import annotations

import numpy as np
import ringbatch as rb
from ray import serve


@serve.deployment(ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=64)
class Classifier:
    def __init__(self) -> None:
        # The node's broker: the socket of RINGBATCH_SOCKET, or the default one.
        self.model = rb.connect("classifier", window=64, wait=30)

    async def __call__(self, x: np.ndarray) -> np.ndarray:
        return await self.model.ainfer(x, timeout=10)

    def __del__(self) -> None:
        self.model.close()


app = Classifier.bind()
