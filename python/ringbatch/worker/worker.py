# SPDX-License-Identifier: Apache-2.0
"""``worker``: makes a function of batches serve a model."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Callable

from .. import errors
from ..binding import structs as c
from ..binding.library import encode
from ..binding.tensors import Spec, signature
from .batch import Batch, Buffers
from .ring import Ring, RingBatch, Stop, keep_attached, run_one, worker_options

if TYPE_CHECKING:  # it takes long to load, and is for coroutines only
    import asyncio

_DEFAULT_CONCURRENCY = 4
_MOST_CONCURRENCY = 64  # what a worker's mailbox may hold
_LOOK_S = 0.05  # whether to stop


def worker(
    model: str,
    *,
    inputs: Mapping[str, Spec],
    outputs: Mapping[str, Spec],
    depth: int = 0,
    concurrency: int = 0,
    weight: int = 0,
    pad_to: int = 0,
    pad_preferred: bool = False,
    gather_threads: int = 0,
    run_once: bool = False,
    debug: bool | None = None,
    name: str | None = None,
    gpu: str | None = None,
    memory: str | None = None,
    **policy: Any,
) -> Callable[[Callable[[Batch], Any]], Worker]:
    """Makes a function of batches a worker of a model.

    The function writes ``batch.outputs[name][...]``, or returns the output (of
    several a dict): an array of all rows, or a list of rows where sizes vary.
    An output that it neither returns nor touches fails the batch.
    If it raises, its requests are run again in smaller batches, on another worker if
    there is one; a request that fails by itself gets the exception's text.
    It may be a coroutine function, ``async def run(batch)``: then several
    batches are in flight in one process, and it may await other models
    (``await recogniser.ainfer(crops)``).

    inputs, outputs: for each tensor its type and the shape of one row, as in
        ``{"x": ("float32", (3, 224, 224))}``; ``"<=512"`` is a dimension that
        each request has its own size of. ``"bfloat16"`` travels as uint16.
    memory: ``"device:0"``: the tensors lie in the memory of that GPU, and arrays
        are tensors of torch there; for producers that have theirs on it too. One
        tensor by itself: ``{"x": ("float32", (3, 224, 224), "device:0")}``.
    policy: settings that declare the model if the broker does not know it yet,
        as ``max_batch_size=32, wait_time=0.005``; docs/configuration.md has all
        of them. A time is seconds as a number or a text like ``"5ms"``. Of one
        priority level, or one input: ``max_queue={1: 100}``,
        ``buckets={"tokens.0": [64, 512]}``. The broker refuses what it does
        not know. With ``ragged=True`` requests of different sizes share a batch,
        without padding: an input of variable size is then a list with a view of
        each row.
    debug: fail requests whose outputs were not written in full; without it
        $RINGBATCH_DEBUG counts.
    depth: batches handed over at once. weight: share of the work.
    concurrency: of a coroutine function, the batches in flight (default 4, at most 64).
    pad_to, pad_preferred: have batches padded with rows of zeros.
    gather_threads: how many copy the rows of a batch above 1 MiB together; 0 is
        as many as cores, by affinity and CPU quota, one where there are fewer than 4; at most 16.
    run_once: requests must not be run again: a batch that fails, or a death, fails all its requests.
    """
    o = worker_options(
        depth=depth, weight=weight, pad_to=pad_to, pad_preferred=pad_preferred, gather_threads=gather_threads, run_once=run_once,
        name=name, gpu=gpu, **policy,
    )
    text = signature(inputs, outputs, memory)

    def made(function: Callable[[Batch], Any]) -> Worker:
        if not _is_async(function) and concurrency:
            raise errors.Invalid("concurrency is for coroutine functions (async def): others run one batch at a time; depth is how many "
                "are handed over")
        if _is_async(function):
            if depth or not 0 <= concurrency <= _MOST_CONCURRENCY:
                raise errors.Invalid(f"a coroutine function has concurrency 1..{_MOST_CONCURRENCY}, and as many batches are handed over: "
                    "leave depth out")
            o.depth = concurrency or _DEFAULT_CONCURRENCY
        return Worker(function, model, text, o, bool(os.environ.get("RINGBATCH_DEBUG")) if debug is None else debug)

    return made


def _is_async(function: Any) -> bool:
    """Whether it is a coroutine function, or an object or class whose ``__call__`` or ``forward`` is one."""
    if inspect.iscoroutinefunction(function):
        return True
    kind = function if isinstance(function, type) else type(function)
    methods = (vars(base)[name] for name in ("__call__", "forward") for base in kind.__mro__ if name in vars(base))
    return inspect.iscoroutinefunction(next(methods, None))


def _loop_for(function: Any) -> contextlib.AbstractContextManager[asyncio.AbstractEventLoop | None]:
    if not _is_async(function):
        return contextlib.nullcontext()
    from .coroutines import own_loop

    return own_loop()


class Worker:
    """A function with the model it serves. Calling it calls the function."""

    def __init__(self, function: Callable[[Batch], Any], model: str, text: str, options: c.WorkerOptions, debug: bool = False) -> None:
        self.function, self.model, self.signature = function, model, text
        self._options, self._debug = options, debug
        self._keep: Any = options
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(self, name, getattr(function, name, None))

    def as_stage(self, pipeline: str, declaration: str) -> Worker:
        """The same as a stage of a pipeline, by the name that it has as a model."""
        o = c.WorkerOptions.from_buffer_copy(self._options)
        o.pipeline = encode(declaration)
        stage = Worker(self.function, f"{pipeline}/{self.model}", self.signature, o, self._debug)
        stage._keep = (self._options, o.pipeline)  # a copied structure does not hold its texts
        return stage

    def __call__(self, batch: Batch) -> Any:
        return self.function(batch)

    def __repr__(self) -> str:
        return f"<ringbatch worker {self.model}: {self.signature}>"

    def run(self, *, socket: str | os.PathLike[str] | None = None, stop: threading.Event | None = None, wait: float = 0.0) -> None:
        """Serves in this process and thread until stop is set, or for ever.

        wait: seconds to wait for a broker that is not there yet. When the
        broker is restarted the worker attaches again by itself. Ctrl-C lets the
        batch that runs finish first; a second one does not.
        """
        ending = Ending(stop or threading.Event())
        with ending.on_ctrl_c():
            self._serve(socket, ending, wait)

    def _serve(
        self, socket: str | os.PathLike[str] | None, ended: Stop, wait: float, attached: Callable[[], None] | None = None
    ) -> None:
        """attached is called each time it has attached."""
        o = c.WorkerOptions.from_buffer_copy(self._options)
        o.socket = encode(socket)

        def serve(ring: Ring) -> None:
            if attached is not None:
                attached()
            if loop is not None:
                from .coroutines import AsyncServing

                AsyncServing(ring, function, o.depth, self._debug).run(loop, ended)
            else:
                run_one(ring, FunctionLane(ring, function, self._debug), ended)

        with _loop_for(self.function) as loop:
            function = self._made(loop)  # before attaching: a worker that is still loading its model would hold batches
            keep_attached(lambda: Ring(self.model, self.signature, o), serve, ended, wait)

    def _made(self, loop: asyncio.AbstractEventLoop | None) -> Callable[[Batch], Any]:
        """What is called with batches; of a class an instance, set up."""
        made = self.function() if isinstance(self.function, type) else self.function
        setup = getattr(made, "setup", None)
        if callable(setup):
            if inspect.iscoroutinefunction(setup):
                if loop is None:
                    raise errors.Invalid(f"{self.function!r}: setup is a coroutine function and what runs batches is none")
                loop.run_until_complete(setup())
            else:
                setup()
        call = made if callable(made) else getattr(made, "forward", None)
        if not callable(call):
            raise errors.Invalid(f"{self.function!r} has neither __call__(self, batch) nor forward(self, batch)")
        return call


def wait_without_lock(is_set: Callable[[], bool], timeout: float | None) -> bool:
    """As an event's wait, whose lock the handler of a signal would wait for in vain, if it is the handler that sets the event."""
    end = math.inf if timeout is None else time.monotonic() + timeout
    while not is_set() and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _LOOK_S))
    return is_set()


