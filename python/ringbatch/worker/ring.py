# SPDX-License-Identifier: Apache-2.0
"""A worker's attachment to a ring, and the loop that serves its batches.

This module knows addresses and NumPy arrays only. A :class:`Lane` computes a batch,
with NumPy, PyTorch or another engine.

1. :func:`keep_attached` attaches, and again after each restart of the broker
2. :class:`Ring` is one attachment: the tensors, their memory, the next batch
3. :func:`run` gives batches to free lanes and answers them when they are done
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import addressof, c_char_p, c_uint8, c_uint32, c_uint64
from typing import Any, Protocol

import numpy as np

from .. import errors
from ..binding import structs as c
from ..binding import texts
from ..binding.library import SLICE_NS, Duration, Pauses, check, encode, last_error, load, not_negative
from ..binding.paths import complete_batch, next_batch
from ..binding.tensors import growing, signature_of
from ..binding.views import Mapping as SharedMapping
from . import refusal
from .lost_gpu import Lost, end_if_lost, end_process
from .policy import policy_text

log = logging.getLogger("ringbatch")

_REASON_BYTES = 1024  # room for the text of a failure
_LINE_BYTES = 320  # room for its first line, if a traceback follows


class Stop(Protocol):
    """When to stop, for example a threading.Event."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float) -> bool: ...


def worker_options(
    *,
    depth: int = 0,
    lanes: int = 0,
    share: int = 0,
    pad_to: int = 0,
    pad_preferred: bool = False,
    gather_threads: int = 0,
    run_once: bool = False,
    version: str | None = None,
    name: str | None = None,
    gpu: str | None = None,
    socket: str | os.PathLike[str] | None = None,
    **policy: Any,
) -> c.WorkerOptions:
    """The keywords of all workers, for C. policy: settings of the model."""
    o = c.WorkerOptions()
    o.size = ctypes.sizeof(o)
    o.depth, o.lanes, o.share, o.pad_to, o.pad_preferred, o.gather_threads = depth, lanes, share, pad_to, pad_preferred, gather_threads
    o.run_once, o.version = run_once, encode(version)
    o.name, o.gpu, o.socket = encode(name or os.environ.get("RINGBATCH_WORKER_NAME")), encode(gpu), encode(socket)
    o.policy = encode(policy_text(policy))
    return o


class Rows:
    """The rows of a batch: their slots, and their shapes in the inputs."""

    __slots__ = ("rows", "runs", "shapes", "sizes", "slots_at")

    def __init__(
        self, rows: int, slots_at: int, runs: list[tuple[int, int, int]], shapes: list[tuple[int, ...]], sizes: np.ndarray | None = None
    ) -> None:
        self.rows = rows
        self.slots_at = slots_at  # address of the slot number of each row, 32 bits each, ascending
        self.runs = runs  # of adjacent slots: slot, row, rows
        self.shapes = shapes  # of a row in each input
        self.sizes = sizes  # each row's true sizes of the inputs' variable dimensions; None: rows are not padded

    def slots(self) -> np.ndarray:
        """The slot of each row."""
        return np.array((c_uint32 * self.rows).from_address(self.slots_at), np.intp)


_MEMBER = np.dtype(c.Member)


