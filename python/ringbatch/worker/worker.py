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
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from .. import errors
from ..binding import structs as c
from ..binding.library import Duration, encode
from ..binding.tensors import Declared, Specs, declared, in_memory, needs_numpy, signature
from ..weights.following import Follower
from ..weights.publishing import publishes
from . import following, program
from .axes import check_packed
from .batch import Batch
from .buffers import Buffers
from .refusal import for_python
from .ring import Ring, RingBatch, Stop, keep_attached, run_one, worker_options
from .rounds import Rounds, check_lanes, check_model, depth_of

if TYPE_CHECKING:  # asyncio takes long to load
    import asyncio

_DEFAULT_CONCURRENCY = 4
_MOST_CONCURRENCY = 64
_LOOK_S = 0.05  # between looks whether to stop


def worker(
    model: str,
    *,
    inputs: Specs = (),
    outputs: Specs = (),
    like: Mapping[str, Any] | None = None,
    returns: Mapping[str, Any] | None = None,
    state: Specs = (),
    depth: int = 0,
    concurrency: int = 0,
    lanes: int = 0,
    share: int = 0,
    pad_to: int = 0,
    pad_preferred: bool = False,
    gather_threads: int = 0,
    run_once: bool | None = None,
    packed: Sequence[str] = (),
    debug: bool | None = None,
    version: str | None = None,
    name: str | None = None,
    gpu: str | None = None,
    memory: str | None = None,
    live_weights: Any = False,
    mix_versions: bool = False,
    **policy: Any,
) -> Callable[[Callable[[Batch], Any]], Worker]:
    """Makes a function of batches a worker of a model.

    The function writes ``batch.outputs[name][...]`` or returns the output: an array of
    all rows, a list of rows if sizes vary; several outputs as a dict, dataclass or tuple. An output that it
    neither returns nor touches fails the batch. If it raises, its requests run again in
    smaller batches; a request that fails by itself gets the exception's text.
    A coroutine function, ``async def run(batch)``, has several batches in flight in one
    process, and may await other models (``await recogniser.ainfer(crops)``).

    inputs, outputs: the type of each tensor and the shape of one row:
        ``{"x": ("float32", (3, 224, 224))}``, ``{"x": "f32[3,224,224]"}`` or
        ``["x:f32[3,224,224]"]``. ``"<=512"`` is a dimension whose size each request
        chooses; tensors that share a name, ``"atoms<=200"``, share its size. ``"bfloat16"`` is ml_dtypes' type, or its bits in uint16.
    like, returns: the same from samples: a row of each tensor, ``like={"x": np.zeros(4, "float32")}``.
    state: tensors that a client's sequence keeps from one step to the next, declared as inputs are,
        with fixed shapes. The function reads ``batch.state["h"]`` and assigns it; docs/state.md.
    memory: ``"device:0"`` puts the tensors into the memory of that GPU, for producers
        on it; arrays are torch tensors then. For one tensor:
        ``{"x": ("float32", (3, 224, 224), "device:0")}``.
    policy: settings of the model, if the broker does not know it yet:
        ``max_batch_size=32, wait_time="5ms"``; docs/configuration.md has all of them.
        For one priority level or input: ``max_queue={1: 100}``,
        ``buckets={"tokens.0": [64, 512]}``. Wrong ones raise Invalid. With
        ``ragged=True`` requests of different sizes share a batch without padding: an
        input of variable size is then a list with a view of each row.
    packed: all inputs of variable size, ``["tokens"]``: ragged, and their rows are one array. ``batch.inputs["tokens"]``
        has shape (total, ...), ``batch.offsets`` is where each row begins. The function returns
        outputs of variable size in that form. Only first dimensions vary. Without names they have one size in a
        request; with names, ``batch.offsets["atoms"]`` are those of one name.
    debug: fail requests whose outputs were not written in full; default $RINGBATCH_DEBUG.
    depth: batches handed over at once. share: of the work, relative to other workers.
    concurrency: batches in flight of a coroutine function (default 4, at most 64).
    lanes: rows that the worker holds at once, for a model that goes round: a class with ``start(self, lanes, rows)`` and
        ``step(self, lanes)``, which returns outputs and which lanes are done; docs/lanes.md.
    pad_to, pad_preferred: pad batches with rows of zeros.
    gather_threads: threads that copy the rows of a batch above 1 MiB; 0 is one for each
        core, at most 16, or 1 below 4 cores.
    run_once: never run a request again: a failed batch or a dead worker fails all its requests. By default a worker whose
        process publishes weights before it attaches, for example in ``setup``, does so: a learner must not train twice.
    version: what the worker computes. Beside workers of another version it is refused, unless the broker has
        started them all: their answers would mix. "any" joins all. The default comes from the function's
        file, the script and its arguments.
    name: of this worker, in the broker's log and statistics.
    live_weights: follow the weights that a ``ringbatch.publisher`` of this model publishes, as
        ``batch.weights``: the worker waits for the first version. A torch.nn.Module gets them copied in place.
    mix_versions: with ``lanes``, new weights come between two rounds, whatever rows are in the lanes; ``step(self, lanes, weights)``
        gets those of the round. An answer names the version with which its row began.
    """
    inputs, outputs = _either("inputs", inputs, "like", like), _either("outputs", outputs, "returns", returns)
    if packed:
        if any(key.partition(".")[0] == "buckets" for key in policy):
            raise errors.Invalid("packed rows follow one another without padding, so there are no buckets: leave buckets out")
        _check_packed(packed, declared(inputs), declared(outputs), policy.setdefault("ragged", True))
    if mix_versions and not lanes:
        raise errors.Invalid("mix_versions=True: a batch runs with one version; only rows in lanes= may mix them")
    if lanes:
        others = {"packed": packed, "pad_to": pad_to, "pad_preferred": pad_preferred, "depth": depth, "concurrency": concurrency}
        check_lanes(lanes, declared(inputs), declared(outputs), others, policy)
    _warn_of_small_batches(model, declared(inputs), policy)
    o = worker_options(
        depth=depth or (lanes and depth_of(lanes)), lanes=lanes, share=share, pad_to=pad_to, pad_preferred=pad_preferred,
        gather_threads=gather_threads, run_once=bool(run_once), version=version, name=name, gpu=gpu, **policy,
    )
    text = signature(inputs, outputs, memory, state)
    needs_numpy(in_memory(t, memory) for side in (inputs, outputs, state) for t in declared(side))

    def made(function: Callable[[Batch], Any]) -> Worker:
        function = function.function if isinstance(function, Worker) else function  # the same, under another name
        following.check(live_weights, _is_async(function))
        if lanes:
            check_model(function)
        if not _is_async(function) and concurrency:
            raise errors.Invalid("concurrency is for coroutine functions (async def): others run one batch at a time; depth is the "
                "number of batches handed over")
        if _is_async(function):
            if depth or not 0 <= concurrency <= _MOST_CONCURRENCY:
                raise errors.Invalid(f"a coroutine function has concurrency 1..{_MOST_CONCURRENCY}, and as many batches are handed over: "
                    "leave depth out")
            o.depth = concurrency or _DEFAULT_CONCURRENCY
        return Worker(function, model, text, o, bool(os.environ.get("RINGBATCH_DEBUG")) if debug is None else debug, bool(packed),
            live_weights, run_once, mix_versions)

    return made


