# SPDX-License-Identifier: Apache-2.0
"""A worker in NumPy: softmax(x @ w). Starts a broker if none runs.

    python examples/python/numpy_worker.py            # Ctrl-C ends everything
"""

import numpy as np
import ringbatch as rb

W = np.random.default_rng(0).standard_normal((64, 10), dtype="float32")


@rb.worker("classifier", inputs={"x": ("float32", (64,))}, outputs={"p": ("float32", (10,))}, max_batch_size=32, wait_time=0.002)
def classify(batch):
    scores = batch.inputs["x"] @ W  # all rows of the batch at once
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    batch.outputs["p"][...] = scores / scores.sum(axis=1, keepdims=True)


if __name__ == "__main__":
    rb.serve(classify, processes=2)