class Ending:
    """When to stop: an event is set, or Ctrl-C was pressed."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop, self._interrupted = stop, False

    def is_set(self) -> bool:
        return self._interrupted or self._stop.is_set()

    def wait(self, timeout: float) -> bool:
        return wait_without_lock(self.is_set, timeout)

    @contextlib.contextmanager
    def on_ctrl_c(self) -> Iterator[None]:
        """Where Ctrl-C would raise in the midst of a batch, and fail requests that have done nothing, it is noted and raised at the end."""
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._interrupted:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: Any) -> None:
        if self._interrupted:
            signal.default_int_handler(number, frame)
        self._interrupted = True


class FunctionLane:
    """Runs a function of batches: a batch is done as soon as it is submitted.

    If the function of the batch before had its rows gathered, those of the next
    are gathered while the function runs and its batch is answered; there are two
    sets of arrays then, which take turns.
    """

    def __init__(self, ring: Ring, function: Callable[[Batch], Any], debug: bool) -> None:
        self._ring, self._function, self._debug = ring, function, debug
        self._buffers, self._others = Buffers(), Buffers()
        self._batch: Batch | None = None
        self._next: Batch | None = None
        self._gathered: int | None = None  # the input that the last function had gathered

    def wants_next(self, batch: RingBatch) -> bool:
        return self._gathered is not None

    def prefetch(self, batch: RingBatch) -> None:
        if self._next is not None:  # that one's turn is now
            self._batch = self._take(self._next)
        self._next = Batch(self._ring, self._others, batch, self._debug)
        self._next._prefetch(self._gathered or 0)

    def _take(self, b: Batch) -> Batch:
        """The next one's rows stay in the arrays that they are in; those of the one after it go into the others."""
        self._next = None
        self._buffers, self._others = self._others, self._buffers
        return b

    def submit(self, batch: RingBatch) -> None:
        b = self._batch
        if b is None and self._next is not None and self._next._raw is batch:
            b = self._take(self._next)
        if b is None:
            b = Batch(self._ring, self._buffers, batch, self._debug)
        self._batch = b
        result = self._function(b)
        b._take(result)
        b._finish()
        self._gathered = b._gathered

    def release(self) -> None:
        if self._batch is not None:
            self._batch._end()
            self._batch = None
