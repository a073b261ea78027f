# SPDX-License-Identifier: Apache-2.0
"""Checks an installed ringbatch: it imports, serves, answers, and runs its command.

    smoke.py VERSION [abi3|none]

The second argument says whether the package must have its extension.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib import metadata

import numpy as np
import ringbatch as rb
from ringbatch.binding import paths

PATIENCE = 120  # seconds; for slow machines, and emulated ones


@rb.worker("double", inputs={"x": ("float32", (4,))}, outputs={"y": ("float32", (4,))}, max_batch_size=32)
def double(batch):
    return 2 * batch.inputs["x"]


def main() -> None:
    version, abi = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    for tool in "go", "gcc", "cc":
        assert not shutil.which(tool), f"{tool} is on PATH: nothing is shown"
    assert rb.__version__ == metadata.version("ringbatch") == version, (rb.__version__, version)
    assert not abi or (paths.quick is not None) == (abi == "abi3"), f"extension: {paths.quick}"
    command = os.path.join(os.path.dirname(sys.executable), "ringbatch")
    said = subprocess.check_output([command, "--version"], text=True)
    assert said.split()[:2] == ["ringbatch", version], said
    with tempfile.TemporaryDirectory(prefix="rb") as folder:
        os.environ["RINGBATCH_SOCKET"] = os.path.join(folder, "run", "b.sock")
        os.mkdir(os.path.join(folder, "run"), 0o700)
        serves_by_itself()
        serves_with_the_command(command)
    interpreter = f"{platform.python_implementation()} {platform.python_version()} {platform.machine()}"
    print(f"{interpreter}, {'extension' if paths.quick else 'ctypes'}: {said.strip()}: works")


def serves_by_itself() -> None:
    server = subprocess.Popen([sys.executable, __file__, "serve"])
    try:
        with rb.connect("double", wait=PATIENCE) as model:
            for i in range(200):
                x = np.full(4, i, np.float32)
                assert (model(x, timeout=PATIENCE) == 2 * x).all()
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(PATIENCE) in (0, 130, -signal.SIGINT)


def serves_with_the_command(command: str) -> None:
    broker = subprocess.Popen([command, "broker", "--log-level", "error"])
    worker = subprocess.Popen([command, "worker", "echo", "--wait", "60s"], stdout=subprocess.DEVNULL)
    try:
        with rb.connect("echo", wait=PATIENCE) as model:
            x = np.arange(16, dtype=np.float32)
            assert (model(x, timeout=PATIENCE) == x).all()
        assert "echo" in subprocess.check_output([command, "stats"], text=True)
    finally:
        worker.terminate()
        broker.terminate()
        assert worker.wait(PATIENCE) == 0
        assert broker.wait(PATIENCE) == 0


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        rb.serve(double)
    else:
        main()