def _either(name: str, specs: Specs, sampled: str, samples: Mapping[str, Any] | None) -> Specs:
    """The specs of one side, which has them or samples."""
    if bool(specs) == bool(samples):
        raise errors.Invalid(f'say the {name} once: {name}={{"x": ("float32", (4,))}}, or {sampled}={{"x": a row}}')
    return specs or {n: _spec_of(x) for n, x in (samples or {}).items()}


def _spec_of(row: Any) -> tuple[str, tuple[int, ...]]:
    """The type and shape of a sample: an array, a tensor of torch, or what NumPy makes an array of."""
    x = row if hasattr(row, "dtype") and hasattr(row, "shape") else np.asarray(row)
    return str(x.dtype).removeprefix("torch."), tuple(x.shape)


def _warn_of_small_batches(model: str, inputs: list[Declared], policy: Mapping[str, Any]) -> None:
    """Warns if only requests of equal size share a batch."""
    varying = [t for t in inputs if t.variable]
    if not varying or str(policy.get("max_batch_size")) == "1" or any(key.partition(".")[0] in ("buckets", "ragged") for key in policy):
        return
    first = varying[0]
    packs = f"packed={[t.name for t in varying]}, " if {(t.variable, t.shape[0]) for t in varying} == {((0,), first.shape[0])} else ""
    warnings.warn(
        f"model {model!r}: the size of {first.name!r} varies, and only requests of equal size share a batch, so batches will be small. "
        f'Write {packs}ragged=True or buckets="auto" into the decorator (docs/sizes.md), or ragged=False to leave it so',
        stacklevel=3,
    )


