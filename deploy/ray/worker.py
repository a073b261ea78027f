# SPDX-License-Identifier: Apache-2.0
"""The model, one on each node. A batch takes a fixed time, as on a GPU.

    python worker.py [MILLISECONDS_A_BATCH]
"""

from __future__ import annotations

import sys
import time

import numpy as np
import ringbatch as rb


def classify(x: np.ndarray, milliseconds: float) -> np.ndarray:
    """Computes one batch, with ringbatch and with plain Ray Serve."""
    time.sleep(milliseconds / 1000)
    return x.sum(axis=1, keepdims=True)


def main() -> None:
    milliseconds = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0

    @rb.worker("classifier", inputs={"x": ("float32", (64,))}, outputs={"y": ("float32", (1,))}, max_batch_size=32)
    def run(batch: rb.Batch) -> None:
        batch.outputs["y"][...] = classify(batch.inputs["x"], milliseconds)

    rb.serve(run)


if __name__ == "__main__":
    main()
