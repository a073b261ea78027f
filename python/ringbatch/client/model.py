# SPDX-License-Identifier: Apache-2.0
"""``Model``: calls, requests, futures and asyncio of a producer."""

from __future__ import annotations

import concurrent.futures
import json
import os
import threading
import time
import warnings
from collections import abc
from collections.abc import Mapping
from ctypes import addressof, c_size_t, string_at
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import errors
from ..binding.device import convert_on_device, to_host
from ..binding.library import Duration, Process, check, encode, load, nanoseconds, seconds
from ..binding.paths import Caller
from ..binding.tensors import Tensor
from ..binding.views import Mapping as SharedMapping
from .completions import PLAIN, WITH_VERSION, Completions
from .connection import Core, Rows
from .future import Future
from .request import Chosen, Request, chosen, claim
from .sequence import Sequence
from .split import Arrays, gather_split, pieces, submit_split
from .stream import Stream

_making = threading.Lock()  # held while completions are made


def _in_child() -> None:
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


def stats(socket: str | os.PathLike[str] | None = None, timeout: Duration = 5.0) -> dict[str, Any]:
    """The broker's statistics; docs/stats.md explains the fields."""
    lib = load()
    out = c_size_t()
    check(lib, lib.rb_stats(encode(socket), nanoseconds(timeout), addressof(out)))
    try:
        return json.loads(string_at(out.value))
    finally:
        lib.rb_free(out.value)


def _left(deadline: float | None) -> float | None:
    """The time left to wait for room; raises Full at the deadline."""
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        raise errors.Full("every slot of this client's window is in use")
    return left