class RingBatch(Rows):
    """A batch of a ring."""

    __slots__ = ("_c", "_lib", "_ring", "_runs", "at", "pad_to", "pieces", "requests")

    def __init__(self, ring: Ring, at: int, requests: int, rows: int, pieces: int, pad_to: int, first: int) -> None:
        self._ring, self._lib, self.at = ring, ring.lib, at
        self.requests, self.rows, self.pad_to = requests, rows, pad_to
        self.pieces = pieces  # the number of runs
        self._c: Any = None
        self._runs: list[tuple[int, int, int]] | None = [(first, 0, rows)] if pieces == 1 else None

    # Computed when needed: a function that only takes the arrays needs none of them.

    @property
    def c(self) -> Any:
        """The batch as C has it."""
        if self._c is None:
            self._c = c.Batch.from_address(self.at)
        return self._c

    @property
    def runs(self) -> list[tuple[int, int, int]]:  # type: ignore[override]
        if self._runs is None:
            flat = (c_uint32 * (3 * self.c.runs)).from_address(addressof(self.c.run.contents))[:]
            self._runs = list(zip(flat[::3], flat[1::3], flat[2::3]))
        return self._runs

    @property
    def slots_at(self) -> int:  # type: ignore[override]
        return addressof(self.c.slot.contents)

    @property
    def shapes(self) -> list[tuple[int, ...]]:  # type: ignore[override]
        return self._ring.one_shape or [t.actual(self.c.dims) for t in self._ring.signature.inputs]

    @property
    def sizes(self) -> np.ndarray | None:  # type: ignore[override]
        n = self._ring.signature.variable_inputs
        if not n:
            return None
        count = self.c.requests
        members = np.frombuffer((c.Member * count).from_address(addressof(self.c.request.contents)), _MEMBER)
        return np.repeat(members["dims"][:, :n], members["rows"], axis=0)

    def set_rows_dims(self, dims: np.ndarray) -> None:
        """The sizes of the variable dimensions of the outputs, for each row."""
        for row, sizes in enumerate(dims.tolist()):
            self.set_row_dims(row, sizes)

    def steps(self) -> np.ndarray:
        """The step word of each row: bit 0 is the half of the state that it reads, bit 1 says that its sequence begins."""
        if not self.c.step:
            raise errors.Invalid("the model has no state: @rb.worker(state=...) declares it")
        return np.array((c_uint8 * self.rows).from_address(self.c.step), np.intp)

    def fresh(self) -> np.ndarray:
        """Whether each row begins its sequence."""
        return self.steps() & 2 != 0

    def clear_fresh(self, rows: Any) -> None:
        """Zeroes the fresh rows of a state that was gathered on a GPU. On the host the library has cleared them in their slots."""
        for row in np.flatnonzero(self.fresh()).tolist():
            rows[row] = 0

    def halves(self) -> np.ndarray:
        """The half of a state's plane that each row reads, counted over all slots; the row writes the half ``^ 1``."""
        return 2 * self.slots() + (self.steps() & 1)

    def gather(self, k: int, to: int, size: int) -> None:
        """Copies the rows of the k-th input together, with zeros for the padding; without the GIL."""
        check(self._lib, self._lib.rb_batch_gather(self.at, c.INPUT, k, to, size))

    def texts(self, k: int) -> list[Any]:
        """The k-th input, which is text: a str of each row, and empty ones for the padding."""
        t = self._ring.signature.inputs[k]
        rows = np.empty((self.pad_to, *t.shape), t.dtype)
        self.gather(k, rows.ctypes.data, rows.nbytes)
        rows[self.rows :] = texts.END
        return texts.decode(rows, t)

    def gather_state(self, k: int, to: int, size: int) -> None:
        """The same for the k-th state before this step."""
        check(self._lib, self._lib.rb_batch_gather(self.at, c.STATE, k, to, size))

    def set_state(self, k: int, of: int, size: int) -> None:
        """Copies the k-th state after this step into the slots."""
        check(self._lib, self._lib.rb_batch_set_state(self.at, k, of, size))

    def prefetch(self, k: int, to: int, size: int) -> None:
        """Starts to gather, in threads of the library; gather with the same arguments finishes."""
        check(self._lib, self._lib.rb_batch_prefetch(self.at, k, to, size))

    def scatter(self, k: int, of: int, size: int) -> None:
        """Copies rows of the k-th output into their slots."""
        check(self._lib, self._lib.rb_batch_scatter(self.at, k, of, size))

    def pack(self, k: int, to: int, size: int) -> None:
        """Copies the rows of the k-th input one after the other, each in its true size."""
        check(self._lib, self._lib.rb_batch_pack(self.at, k, to, size, None))

    def offsets(self, name: str = "") -> np.ndarray:
        """Where each packed row begins, and the last one ends; int32. name: of the dimension, if there are several."""
        sizes, lengths = self.sizes, self._ring.signature.lengths
        assert sizes is not None
        if "" in lengths and (sizes != sizes[:, :1]).any():
            names = ", ".join(t.name for t in self._ring.signature.inputs if t.variable)
            raise errors.Shape(f"the model is packed: in a request, all of {names} have the same size")
        ends = np.cumsum(sizes[:, lengths[name] if name else 0], dtype=np.int64)
        if ends[-1] >= 1 << 31:
            raise errors.Size("the packed rows are too long for offsets of 32 bits")
        return np.concatenate([[0], ends]).astype(np.int32)

    def unpack(self, k: int, of: int, size: int) -> None:
        """Copies packed rows of the k-th output into their slots, and sets their sizes."""
        check(self._lib, self._lib.rb_batch_unpack(self.at, k, of, size))

    def set_row_dims(self, row: int, dims: Sequence[int]) -> None:
        """The sizes of the variable dimensions of a row's outputs."""
        sizes = (c_uint32 * len(dims))(*dims)
        check(self._lib, self._lib.rb_batch_set_row_dims(self.at, row, addressof(sizes), len(dims)))

    def is_streamed(self, row: int) -> bool:
        """Whether the client takes the row's answer in parts."""
        return bool(self.c.streamed and c_uint8.from_address(self.c.streamed + row).value)

    def show(self, row: int, steps: int) -> None:
        """The first steps of a row's growing output are written, and stay."""
        check(self._lib, self._lib.rb_batch_show(self.at, row, steps))

    def fail(self, i: int, error: BaseException | str) -> None:
        if isinstance(error, errors.Error) and self._lib.rb_batch_fail_as(self.at, i, error.status, _reason(error)) == 0:
            return  # otherwise a request cannot end with that status
        check(self._lib, self._lib.rb_batch_fail(self.at, i, _reason(error)))

    def fail_all(self, error: BaseException | str) -> None:
        """Fails the batch as a whole; requests that have failed already keep their error."""
        check(self._lib, self._lib.rb_batch_fail_all(self.at, _reason(error)))

    def wanted(self) -> bool:
        """Whether a client still waits for one of its requests."""
        return any(self._lib.rb_batch_waiting(self.at, i) != errors.Canceled.status for i in range(self.requests))

    def set_version(self, version: int) -> None:
        """Names the version of the weights in the answers."""
        check(self._lib, self._lib.rb_batch_set_version(self.at, version))

    def set_rounds(self, rounds: int) -> None:
        """How many rounds the row took in its lane."""
        check(self._lib, self._lib.rb_batch_set_rounds(self.at, rounds))

    def complete(self) -> None:
        """Answers the clients; the batch is over. A request whose answer is not whole fails, and the log says why."""
        status = complete_batch(self.at)
        if status == errors.Failed.status:
            log.error("a request of model %s failed: %s", self._ring.model, last_error(self._lib, status))
        elif status:
            raise last_error(self._lib, status)

    def answer_failed(self, error: BaseException) -> None:
        self.fail_all(error)
        self.complete()


