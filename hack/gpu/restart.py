#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Starts `ringbatch torch resnet50:make` again and again: restart.py TIMES PROCESSES [FLAG…], with two processes or more

Prints the seconds from the command to its first answer, until all processes have attached, and from one's death until all have again.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import ringbatch as rb

times, processes, flags = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]


def attached(socket: str) -> set[int]:
    models = json.loads(subprocess.check_output([rb.binary_path(), "stats", "--json", "--socket", socket])).get("models") or []
    return {w["pid"] for m in models for w in m.get("workers") or []}


def all_attached(socket: str, but: int = 0) -> float:
    while len(attached(socket) - {but}) < processes:
        time.sleep(0.05)
    return time.monotonic()


with tempfile.TemporaryDirectory() as folder:
    socket, env = os.path.join(folder, "b.sock"), {**os.environ, "PYTHON": sys.executable}
    command = [rb.binary_path(), "torch", "resnet50:make", "--name", "resnet50", "--input", "x:f16[3,224,224]", "--half", "--channels_last"]
    broker = subprocess.Popen([rb.binary_path(), "broker", "--socket", socket, "--log_level", "error"])
    try:
        for _ in range(times):
            began = time.monotonic()
            served = subprocess.Popen([*command, "--processes", str(processes), "--socket", socket, *flags], env=env)
            try:
                with rb.connect("resnet50", socket=socket, wait=150) as model:
                    model(np.ones((3, 224, 224), "float16"))
                    first = time.monotonic() - began
                started, killed = all_attached(socket) - began, attached(socket).pop()
                os.kill(killed, signal.SIGKILL)
                died = time.monotonic()
                back = all_attached(socket, killed) - died
                print(f"{' '.join(flags)}: first answer after {first:.1f} s, {processes} processes after {started:.1f} s, one that died is back after {back:.1f} s", flush=True)
            finally:
                served.terminate()
                served.wait()
    finally:
        broker.terminate()
        broker.wait()
