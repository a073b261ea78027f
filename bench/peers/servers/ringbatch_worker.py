# SPDX-License-Identifier: Apache-2.0
"""ringbatch with default settings: wait_time = "auto"."""

import sys

import ringbatch as rb

BYTES = int(sys.argv[1])


@rb.worker(f"sum{BYTES}", inputs={"x": ("float32", (BYTES // 4,))}, outputs={"y": ("float32", (1,))}, max_batch_size=32)
def add(batch):
    return batch.inputs["x"].sum(axis=1, keepdims=True)


add.run(wait=20)