@for_python
def _check_packed(packed: Sequence[str], inputs: list[Declared], outputs: list[Declared], ragged: Any) -> None:
    check_packed(packed, inputs, outputs)
    if str(ragged).lower() not in ("true", "t", "1"):
        raise errors.Invalid(f"--packed {','.join(packed)}: requests of different sizes share a batch; got ragged={ragged}")


def _is_async(function: Any) -> bool:
    """Whether the function, or the ``__call__`` or ``forward`` of an object or class, is a coroutine function."""
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

    def __init__(
        self, function: Callable[[Batch], Any], model: str, text: str, options: c.WorkerOptions, debug: bool = False, packed: bool = False,
        live_weights: Any = False, run_once: bool | None = None, mix_versions: bool = False,
    ) -> None:  # fmt: skip
        self.function, self.model, self.signature = function, model, text
        self._options, self._debug, self._packed = options, debug, packed
        self._follows, self._live_weights, self._run_once, self._mix_versions = model, live_weights, run_once, mix_versions
        self._keep: Any = options
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(self, name, getattr(function, name, None))

    def as_stage(self, pipeline: str, declaration: str) -> Worker:
        """The same worker as a stage of a pipeline; its model's name is the stage's."""
        o = c.WorkerOptions.from_buffer_copy(self._options)
        o.pipeline = encode(declaration)
        return self._with(o, f"{pipeline}/{self.model}")

    def with_version(self, version: str) -> Worker:
        """The same worker with another version."""
        o = c.WorkerOptions.from_buffer_copy(self._options)
        o.version = encode(version)
        return self._with(o, self.model)

    def _with(self, o: c.WorkerOptions, model: str) -> Worker:
        made = Worker(self.function, model, self.signature, o, self._debug, self._packed, self._live_weights, self._run_once,
            self._mix_versions)
        made._follows = self._follows
        made._keep = (self._keep, o.pipeline, o.version)  # a copied struct does not keep its texts
        return made

    def __call__(self, batch: Batch) -> Any:
        return self.function(batch)

    def __repr__(self) -> str:
        return f"<ringbatch worker {self.model}: {self.signature}>"

    def run(self, *, socket: str | os.PathLike[str] | None = None, stop: threading.Event | None = None, wait: Duration = 10.0) -> None:
        """Serves in this process and thread until stop is set, or without end.

        wait: how long to wait for a broker. When the broker is restarted the worker
        attaches again. The first Ctrl-C lets the running batch finish.
        """
        ending = Ending(stop or threading.Event())
        with ending.on_ctrl_c():
            self._serve(socket, ending, wait)

    def _serve(
        self, socket: str | os.PathLike[str] | None, ended: Stop, wait: Duration, attached: Callable[[], None] | None = None
    ) -> None:
        """attached is called after each attachment."""
        o = c.WorkerOptions.from_buffer_copy(self._options)
        o.socket = encode(socket)
        if not o.version:
            o.version = encode(program.of_function(self.function))

        def serve(ring: Ring) -> None:
            if attached is not None:
                attached()
            if follower is not None:
                follower.look()
            if o.lanes:
                Rounds(ring, function, o.lanes, follower, bool(o.run_once), self._mix_versions).run(ended)
            elif loop is not None:
                from .coroutines import AsyncServing

                AsyncServing(ring, function, o.depth, self._debug).run(loop, ended)
            else:
                run_one(ring, FunctionLane(ring, function, self._debug, follower), ended)

        with _loop_for(self.function) as loop:
            with following.Following(self._follows, self._live_weights) as follows:
                function = self._made(loop)  # before attaching: a worker that loads its model would hold batches
            if self._run_once is None:
                o.run_once = publishes(other_than=self._follows)
            follower = follows.open(socket, ended, wait, loop is not None)
            if self._mix_versions and follower is None and not ended.is_set():
                raise errors.Invalid("mix_versions=True, and the worker follows no weights: say live_weights=, or follow(net) in setup()")
            with contextlib.closing(follower) if follower else contextlib.nullcontext():
                keep_attached(lambda: Ring(self.model, self.signature, o, self._packed), serve, ended, wait)

    def _made(self, loop: asyncio.AbstractEventLoop | None) -> Callable[[Batch], Any]:
        """The function that is called with batches; a class is instantiated and set up."""
        made = self.function() if isinstance(self.function, type) else self.function
        setup = getattr(made, "setup", None)
        if callable(setup):
            if inspect.iscoroutinefunction(setup):
                if loop is None:
                    raise errors.Invalid(f"{self.function!r}: setup is a coroutine function and what runs batches is none")
                loop.run_until_complete(setup())
            else:
                setup()
        if self._options.lanes:
            return check_model(made)  # type: ignore[no-any-return]
        call = made if callable(made) else getattr(made, "forward", None)
        if not callable(call):
            hint = "; a class with start and step needs lanes=" if hasattr(made, "step") else ""
            raise errors.Invalid(f"{self.function!r} has neither __call__(self, batch) nor forward(self, batch){hint}")
        return call


