# SPDX-License-Identifier: Apache-2.0
"""Dynamic batching for many processes on one host, in shared memory.

A client::

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

from typing import Any

from . import errors
from .binding.library import binary_path, library_path
from .binding.library import version as _version
from .binding.tensors import Tensor
from .binding.views import View
from .client.connect import connect
from .client.model import Model, stats
from .client.request import Request, Timing
from .client.sequence import Sequence
from .client.stream import Part, Stream
from .errors import (
    BrokerGone,
    Canceled,
    Draining,
    Error,
    Expired,
    Failed,
    Full,
    Invalid,
    NoBroker,
    NoWorker,
    Overloaded,
    QueueFull,
    QueueTimeout,
    Restarted,
    StateLost,
    Timeout,
    UnknownModel,
    WorkerDied,
)  # fmt: skip
from .serve.pipeline import pipeline
from .serve.supervisor import serve
from .weights.publishing import Publisher, publisher
from .worker.batch import Batch
from .worker.outputs import Item, Run
from .worker.returned import by_index
from .worker.worker import Worker, worker

# The exceptions that callers catch; ringbatch.errors has all of them.
__all__ = [
    "Batch", "BrokerGone", "Canceled", "Draining", "Error", "Expired", "Failed", "Full", "Invalid", "Item", "Model", "NoBroker",
    "NoWorker", "Overloaded", "Part", "Publisher", "QueueFull", "QueueTimeout", "Request", "Restarted", "Run", "Sequence", "StateLost",
    "Stream", "Tensor", "Timeout", "Timing", "UnknownModel", "View", "Worker", "WorkerDied", "binary_path", "by_index", "connect",
    "library_path", "pipeline", "publisher", "serve", "stats", "worker",
]  # fmt: skip

__version__: str  # the library's, read at the first use


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in errors.__all__:  # ringbatch.Shape is ringbatch.errors.Shape
        return getattr(errors, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
