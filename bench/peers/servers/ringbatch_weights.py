# SPDX-License-Identifier: Apache-2.0
"""The net of weights.py with live weights, in NumPy or, with the argument "torch", in a torch module."""

import sys
from pathlib import Path

import numpy as np
import ringbatch as rb

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from weights import HIDDEN, WIDTH

SIDES = {"inputs": {"x": ("float32", (WIDTH,))}, "outputs": {"y": ("float32", (HIDDEN,))}, "max_batch_size": 32}

if sys.argv[1] == "numpy":

    @rb.worker("numpy", live_weights=True, **SIDES)
    def served(batch):
        w = batch.weights
        h = np.maximum(batch.inputs["x"] @ w["0.weight"].T + w["0.bias"], 0)
        return h @ w["2.weight"].T + w["2.bias"]

else:
    import ringbatch.torch
    import torch

    @rb.worker("torch", **SIDES)
    class served:
        def setup(self):
            self.net = torch.nn.Sequential(torch.nn.Linear(WIDTH, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, HIDDEN))
            ringbatch.torch.follow(self.net)

        def __call__(self, batch):
            with torch.inference_mode():
                return self.net(torch.from_numpy(np.array(batch.inputs["x"])))


served.run(wait=60)