def wait_without_lock(is_set: Callable[[], bool], timeout: float | None) -> bool:
    """Event.wait without its lock, which deadlocks if a signal handler sets the event."""
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
        """Notes Ctrl-C and raises it at the end. In the middle of a batch it would fail requests."""
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
    """Runs a function of batches: a batch is done when submit returns.

    If the last batch was gathered, the rows of the next one are gathered while the
    function runs. There are two sets of arrays then, which take turns.
    """

    def __init__(self, ring: Ring, function: Callable[[Batch], Any], debug: bool, follower: Follower | None = None) -> None:
        self._ring, self._function, self._debug = ring, function, debug
        self._follower, self._entered = follower, False
        self._buffers, self._others = Buffers(), Buffers()
        self._batch: Batch | None = None
        self._next: Batch | None = None
        self._gathered: int | None = None  # the largest gathered input of the last batch

    def wants_next(self, batch: RingBatch) -> bool:
        return self._gathered is not None

    def prefetch(self, batch: RingBatch) -> None:
        if self._next is not None:  # its turn is now
            self._batch = self._take(self._next)
        self._next = Batch(self._ring, self._others, batch, self._debug)
        self._next._prefetch(self._gathered or 0)

    def _take(self, b: Batch) -> Batch:
        """Swaps the arrays: rows of the batch after b go into the other ones."""
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
        if self._follower is not None:
            b.version = self._follower.enter()
            self._entered = True
            b.weights = self._follower.arrays()
            batch.set_version(b.version)
        result = self._function(b)
        b._take(result)
        b._finish()
        self._gathered = b._gathered

    def release(self) -> None:
        if self._batch is not None:
            self._batch._end()
            self._batch = None
        if self._entered and self._follower is not None:
            self._entered = False
            self._follower.exit()
