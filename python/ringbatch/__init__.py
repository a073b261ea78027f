# SPDX-License-Identifier: Apache-2.0
"""ringbatch: many processes, single inferences, big batches; in shared memory.

A producer::

    import ringbatch as rb

    with rb.connect("resnet50") as model:
        y = model(x)                               # numpy in, numpy out
        with model.request() as req:               # without copies
            req.inputs["x"][...] = frame
            y = req.run(timeout=0.1).outputs["y"]  # a view, valid inside the block
        future = model.submit(x)                   # concurrent.futures.Future
        y = await model.ainfer(x)                  # asyncio

A worker::

    @rb.worker("resnet50", inputs={"x": ("float32", (3, 224, 224))},
               outputs={"y": ("float32", (1000,))}, max_batch_size=32, wait_time=0.005)
    def run(batch):
        batch.outputs["y"][...] = net(batch.inputs["x"])

    rb.serve(run, processes=3)

docs/python.md is the manual.
"""

from typing import TYPE_CHECKING

from . import errors
from .binding.library import binary_path, library_path
from .binding.library import version as _version
from .binding.tensors import Tensor
from .binding.views import View
from .client.connect import connect
from .client.model import Model, stats
from .client.request import Request, Timing
from .errors import *  # noqa: F403
from .serve.pipeline import pipeline
from .serve.supervisor import serve
from .worker.batch import Batch, Item, Run
from .worker.worker import Worker, worker

__all__ = [
    "Batch", "Item", "Model", "Request", "Run", "Tensor", "Timing", "View", "Worker",
    "binary_path", "connect", "library_path", "pipeline", "serve", "stats", "worker",
]  # fmt: skip
__all__ += errors.__all__

__version__: str  # the library's, asked when it is first wanted

if not TYPE_CHECKING:

    def __getattr__(name: str) -> str:
        if name == "__version__":
            return _version()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
