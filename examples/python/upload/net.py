# SPDX-License-Identifier: Apache-2.0
"""The model of app.py, and its one process: python net.py

Two dense layers in NumPy with random weights, 220 MB: replace Net by your own model.
"""

import os

import numpy as np
import ringbatch as rb

SIDE, CLASSES = 64, 1000
HIDDEN = int(os.environ.get("UPLOAD_HIDDEN", "4096"))  # tests use a small model


class Net:
    def __init__(self):
        rng = np.random.default_rng(0)
        self.first = rng.random((SIDE * SIDE * 3, HIDDEN), "float32") - 0.5
        self.second = rng.random((HIDDEN, CLASSES), "float32") - 0.5

    def __call__(self, pictures):
        x = pictures.reshape(len(pictures), -1).astype("float32") / 255
        return np.maximum(x @ self.first, 0) @ self.second


@rb.worker("pictures", inputs={"picture": ("uint8", (SIDE, SIDE, 3))}, outputs={"scores": ("float32", (CLASSES,))}, max_batch_size=32)
class Worker:
    def setup(self):  # in the worker process only
        self.net = Net()

    def __call__(self, batch):
        return self.net(batch.inputs["picture"])


if __name__ == "__main__":
    rb.serve(Worker)
