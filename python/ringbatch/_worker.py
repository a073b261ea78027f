"""The model's side: a function that is given whole batches."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from ctypes import addressof, c_size_t, c_uint32, c_uint64
from typing import Any, Callable

from . import _structs as c
from . import errors
from ._batch import Batch, Buffers
from ._core import encode, tensors
from ._library import SLICE_NS, check, last_error, load
from ._tensors import Signature, Spec, signature
from ._views import Mapping as SharedMapping

log = logging.getLogger("ringbatch")

_FIRST_RETRY_S, _LAST_RETRY_S = 0.01, 1.0
_TIMEOUT = errors.Timeout.status
_RETURNED = "the worker's function returned something and wrote no output: batch.outputs[name][...] = result"


def worker(
    model: str,
    *,
    inputs: Mapping[str, Spec],
    outputs: Mapping[str, Spec],
    max_batch_size: int = 0,
    wait_time: float | None = None,
    slots: int = 0,
    lease: float = 0.0,
    depth: int = 0,
    weight: int = 0,
    pad_to: int = 0,
    pad_preferred: bool = False,
    preferred_sizes: Sequence[int] = (),
    buckets: Sequence[Sequence[int]] = (),
    preserve_order: bool = False,
    name: str | None = None,
    gpu: str | None = None,
) -> Callable[[Callable[[Batch], Any]], Worker]:
    """Makes a function of batches a worker of a model.

    inputs, outputs: for each tensor its type and the shape of one row, as in
        ``{"x": ("float32", (3, 224, 224))}``; ``"<=512"`` is a dimension that
        each request has its own size of. ``"bfloat16"`` travels as uint16.
    max_batch_size: rows of a batch; wait_time: seconds that the oldest request
        waits for company (0: not at all). These and slots, lease,
        preferred_sizes, buckets and preserve_order declare the model if the
        broker does not know it yet; left out, the broker's defaults hold.
    depth: batches handed over at once. weight: share of the work.
    pad_to, pad_preferred: have batches padded with rows of zeros.
    """
    o = c.WorkerOptions()
    o.size = ctypes.sizeof(o)
    o.max_batch_size, o.slots, o.lease = max_batch_size, slots, int(lease * 1e9)
    o.wait_time = 0 if wait_time is None else (int(wait_time * 1e9) or -1)
    o.depth, o.weight, o.pad_to, o.pad_preferred, o.preserve_order = depth, weight, pad_to, pad_preferred, preserve_order
    o.name, o.gpu = encode(name), encode(gpu)
    o.preferred_sizes, o.preferred_count = (c_uint32 * len(preferred_sizes))(*preferred_sizes), len(preferred_sizes)
    if not all(isinstance(sizes, Collection) for sizes in buckets):
        raise errors.Invalid(f"buckets is a list of sizes for each variable input dimension, as in [[128, 512]]; got {buckets!r}")
    flat = [n for sizes in buckets for n in sizes]
    o.bucket_dims, o.bucket_counts = len(buckets), (c_uint32 * len(buckets))(*map(len, buckets))
    o.buckets = (c_uint32 * len(flat))(*flat)
    text = signature(inputs, outputs)
    return lambda function: Worker(function, model, text, o)


class Worker:
    """A function with the model it serves. Calling it calls the function."""

    def __init__(self, function: Callable[[Batch], Any], model: str, text: str, options: c.WorkerOptions) -> None:
        self.function, self.model, self.signature = function, model, text
        self._options = options
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(self, name, getattr(function, name, None))

    def __call__(self, batch: Batch) -> Any:
        return self.function(batch)

    def __repr__(self) -> str:
        return f"<ringbatch worker {self.model}: {self.signature}>"

    def run(self, *, socket: str | os.PathLike[str] | None = None, stop: threading.Event | None = None, wait: float = 0.0) -> None:
        """Serves in this process and thread until stop is set, or for ever.

        wait: seconds to wait for a broker that is not there yet. When the
        broker is restarted the worker attaches again by itself.
        """
        stop = stop or threading.Event()
        session = self._attach(socket, stop, time.monotonic() + wait)
        while session is not None:
            try:
                gone = session.serve(self.function, stop)
            finally:
                session.close()
            if not gone:
                return
            log.info("broker went away, attaching %s again", self.model)
            session = self._attach(socket, stop, float("inf"))

    def _attach(self, socket: str | os.PathLike[str] | None, stop: threading.Event, deadline: float) -> Session | None:
        delay = _FIRST_RETRY_S
        while not stop.is_set():
            try:
                return Session(self.model, self.signature, self._options, socket)
            except (errors.NoBroker, errors.BrokerGone, errors.Draining):
                if time.monotonic() + delay > deadline:
                    raise
            stop.wait(delay)
            delay = min(2 * delay, _LAST_RETRY_S)
        return None


class Session:
    """One attachment to a broker."""

    def __init__(self, model: str, text: str, options: c.WorkerOptions, socket: str | os.PathLike[str] | None) -> None:
        self._lib = lib = load()
        out = c_uint64()
        o = c.WorkerOptions.from_buffer_copy(options)
        o.socket = encode(socket)
        check(lib, lib.rb_worker_attach(model.encode(), text.encode(), addressof(o), addressof(out)))
        self._handle = out.value
        info, m = c.Model(), c.Map()
        check(lib, lib.rb_worker_model(self._handle, addressof(info)))
        check(lib, lib.rb_worker_map(self._handle, addressof(m)))
        self._mapping = SharedMapping(lib, m)
        self._buffers = Buffers()
        self._signature = Signature(
            tensors(lib, lib.rb_worker_tensor, self._handle, c.INPUT, info.inputs),
            tensors(lib, lib.rb_worker_tensor, self._handle, c.OUTPUT, info.outputs),
        )
        self._mapping.offsets.update((t, t.offset) for t in self._signature.inputs + self._signature.outputs)

    def serve(self, function: Callable[[Batch], Any], stop: threading.Event) -> bool:
        """Runs batches until stop is set (False) or the broker goes (True)."""
        lib, pointer = self._lib, c_size_t()
        at = addressof(pointer)
        while not stop.is_set():
            status = lib.rb_worker_next(self._handle, SLICE_NS, at)
            if status == 0:
                batch = Batch(lib, self._signature, self._mapping, self._buffers, pointer.value)
                try:
                    if function(batch) is not None and not batch._used_outputs:
                        raise errors.Invalid(_RETURNED)
                except Exception as e:
                    log.exception("worker of a batch of %d rows failed", batch.rows)
                    batch.fail_all(e)
                except BaseException as e:
                    batch.fail_all(e)
                    batch.complete()
                    raise
                batch.complete()
            elif status == errors.BrokerGone.status:
                return True
            elif status != _TIMEOUT:
                raise last_error(lib, status)
        return False

    def close(self) -> None:
        self._lib.rb_worker_close(self._handle)