def _said(error: object) -> str:
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__name__} that cannot say what it is>"


def _reason(error: object) -> bytes:
    """The text of a failure. The first line names the exception: the gateway sends only that line to other hosts.
    The traceback follows, or the end of a long one."""
    if isinstance(error, BaseException):
        name, said = type(error).__qualname__, " ".join(_said(error).split())
        line = f"{name}: {said}" if said else name
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        trace = "" if error.__traceback__ is None else "\n" + "".join(lines).strip()
    else:
        line, trace = _said(error), ""
    raw, rest = (text.replace("\0", " ").encode("utf-8", "replace") for text in (line, trace))
    if len(raw) > (most := _LINE_BYTES if rest else _REASON_BYTES):
        raw = raw[: most - 3].decode("utf-8", "ignore").encode() + b"..."
    if len(raw) + len(rest) > _REASON_BYTES:
        rest = b"\n..." + rest[len(raw) + 4 - _REASON_BYTES :].decode("utf-8", "ignore").encode()
    return raw + rest


class Ring:
    """One attachment to a broker. One thread at a time uses it."""

    def __init__(self, model: str, signature: str, options: c.WorkerOptions, packed: bool = False) -> None:
        self.lib = lib = load()
        out = c_uint64()
        check(lib, lib.rb_worker_attach(model.encode(), signature.encode(), addressof(options), addressof(out)))
        self._handle = out.value
        refusal.attached()
        info, m = c.Model(), c.Map()
        check(lib, lib.rb_worker_model(self._handle, addressof(info)))
        check(lib, lib.rb_worker_map(self._handle, addressof(m)))
        self.packed = packed  # the worker takes and returns rows of variable size packed
        self.model, self.slots, self.max_batch_size = model, int(info.slots), int(info.max_batch_size)
        self.signature = signature_of(lib, lib.rb_worker_tensor, self._handle, info)
        #: Stays mapped until the last array over it is gone.
        self.mapping = SharedMapping(lib, m)
        #: The output that a client may take in parts.
        self.growing = growing(self.signature.outputs)
        self.mapping.offsets.update((t, t.offset) for t in self.signature.inputs + self.signature.outputs + self.signature.state)
        notes = c_char_p()
        check(lib, lib.rb_worker_notes(self._handle, addressof(notes)))
        for note in (notes.value or b"").decode().splitlines():
            log.warning("model %s has another policy than this worker: %s", model, note)
        # For the extension: inputs of numbers, of one shape on the host; and the outputs, if all of them are.
        self.plain_inputs, outputs = (
            tuple((k, t.name, t.dtype, t.shape, t.row_bytes) for k, t in enumerate(side) if not (t.variable or t.on_device or t.is_text))
            for side in (self.signature.inputs, self.signature.outputs)
        )  # fmt: skip
        self.plain_outputs = outputs if len(outputs) == len(self.signature.outputs) else ()
        self._unwanted, self._count = (c_uint64 * 256)(), c_uint32()
        self._unwanted_at, self._count_at = addressof(self._unwanted), addressof(self._count)
        # The usual case: all rows of the model have one shape.
        self.one_shape = None if self.signature.variable_inputs else [t.shape for t in self.signature.inputs]

    def next(self, timeout_ns: int) -> RingBatch | None:
        """The next batch, None at the timeout; raises BrokerGone."""
        found = next_batch(self._handle, timeout_ns)
        if found is None:
            return None
        if type(found) is tuple:
            return RingBatch(self, *found)
        raise last_error(self.lib, found)  # type: ignore[arg-type]

    def wait(self, timeout_ns: int) -> bool:
        """Waits until next(0) would find a batch; False at the timeout. Raises BrokerGone.
        A second thread may wait here while the first uses the ring, except for next."""
        status = self.lib.rb_worker_wait(self._handle, timeout_ns)
        if status in (0, errors.Timeout.status):
            return status == 0
        raise last_error(self.lib, status)

    def unwanted(self) -> Sequence[int]:
        """The addresses of batches in hand of which no client waits for a request any more."""
        check(self.lib, self.lib.rb_worker_unwanted(self._handle, self._unwanted_at, len(self._unwanted), self._count_at))
        return self._unwanted[: self._count.value] if self._count.value else ()

    def close(self) -> None:
        """Detaches. Uncompleted batches fail."""
        self.lib.rb_worker_close(self._handle)


