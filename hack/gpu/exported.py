#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serves an exported program from two processes on the GPU and compares its answers with the program's own: exported.py FILE.pt2"""

import os
import subprocess
import sys
import tempfile
import time

import numpy as np
import ringbatch as rb
import torch

with tempfile.TemporaryDirectory() as folder:
    socket, env = os.path.join(folder, "b.sock"), {**os.environ, "PYTHON": sys.executable}
    x = np.random.default_rng(0).random((32, 3, 224, 224)).astype("float16")
    broker = subprocess.Popen([rb.binary_path(), "broker", "--socket", socket, "--log_level", "error"])
    began = time.monotonic()
    served = subprocess.Popen([rb.binary_path(), "torch", sys.argv[1], "--name", "resnet50", "--processes", "2", "--socket", socket], env=env)
    try:
        with rb.connect("resnet50", socket=socket, wait=80) as model:
            got = np.stack([r.result() for r in [model.submit(row) for row in x]])
            print(f"answers after {time.monotonic() - began:.1f} s")
        bench = [rb.binary_path(), "bench", "resnet50", "--socket", socket, "--clients", "128", "--seconds", "3"]
        print("\n".join(subprocess.check_output(bench, text=True).splitlines()[:12]))
    finally:
        for p in (served, broker):
            p.terminate()
            p.wait()
with torch.inference_mode():
    want = torch.export.load(sys.argv[1]).module()(torch.from_numpy(x).cuda().contiguous(memory_format=torch.channels_last)).float().cpu().numpy()
difference = np.abs(got.astype("float32") - want).max() / np.abs(want).max()
print(f"answers differ from the program's own by {difference:.2g} of the largest number at most")
