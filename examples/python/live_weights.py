# SPDX-License-Identifier: Apache-2.0
"""A learner publishes weights while workers serve them: every answer names its version.

    python examples/python/live_weights.py            # a broker and two workers; Ctrl-C ends them
    python examples/python/live_weights.py learn      # in another terminal
"""

import sys

import numpy as np
import ringbatch as rb


@rb.worker("policy", inputs={"x": ("float32", (8,))}, outputs={"y": ("float32", (1,))}, live_weights=True)
def policy(batch):
    w = batch.weights  # of one version, for the whole batch
    return batch.inputs["x"] @ w["w"] + w["b"]


def learn(steps: int = 200) -> None:
    """Fits y = sum(x): the served model answers, the learner corrects its weights."""
    random = np.random.default_rng(0)
    weights = {"w": np.zeros((8, 1), "float32"), "b": np.zeros(1, "float32")}
    with rb.publisher("policy", weights) as publisher:
        publisher.publish(weights)
        with rb.connect("policy") as model:
            for _ in range(steps):
                x = random.standard_normal((8, 8), dtype="float32")
                y, version = model(x, version=True)
                error = y - x.sum(axis=1, keepdims=True)
                assert version >= publisher.version  # never older than the last publish
                weights["w"] -= 0.1 * x.T @ error / len(x)
                weights["b"] -= 0.1 * error.mean(axis=0)
                publisher.publish(weights)
    print(f"version {publisher.version}: the error is {abs(error).max():.4f}")


if __name__ == "__main__":
    learn() if sys.argv[1:] == ["learn"] else rb.serve(policy, processes=2)