def keep_attached(attach: Callable[[], Ring], serve: Callable[[Ring], None], stop: Stop, wait: Duration = 0.0) -> None:
    """Attaches and serves until stop is set; attaches again when the broker is restarted.

    wait: how long to wait for the first broker. A broker that was there is
    waited for without end. An error that another try would repeat
    (``retry_attach`` is False: a wrong version or signature) is raised.
    """
    patience, pauses, pause = time.monotonic() + not_negative("wait", wait), Pauses(), 0.0
    while not stop.wait(pause):
        try:
            ring = attach()
        except errors.Error as e:
            if isinstance(e, (errors.BrokerGone, errors.Draining)):  # the broker is being restarted
                patience = float("inf")
            later = pauses.next(patience)
            if not e.retry_attach or later is None:
                raise
            pause = later
            continue
        patience, attached = float("inf"), time.monotonic()
        try:
            serve(ring)
        except errors.BrokerGone:
            log.info("broker went away, attaching %s again", ring.model)
        except Lost as e:
            end_process(e)  # without answers: the broker gives the batches to other workers
        except BaseException:
            ring.close()
            raise
        ring.close()
        if time.monotonic() - attached > 1:
            pauses = Pauses()
        pause = pauses.next() or 0.0


class Lane(Protocol):
    """Room for one batch. An exception fails the batch; Lost, or a GPU that is lost, ends the process."""

    def submit(self, batch: RingBatch) -> None:
        """Starts a batch; it may be done when this returns."""

    def done(self) -> bool:
        """Whether the batch is done."""

    def wait(self) -> None:
        """Waits until the batch is done."""

    def patience(self) -> int:
        """Nanoseconds to wait for another batch before done is called again."""

    def release(self) -> None:
        """Forgets the batch, before it is answered: nothing may write into its slots any more."""


