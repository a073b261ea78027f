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

from ._batch import Batch, Item, Run
from ._client import Model, connect, stats
from ._library import binary_path, library_path
from ._request import Request, Timing
from ._serve import serve
from ._tensors import Tensor
from ._views import View
from ._worker import Worker, worker
from .errors import (
    BrokerGone,
    BrokerRunning,
    Canceled,
    Closed,
    Committed,
    Draining,
    DType,
    Error,
    Expired,
    Failed,
    Forbidden,
    Forked,
    ForkedClient,
    Full,
    Invalid,
    Layout,
    NoBroker,
    NoGPU,
    NoLevel,
    NoMemory,
    NotCommitted,
    NotDone,
    OutputTooSmall,
    Protocol,
    QueueFull,
    QueueTimeout,
    Released,
    RingFull,
    Rows,
    Shape,
    SignatureMismatch,
    Size,
    Timeout,
    TooLarge,
    UnknownModel,
    Version,
    WorkerDied,
    WorkerHung,
)

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "BrokerGone",
    "BrokerRunning",
    "Canceled",
    "Closed",
    "Committed",
    "DType",
    "Draining",
    "Error",
    "Expired",
    "Failed",
    "Forbidden",
    "Forked",
    "ForkedClient",
    "Full",
    "Invalid",
    "Item",
    "Layout",
    "Model",
    "NoBroker",
    "NoGPU",
    "NoLevel",
    "NoMemory",
    "NotCommitted",
    "NotDone",
    "OutputTooSmall",
    "Protocol",
    "QueueFull",
    "QueueTimeout",
    "Released",
    "Request",
    "RingFull",
    "Rows",
    "Run",
    "Shape",
    "SignatureMismatch",
    "Size",
    "Tensor",
    "Timeout",
    "Timing",
    "TooLarge",
    "UnknownModel",
    "Version",
    "View",
    "Worker",
    "WorkerDied",
    "WorkerHung",
    "binary_path",
    "connect",
    "library_path",
    "serve",
    "stats",
    "worker",
]