class Model(Caller):
    """A model of the broker. Threads may share it; processes connect their own.

    Call it with arrays, take a :meth:`request` to avoid copies, or have many
    in flight with :meth:`submit` and :meth:`ainfer`. ``model(x, timeout=0.1)``
    takes the arguments of :meth:`infer`.
    """

    if TYPE_CHECKING:  # the base has it, without a name for each argument

        def __call__(
            self, *inputs: Any, timeout: Duration | None = None, priority: int | None = None, cost: int | None = None, split: bool = True,
            version: bool = False, **named: Any,
        ) -> Any:
            """Runs one item, or some rows; the same as :meth:`infer`."""

    def __init__(self, core: Core, socket: str | os.PathLike[str] | None, cast: bool) -> None:
        self._core = core
        self._socket = socket
        self._cast = cast
        self._completions: Completions | None = None
        self._unwarned = bool(core.signature.state)  # that a call does not keep the state
    # -- about the model

    @property
    def name(self) -> str:
        """The model's name."""
        return self._core.name

    @property
    def inputs(self) -> list[Tensor]:
        """Name, type and shape of each input, for one row."""
        return list(self._core.signature.inputs)

    @property
    def outputs(self) -> list[Tensor]:
        """Name, type and shape of each output, for one row."""
        return list(self._core.signature.outputs)

    @property
    def state(self) -> list[Tensor]:
        """The tensors that a sequence keeps from step to step."""
        return list(self._core.signature.state)

    @property
    def max_batch_size(self) -> int:
        """The most rows of a batch."""
        return int(self._core.info.max_batch_size)

    @property
    def window(self) -> int:
        """How many rows this client may have in use at once."""
        return int(self._core.info.window)

    @property
    def wait_time(self) -> float | None:
        """In seconds; None for ``wait_time="auto"``."""
        wait = int(self._core.info.wait_time)
        return None if wait < 0 else wait / 1e9

    def __repr__(self) -> str:
        return f"<ringbatch model {self.name}: {self._core.signature}>"

    def mapping(self) -> SharedMapping:
        """The whole shared mapping (``base``, ``bytes``), to pin it for a GPU."""
        self._check()
        return self._core.present_mapping()

    def stats(self) -> dict[str, Any]:
        """The broker's statistics of this model."""
        for m in stats(self._socket).get("models", []):
            if m.get("name") == self._core.model:
                return m
        raise errors.UnknownModel(f"the broker no longer has {self.name!r}")

    # -- one at a time

    def infer(
        self, *inputs: Any, timeout: Duration | None = None, priority: int | None = None, cost: int | None = None, split: bool = True,
        version: bool = False, **named: Any,
    ) -> Any:
        """Runs one item, or some rows; arrays in, arrays out. Calling the model is the same.

        Pass inputs in the model's order, by name, or as one dict by name, which also takes an input
        that has the name of a keyword of this call. One output is returned as an
        array, several as a dict. A single item gives single items. If the rows of an
        output differ in size, they are a list of arrays.

        timeout: the request's deadline, as a duration from now. priority: the level, 0
        is the most urgent. cost: of each row, for a model with ``max_batch_cost``; by default
        the size of its first variable dimension. split: send more rows than a request may have as several requests.
        version: return the answer, and the version of the live weights that gave it: the oldest one if the rows were split.
        """
        self._check()
        if self._unwarned:
            self._warn()
        arrays, rows = self._arrays(inputs, named)
        choice = chosen(self._core, priority, cost)
        if split and 1 < rows > (most := self._core.most_rows()):
            future: Any = submit_split(self, pieces(arrays, rows, most), timeout, choice)
            return (future.result(), future.version) if version else future.result()
        return self._run(arrays, rows, timeout, choice, version)

    def _warn(self) -> None:
        self._unwarned = False
        said = f"{self.name} has state, and each call begins with zeros: to keep it, seq = model.sequence() and seq.step(x)"
        warnings.warn(said, stacklevel=3)

    def _run(
        self, arrays: Arrays, rows: int, timeout: Duration | None, choice: Chosen, version: bool, step: Sequence | None = None
    ) -> Any:
        """Runs one request, or a step."""
        core, left = self._core, nanoseconds(timeout)
        if core.in_c:
            return core.infer(arrays, left, *choice, version, step)
        end = time.monotonic_ns() + left
        with self._filled(arrays, rows, left, step._id if step else 0) as req:
            if step:
                step._sent = req._id
            req.choose(*choice)
            req.commit_in(left and max(1, end - time.monotonic_ns()), 0)
            req.wait_in(0)
            answer = core.give(req._copies())
            return (answer, req.version) if version else answer

    _call = infer

    def _arrays(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Arrays, int]:
        """The inputs in order, checked; rows is -1 for a single item."""
        if not named and (found := self._core.rows_of(inputs)):
            return inputs, found
        tensors = self._core.signature.inputs
        if not named and len(inputs) == 1 and isinstance(by_name := inputs[0], abc.Mapping):
            inputs, named = (), by_name
        given = dict(zip((t.name for t in tensors), inputs))
        if len(inputs) > len(tensors) or given.keys() & named.keys() or (given.keys() | named.keys()) != {t.name for t in tensors}:
            got = [f"{len(inputs)} in order"] * bool(inputs) + sorted(map(str, named))
            taken = sorted({t.name for t in tensors} & {"cost", "priority", "split", "timeout", "version"})
            advice = f"; {', '.join(taken)}= are keywords of a call: give all inputs in one dict" if taken else ""
            raise errors.Invalid(
                f"{self.name} takes the inputs {', '.join(t.name for t in tensors)}; got {', '.join(got) or 'none'}{advice}")
        given.update(named)
        arrays = tuple(self._convert(t, given[t.name]) for t in tensors)
        rows = [t.rows_of(a.shape) for t, a in zip(tensors, arrays)]
        if len(set(rows)) != 1:
            said = ", ".join(f"{t.name!r} has {'one item' if n < 0 else f'{n} rows'}" for t, n in zip(tensors, rows))
            raise errors.Rows(f"the inputs disagree: {said}")
        return arrays, rows[0]

    def _convert(self, t: Tensor, value: Any) -> Any:
        """The caller's value as an array of the tensor's type, in its memory."""
        if t.on_device:
            return convert_on_device(t, value, self._cast, self._core.device.ordinal)
        array = t.convert(to_host(t, value, self._cast), self._cast)
        if not self._core.in_c or (array.flags.c_contiguous and array.dtype is t.dtype):
            return array
        return np.array(array, t.dtype, order="C")

    def _filled(self, arrays: Arrays, rows: int, timeout_ns: int, sequence: int = 0) -> Request:
        """A request with its inputs written, in one copy."""
        tensors = self._core.signature.inputs
        shapes = {t.name: a.shape if rows < 0 else a.shape[1:] for t, a in zip(tensors, arrays)}
        req = claim(self._core, None if rows < 0 else rows, shapes, timeout_ns, sequence)
        try:
            for t, a in zip(tensors, arrays):
                view: Any = req.inputs[t.name]
                if t.on_device:
                    view.copy_(a, non_blocking=getattr(a, "is_cuda", False))
                else:
                    # With buckets the view may be larger; the rest is zero.
                    view[tuple(slice(0, d) for d in a.shape)] = a
        except BaseException:
            req.release()
            raise
        return req

    def _as_list(self, given: Any) -> list[Rows]:
        """The inverse of Core.give."""
        return list(given.values()) if len(self._core.signature.outputs) > 1 else [given]

    # -- in parts

    def stream(
        self, *inputs: Any, timeout: Duration | None = None, priority: int | None = None, cost: int | None = None,
        from_start: bool = True, **named: Any,
    ) -> Stream:
        """Sends one item, and yields its answer in parts while the worker appends to it: ``for part in model.stream(x)``,
        or ``async for``. The other keywords are those of a call.

        A part is ``(values, restarted)``. If the row begins again on another worker, the next part says
        ``restarted``, and the parts before it do not count; with ``from_start=False`` the stream then
        raises :class:`Restarted` instead.
        """
        self._check()
        arrays, rows = self._arrays(inputs, named)
        return Stream(self, arrays, rows, timeout, chosen(self._core, priority, cost), from_start)

    # -- without copies

    def request(
        self, rows: int | None = None, *, shapes: Mapping[str, tuple[int, ...]] | None = None, timeout: Duration | None = None
    ) -> Request:
        """Slots to write into: for one item, or for some rows.

        shapes: for inputs with variable dimensions, the shape of a row by name.
        timeout: for room in the window.
        """
        core = self._core
        if rows is None and timeout is None and shapes is None and core.plain:
            return Request(core)
        return claim(core, rows, shapes, nanoseconds(timeout))

    def commit(self, requests: abc.Sequence[Request], timeout: Duration | None = None, *, stream: Any = None) -> None:
        """Commits several requests at once, with one wake-up of the broker."""
        self._core.commit_all([r._id for r in requests], nanoseconds(timeout), 0, stream)
        for r in requests:
            r.was_committed()

    # -- with state

    def sequence(self, rows: int | None = None, *, timeout: Duration | None = 10.0) -> Sequence:
        """Opens a sequence of a model with state: each step reads the state that the last one has written.

        rows: the number of sequences in step, for example of a vector of environments. They take
        as many slots of the window until the end. timeout: for room in the window.
        """
        self._check()
        return Sequence(self, rows, timeout)

    # -- many in flight

    def submit(
        self, *inputs: Any, timeout: Duration | None = None, priority: int | None = None, cost: int | None = None, split: bool = True,
        **named: Any,
    ) -> concurrent.futures.Future:
        """Sends one item, or some rows, and returns a Future. It waits while the window is full. The keywords are those of a call."""
        self._check()
        if self._unwarned:
            self._warn()
        arrays, rows = self._arrays(inputs, named)
        choice = chosen(self._core, priority, cost)
        if split and 1 < rows > (most := self._core.most_rows()):
            return submit_split(self, pieces(arrays, rows, most), timeout, choice)
        return self._submit(arrays, rows, timeout, choice)

    def _submit(self, arrays: Arrays, rows: int, timeout: Duration | None, choice: Chosen) -> concurrent.futures.Future:
        completions = self._ready()
        completions.watch_by_thread()
        future = Future()
        future.set_running_or_notify_cancel()
        deadline = None if timeout is None else time.monotonic() + seconds(timeout)
        try:
            while not self._send(future, None, PLAIN, arrays, rows, timeout, choice):
                # The watching thread makes room, and runs callbacks that submit. No other
                # thread collects: a signal handler that raises could leave a future locked.
                completions.drain_if_ours()
                timeout = _left(deadline)
                completions.sweep()
                time.sleep(0.0002)
        except BaseException:  # also of a signal handler
            completions.abandon(future)
            raise
        return future

    async def ainfer(
        self, *inputs: Any, timeout: Duration | None = None, priority: int | None = None, cost: int | None = None, split: bool = True,
        version: bool = False, **named: Any,
    ) -> Any:
        """Runs one item, or some rows, in asyncio. The keywords are those of a call."""
        import asyncio  # takes long to load

        core = self._core
        if core.closed:
            self._check()
        if self._unwarned:
            self._warn()
        choice, how = chosen(core, priority, cost), WITH_VERSION if version else PLAIN
        arrays, rows = self._arrays(inputs, named)
        if split and 1 < rows > (most := core.most_rows()):
            whole = await gather_split(self, pieces(arrays, rows, most), timeout, choice)
            return whole if version else whole[0]
        loop = asyncio.get_running_loop()
        completions = self._ready()
        completions.watch_by_loop(loop)
        future = loop.create_future()
        sent: int | None = None  # the request's number; None until it is known whether there is one
        try:
            sent, timeout = await self._asend(future, loop, how, arrays, rows, timeout, choice, core.in_c)
            if core.in_c:  # committed together with the others of this turn of the loop
                completions.commit_soon(loop, sent, nanoseconds(timeout))
            return await future
        except BaseException:  # canceled, the loop ended, or a signal handler raised
            completions.abandon(future, sent)
            raise

    async def _asend(
        self, future: Any, loop: Any, how: int, arrays: Arrays, rows: int, timeout: Duration | None, choice: Chosen,
        hold: bool = False, sequence: int = 0,
    ) -> tuple[int, Duration | None]:
        """Sends a request and lists its future, as soon as there is room. Returns its number and the time left."""
        completions = self._ready()
        deadline = None if timeout is None else time.monotonic() + seconds(timeout)
        while not (sent := self._send(future, loop, how, arrays, rows, timeout, choice, hold, sequence)):
            timeout = _left(deadline)
            completions.sweep()
            await completions.wait_for_room(loop)
            self._check()
        return sent, timeout

    def _ready(self) -> Completions:
        """The completions of this process; a forked child makes its own."""
        ready = self._completions
        if ready is None or ready.generation != Process.generation:
            with _making:
                ready = self._completions
                if ready is None or ready.generation != Process.generation:
                    ready = self._completions = Completions(self._core)
        return ready

    def _send(
        self, future: Any, loop: Any, how: int, arrays: Arrays, rows: int, timeout: Duration | None, choice: Chosen,
        hold: bool = False, sequence: int = 0,
    ) -> int:
        """Sends a request and lists its future; 0 if there is no room. hold: do not commit yet."""
        core, waiters, left = self._core, self._ready().waiters, nanoseconds(timeout)
        if core.in_c:
            return core.send(arrays, waiters, future, loop, how, left, *choice, hold, sequence)
        try:
            req = self._filled(arrays, rows, 1, sequence)
        except (errors.Full, errors.Timeout):  # no slot yet, or not attached yet
            return 0
        with req:
            req.choose(*choice)
            return req.detach_into(waiters, (future, loop, rows, how), left)

    # -- the end

    def __reduce__(self) -> Any:
        # A copy would close the connection of both, and another process cannot use it.
        raise TypeError(f"a connection cannot be copied or pickled: call ringbatch.connect({self.name!r}) in the process that uses it")

    def _check(self) -> None:
        if self._core.closed:
            raise errors.Closed(f"the connection to {self.name} was closed")

    def close(self) -> None:
        """Disconnects and returns the window. Requests in flight end with an error, views of requests are over.
        Plain arrays that were made of views stay valid, and are zero."""
        completions = self._completions
        if completions is not None and completions.generation != Process.generation:
            completions = None  # of the parent process
        if completions is not None:
            completions.close()
        self._core.close()
        if completions is not None:
            completions.end()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_core"):
            self.close()