def run(ring: Ring, lanes: Sequence[Lane], stop: Stop) -> None:
    """Takes a batch when a lane is free and answers batches in order, until stop is set or the broker
    goes, which raises BrokerGone. Batches on a lane are finished first.
    """
    free, busy = list(lanes), deque[tuple[Lane, RingBatch]]()
    gone: errors.BrokerGone | None = None
    while not (ended := gone is not None or stop.is_set()) or busy:
        if free and not ended:
            patience = busy[0][0].patience() if busy else SLICE_NS
            try:
                batch = ring.next(patience)
            except errors.BrokerGone as e:
                gone = e
                continue
            if batch is not None:
                lane = free.pop()
                if _submit(lane, batch):
                    busy.append((lane, batch))
                else:
                    free.append(lane)
            elif not patience:
                os.sched_yield()
        elif busy:
            busy[0][0].wait()
        while busy and busy[0][0].done():
            lane, batch = busy.popleft()
            lane.release()
            batch.complete()
            free.append(lane)
    if gone:
        raise gone


def run_one(ring: Ring, lane: Any, stop: Stop) -> None:
    """run for one lane whose batches are done when submit returns.

    If ``lane.wants_next(batch)``, the next batch is taken before this one's function runs, or
    before its answer, and ``lane.prefetch(next)`` starts to gather it.
    """
    ahead: RingBatch | None = None
    gone: errors.BrokerGone | None = None

    def look_ahead(batch: RingBatch) -> None:
        nonlocal ahead, gone
        if ahead is not None or gone or stop.is_set() or not lane.wants_next(batch):
            return
        try:
            ahead = ring.next(0)
        except errors.BrokerGone as e:
            gone = e
        if ahead is not None:
            try:
                lane.prefetch(ahead)
            except Exception:  # for example MemoryError; the present batch is still answered
                log.exception("the rows of the next batch could not be gathered ahead")

    while ahead is not None or not (stop.is_set() or gone):
        batch, ahead = ahead or ring.next(SLICE_NS), None
        if batch is None:
            continue
        look_ahead(batch)
        if _submit(lane, batch):
            look_ahead(batch)
            lane.release()
            batch.complete()
    if gone:
        raise gone


def _submit(lane: Any, batch: RingBatch) -> bool:
    """False if the batch failed and was answered."""
    try:
        lane.submit(batch)
        return True
    except BaseException as e:
        fail(batch, e, lane.release)
        return False


def fail(batch: RingBatch, e: BaseException, release: Callable[[], None]) -> None:
    """Answers a batch that failed with e, and raises e again unless it is an Exception. If the GPU is lost, the process ends
    without an answer. release: forgets the batch, before it is answered."""
    if isinstance(e, Exception):
        log.error("a batch of %d rows failed", batch.rows, exc_info=e)
        end_if_lost(e)
    release()
    batch.answer_failed(e)
    if not isinstance(e, Exception):
        raise e
