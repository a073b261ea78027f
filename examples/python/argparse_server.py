# SPDX-License-Identifier: Apache-2.0
"""A server with command-line options: python argparse_server.py --scale 3 --processes 2

Worker processes run this script again up to serve, with the same arguments.
Only the worker processes call setup() and load the model.
"""

import argparse

import numpy as np
import ringbatch as rb

parser = argparse.ArgumentParser()
parser.add_argument("--scale", type=float, default=2.0)
parser.add_argument("--processes", type=int, default=1)
args = parser.parse_args()


@rb.worker("scaled", inputs={"x": ("float32", (4,))}, outputs={"y": ("float32", (4,))}, max_batch_size=32, wait_time=0.002)
class Scaler:
    def setup(self):
        self.weights = np.eye(4, dtype="float32") * args.scale  # a real model is loaded here

    def __call__(self, batch):
        return batch.inputs["x"] @ self.weights


if __name__ == "__main__":
    rb.serve(Scaler, processes=args.processes)
