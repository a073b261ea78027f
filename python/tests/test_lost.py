# SPDX-License-Identifier: Apache-2.0
"""A worker process with a dead CUDA context ends at once, and its batches run elsewhere. A stub replaces PyTorch; no GPU is needed."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest
from conftest import broker_at

import ringbatch as rb

DECLARED = ("--model", "m", "--input", "x:f32[4]", "--output", "y:f32[4]", "--max-batch-size", "1", "--wait-time", "0s")

STUB = """
    import sys, types
    errors = []  # the errors of synchronize in turn; the last one repeats; None is no error

    def synchronize(gpu):
        assert gpu == 1  # only GPU 1 has a context
        error = errors.pop(0) if len(errors) > 1 else errors[0] if errors else None
        if error:
            raise RuntimeError(error)

    cuda = types.SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 2, synchronize=synchronize)
    sys.modules["torch"] = types.SimpleNamespace(cuda=cuda, _C=types.SimpleNamespace(_cuda_hasPrimaryContext=lambda gpu: gpu == 1))
"""

FAULTY = """
    import ringbatch as rb

    @rb.worker("m", inputs={"x": ("float32", (4,))}, outputs={"y": ("float32", (4,))})
    def run(batch):
        if (batch.inputs["x"] == 13).any():
            FAULT
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return batch.inputs["x"] + 1
"""

COROUTINE = FAULTY.replace("def run", "async def run")

LANE = """
    import numpy as np
    from ringbatch.worker.lost_gpu import Lost
    from ringbatch.worker.ring import Ring, keep_attached, run as serve, worker_options
    import threading, types

    class Lane:
        def __init__(self, ring):
            self.ring = ring
        def submit(self, batch):
            (x,), (slot, _, _) = self.ring.signature.inputs, batch.runs[0]
            self.poisonous = (self.ring.mapping.rows(x, slot, 1, x.shape) == 13).any()
        def done(self):
            if self.poisonous:
                raise Lost("an illegal memory access was encountered")
            return True
        wait, patience, release = done, lambda self: 0, lambda self: None

    def served(socket):
        stop, options = threading.Event(), worker_options(socket=socket)
        keep_attached(lambda: Ring("m", "x:f32[4] -> y:f32[4]", options), lambda ring: serve(ring, [Lane(ring)], stop), stop)

    run = types.SimpleNamespace(run=served)
"""


@pytest.fixture
def start(at):
    """A function that starts code as a worker process, and returns the process and the socket."""
    processes = []

    def started(*code: str):
        text = "".join(map(textwrap.dedent, code)) + f"\nrun.run(socket={at!r})\n"
        processes.append(subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return processes[-1], at

    with broker_at(at, *DECLARED):
        yield started
        for p in processes:
            p.kill()
            p.communicate()


def x(v):
    return np.full(4, v, "float32")


STICKY = "errors.append('CUDA error: sticky')"
HEALTHY = FAULTY.replace("== 13", "== 99")


@pytest.mark.parametrize(
    "code",
    [(STUB, FAULTY.replace("FAULT", STICKY)), (STUB, COROUTINE.replace("FAULT", STICKY)), (LANE,)],
    ids=["function", "coroutine", "lane"],
)
def test_a_worker_with_a_dead_context_ends_with_its_reason_and_its_batch_runs_elsewhere(start, code):
    worker, socket = start(*code)
    with rb.connect("m", socket=socket, wait=60) as m:
        answer = m.submit(x(13))
        said = worker.communicate(timeout=60)[1]
        assert worker.returncode == 1
        assert f"ringbatch: worker {worker.pid} ends: " in said and ("CUDA error: sticky" in said or "an illegal memory access" in said)
        start(HEALTHY)
        assert (answer.result(60) == 14).all()


@pytest.mark.parametrize("fault", ["pass", "errors.extend(['reported once', None])"])
@pytest.mark.parametrize("function", [FAULTY, COROUTINE])
def test_a_worker_whose_context_lives_fails_the_batch_and_goes_on(start, function, fault):
    worker, socket = start(STUB, function.replace("FAULT", fault))
    with rb.connect("m", socket=socket, wait=60) as m:
        with pytest.raises(rb.Failed, match="an illegal memory access"):
            m(x(13))
        assert (m(x(1)) == 2).all()


def test_a_worker_without_torch_does_not_import_it(start):
    fault = "import sys; assert 'torch' not in sys.modules; raise KeyError('none of it')"
    worker, socket = start(FAULTY.replace("FAULT", fault))
    with rb.connect("m", socket=socket, wait=60) as m:
        for _ in range(2):
            with pytest.raises(rb.Failed, match="none of it"):
                m(x(13))
