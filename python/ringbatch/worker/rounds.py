# SPDX-License-Identifier: Apache-2.0
"""Lanes: rows that go round together in one worker, each from its own start to its own end.

1. free lanes take new rows, without waiting while other lanes are busy: ``start``
2. all busy lanes go one round: ``step``. Outputs of variable size grow in their slots, where streams see them
3. each row that is done is answered alone; a row that nobody awaits leaves its lane

A row is a batch of its own for the broker (``max_batch_size=1``), so that retries, deadlines,
sequences and sleep are those of all batches.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from .. import errors
from ..binding.library import SLICE_NS
from ..binding.tensors import Declared, Tensor
from ..binding.views import strided
from ..weights.following import Follower
from .lost_gpu import end_if_lost
from .outputs import _same_kind, steps
from .ring import Ring, RingBatch, Stop
from .states import as_array

log = logging.getLogger("ringbatch")

MOST_LANES, _MOST_BATCHES = 240, 256  # a mailbox has room for so many batches
_AHEAD = 8  # for so many lanes one more row is handed over, which the next free lane takes at once


def depth_of(lanes: int) -> int:
    """The batches that a worker with so many lanes may hold."""
    return min(_MOST_BATCHES, lanes + max(1, lanes // _AHEAD))


def check_lanes(
    lanes: int, inputs: Sequence[Declared], outputs: Sequence[Declared], others: Mapping[str, Any], policy: dict[str, Any]
) -> None:  # fmt: skip
    """Refuses what does not go with lanes, and completes the policy."""
    if not isinstance(lanes, int) or lanes is True or not 1 <= lanes <= MOST_LANES:
        raise errors.Invalid(f"lanes={lanes!r}: want 1 to {MOST_LANES}")
    for name, value in others.items():
        if value:
            raise errors.Invalid(f"a worker with lanes takes each row alone: leave {name} out")
    if str(policy.setdefault("max_batch_size", 1)) != "1":
        raise errors.Invalid(f"a worker with lanes={lanes} holds that many rows, and each is answered alone: leave max_batch_size out")
    for t in [*inputs, *outputs]:
        if t.kind == "str":
            raise errors.Invalid(f"{t}: a worker with lanes takes numbers: declare uint8 for the bytes of a text")
    for t in outputs:
        if any(t.variable) and t.variable != (0,):
            raise errors.Invalid(f"output {t}: of a worker with lanes only the first dimension varies, since rows are appended")


def check_model(model: Any) -> Any:
    """The object that goes round, or its class."""
    for name, arguments in (("start", "lanes, rows"), ("step", "lanes")):
        method = getattr(model, name, None)
        if not callable(method) or inspect.iscoroutinefunction(method):
            raise errors.Invalid(f"{model!r} has no {name}(self, {arguments}): a worker with lanes is a class with start and step, which "
                "are no coroutines")
    return model


class NewRows:
    """The rows that begin: ``inputs[name]`` and ``state[name]`` have one entry for each, in the order of their lanes.
    An input of variable size is a list of arrays."""

    #: The live weights, read-only arrays by name. They stay until no lane is busy; with ``mix_versions`` until ``start`` returns.
    weights: Mapping[str, np.ndarray] = MappingProxyType({})
    #: The version of the live weights; 0 if the worker follows none.
    version = 0

    def __init__(self, ring: Ring, batches: Sequence[RingBatch], slots: np.ndarray, halves: np.ndarray) -> None:
        sig, m = ring.signature, ring.mapping
        self.inputs: dict[str, Any] = {}
        for t in sig.inputs:
            if t.variable:
                rows = (m.rows(t, slot, 1, t.actual(b.c.request[0].dims))[0] for b, slot in zip(batches, slots.tolist()))
                self.inputs[t.name] = [np.array(row) for row in rows]
            else:
                self.inputs[t.name] = m.plane(t)[slots]
        self.state = {t.name: m.plane(t)[halves] for t in sig.state}
        self._batches = batches

    @property
    def fresh(self) -> np.ndarray:
        """Whether each row begins its sequence, so that its state is zero."""
        return np.array([bool(b.fresh()[0]) for b in self._batches])

    def __len__(self) -> int:
        return len(self._batches)


class _Growing:
    """An output of variable size: all slots of it, and how far each lane's row has grown."""

    def __init__(self, ring: Ring, t: Tensor, lanes: int) -> None:
        m = ring.mapping
        self.t, self.most, self.rest = t, t.shape[0], t.shape[1:]
        self.plane = strided(m.memory, t.dtype, m.offsets[t], t.stride, (ring.slots, *t.shape))
        self.size = np.zeros(lanes, np.intp)
        self._room = 0  # elements that every row surely has room for

    def grow(self, lanes: np.ndarray, slots: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Appends ``values[i]``, one element or some, to the row of ``lanes[i]`` in its slot. Returns the lanes whose row has no room."""
        one = values.ndim == 1 + len(self.rest)
        n = 1 if one else values.shape[1]
        if self._room < n:
            self._room = self.most - int(self.size[lanes].max())
            if self._room < n:
                return self.grow_each(lanes, slots, [v[None] for v in values] if one else list(values))
        self._room -= n
        all_busy = lanes.size == self.size.size
        at = self.size if all_busy else self.size[lanes]
        if one:
            self.plane[slots, at] = values
        else:
            self.plane[slots[:, None], at[:, None] + np.arange(n)] = values
        if all_busy:
            at += n
        else:
            self.size[lanes] = at + n
        return lanes[:0]

    def grow_each(self, lanes: np.ndarray, slots: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
        """The same with any number of elements for each row."""
        at, n = self.size[lanes], np.array([len(part) for part in parts])
        fits = at + n <= self.most
        n[~fits] = 0
        row = np.repeat(np.arange(n.size), n)
        if row.size:
            element = np.arange(row.size) - (n.cumsum() - n)[row]
            self.plane[slots[row], at[row] + element] = np.concatenate([part for part, size in zip(parts, n) if size])
        self.size[lanes] = at + n
        self._room = 0
        return lanes[~fits]


def _errors_of(method: str, failed: Any) -> dict[int, Any]:
    if failed is None:
        return {}
    if not isinstance(failed, Mapping):
        raise errors.Invalid(f"{method} returned {type(failed).__name__} for the rows that fail: want {{lane: error}}, or None")
    return dict(failed)


class Rounds:
    """Serves one attachment with a model that has ``start`` and ``step``."""

    def __init__(
        self, ring: Ring, model: Any, lanes: int, follower: Follower | None, run_once: bool, mix_versions: bool = False
    ) -> None:  # fmt: skip
        sig = ring.signature
        if ring.max_batch_size != 1 and "/" not in ring.model:
            raise errors.Invalid(f"model {ring.model!r} was declared with max_batch_size={ring.max_batch_size}: with lanes each row is "
                "answered alone; declare it with max_batch_size=1")
        if any(t.on_device for t in [*sig.inputs, *sig.outputs, *sig.state]):
            raise errors.Invalid("the tensors of a worker with lanes are in host memory: leave memory and @device out")
        self._ring, self._model, self._follower, self._run_once, self._lanes = ring, model, follower, run_once, lanes
        self._batch: list[RingBatch | None] = [None] * lanes
        self._lane_of: dict[int, int] = {}  # by the batch's address
        self._free = list(range(lanes))[::-1]
        self._round, self._begun = 0, [0] * lanes  # the number of the round, and of the first one of each lane's row
        self._slot = np.zeros(lanes, np.intp)
        self._half = np.zeros(lanes, np.intp)  # that the row's step reads
        self._growing = {t.name: _Growing(ring, t, lanes) for t in sig.outputs if t.variable}
        self._shown: dict[int, int] = {}  # of lanes whose client takes parts: how much of the growing output it may have seen
        self._fixed = {t.name: t for t in [*sig.outputs, *sig.state] if not t.variable}
        self._names = {t.name for t in [*sig.outputs, *sig.state]}
        self._wanted = {t.name for t in [*sig.outputs, *sig.state] if t.row_bytes}  # nobody has to write nothing
        self._busy = self._busy_slots = self._slot[:0]
        self._changed = False  # lanes are busy or free that were not when _busy was counted
        self._suspects: list[list[RingBatch]] = []  # rows of a round that failed: each list begins again by itself
        self._entered = False  # the follower
        self._weights: dict[str, Any] = {}
        self._mix_versions = mix_versions  # the weights may change while lanes are busy

    def run(self, stop: Stop) -> None:
        """Serves until stop is set and busy lanes are done. Raises BrokerGone."""
        try:
            while True:
                if not self._lane_of and self._entered:
                    self._leave_weights()
                if self._suspects:
                    if not self._lane_of:
                        self._start([b for b in self._suspects.pop() if self._is_wanted(b)])
                elif not stop.is_set():
                    self._start(self._take())
                elif not self._lane_of:
                    return
                if self._lane_of:
                    self._go_round()
        except errors.BrokerGone:
            raise
        except BaseException as e:  # the worker ends, and others run its rows
            for batch in [*filter(None, self._batch), *itertools.chain(*self._suspects)]:
                batch.answer_failed(e)
            raise
        finally:
            if self._entered:
                self._leave_weights()

    def _take(self) -> list[RingBatch]:
        """New rows, for free lanes; waits for one if no lane is busy. Before newer weights come, the lanes run dry."""
        if self._runs_dry():
            return []
        new: list[RingBatch] = []
        patience = 0 if self._lane_of else SLICE_NS
        while len(new) < len(self._free):
            batch = self._ring.next(patience)
            if batch is None:
                break
            if batch.rows == 1:
                new.append(batch)
                patience = 0
            else:
                batch.answer_failed(errors.Rows(f"a worker with lanes got a batch of {batch.rows} rows: its model has max_batch_size=1"))
        if new and self._runs_dry():  # the version was published before some of them were sent
            self._suspects.append(new)
            return []
        return new

    def _runs_dry(self) -> bool:
        return self._entered and not self._mix_versions and self._follower is not None and self._follower.is_newer()

    def _start(self, new: list[RingBatch]) -> None:
        if not new:
            return
        taken = [self._free.pop() for _ in new]
        lanes, slots = np.array(taken), np.array([b.c.slot[0] for b in new], np.intp)
        self._slot[lanes] = slots
        if self._ring.signature.state:
            self._half[lanes] = [int(b.halves()[0]) for b in new]
        for lane, batch in zip(taken, new):
            self._batch[lane], self._lane_of[batch.at], self._begun[lane] = batch, lane, self._round
            if batch.is_streamed(0):
                batch.show(0, 0)  # a row that begins again takes back what was shown
                self._shown[lane] = 0
        for g in self._growing.values():
            g.size[lanes] = 0
        self._changed = True
        try:
            rows = NewRows(self._ring, new, slots, self._half[lanes])
            if self._follower is not None:
                self._enter_weights(self._follower)
                rows.version, rows.weights = self._follower.version, self._weights
                for batch in new:
                    batch.set_version(rows.version)
            self._fail(_errors_of("start", self._model.start(lanes.copy(), rows)))
        except Exception as e:
            self._divide(lanes, e)

    def _go_round(self) -> None:
        for at in self._ring.unwanted():
            if at in self._lane_of:
                self._answer(self._lane_of[at])
        lanes = self._count_busy()
        if not lanes.size:
            return
        self._round += 1
        try:
            if self._mix_versions and self._follower is not None:
                self._enter_weights(self._follower)
                result = self._model.step(lanes.copy(), self._weights)
            else:
                result = self._model.step(lanes.copy())
            if not isinstance(result, tuple) or len(result) not in (2, 3):
                raise errors.Invalid(f"step returned {type(result).__name__}: want outputs, done; or outputs, done, {{lane: error}}")
            done = self._of_lanes("done", result[1], lanes)
            if done.dtype.kind != "b" or done.ndim != 1:
                raise errors.Invalid(f"step: done is one bool for each lane; got {done.dtype} of shape {done.shape}")
            failed = _errors_of("step", result[2] if len(result) == 3 else None)
            ended = lanes[done]
            self._write(result[0], lanes, done, ended, failed)
            self._show()
            self._fail(failed)
        except Exception as e:
            self._divide(lanes, e)
            return
        for lane in ended.tolist():
            if self._batch[lane] is not None:
                self._answer(lane)

    def _of_lanes(self, name: str, value: Any, lanes: np.ndarray) -> np.ndarray:
        """An array with an entry for each busy lane, of one that may have an entry for every lane."""
        array = value if type(value) is np.ndarray else as_array(value)
        n = len(array) if array.ndim else 0
        if n == lanes.size:
            return array
        if n == self._lanes:
            return array[lanes]
        raise errors.Shape(f"step: {name} has shape {array.shape}; want {lanes.size} entries, for the busy lanes, or {self._lanes}")

    def _write(self, outputs: Any, lanes: np.ndarray, done: np.ndarray, ended: np.ndarray, failed: dict[int, Any]) -> None:
        """Appends to outputs of variable size, and writes the others of rows that are done."""
        if (type(outputs) is not dict and not isinstance(outputs, Mapping)) or not outputs.keys() <= self._names:
            said = ", ".join(map(str, outputs)) if isinstance(outputs, Mapping) else type(outputs).__name__
            raise errors.Invalid(f"step returned {said}; want a dict of {', '.join(sorted(self._names))}")
        if ended.size and len(outputs) < len(self._names) and (missing := self._wanted - outputs.keys()):
            raise errors.Invalid(f"step ends a row, and returned no {', '.join(sorted(missing))}")
        for name, value in outputs.items():
            if name in self._growing:
                self._append(self._growing[name], value, lanes, failed)
            elif ended.size:
                t, values = self._fixed[name], self._of_lanes(name, value, lanes)[done]
                if values.shape[1:] != t.shape:
                    raise errors.Shape(f"{name!r}: expected rows of {t.expected_row}; got shape {values.shape[1:]}")
                to = self._half[ended] ^ 1 if name in self._ring.signature.state_index else self._slot[ended]
                self._ring.mapping.plane(t)[to] = _same_kind(t, values)

    def _append(self, g: _Growing, value: Any, lanes: np.ndarray, failed: dict[int, Any]) -> None:
        """Value: an element for each lane, as many elements for each, or a list with a number of elements for each."""
        if isinstance(value, (list, tuple)):
            if len(value) not in (lanes.size, self._lanes):
                raise errors.Shape(f"step: {g.t.name} is a list of {len(value)}; want {lanes.size} arrays, one for each busy lane, or "
                    f"{self._lanes}")
            parts = [steps(g.t, value[k]) for k in (range(lanes.size) if len(value) == lanes.size else lanes.tolist())]
            parts = [part.reshape(0, *g.rest) if not part.size else part[None] if part.ndim == len(g.rest) else part for part in parts]
            if wrong := [part.shape for part in parts if part.shape[1:] != g.rest or part.ndim != 1 + len(g.rest)]:
                raise errors.Shape(f"output {g.t.name!r}: {g.t.expected_row} grows by elements of shape {g.rest}; got shape {wrong[0]}")
            full = g.grow_each(lanes, self._busy_slots, parts)
        else:
            values = self._of_lanes(g.t.name, value, lanes)
            if not values.size:
                return
            if values.ndim - len(g.rest) not in (1, 2) or values.shape[values.ndim - len(g.rest) :] != g.rest:
                raise errors.Shape(f"output {g.t.name!r}: {g.t.expected_row} grows by elements of shape {g.rest}; got shape "
                    f"{values.shape[1:]}")
            full = g.grow(lanes, self._busy_slots, values if values.dtype == g.t.dtype else _same_kind(g.t, values))
        for lane in full.tolist():
            failed.setdefault(lane, errors.Size(f"output {g.t.name!r} has at most {g.most}, and the row grew beyond: say done before"))

    def _show(self) -> None:
        """Shows the streams' clients how far their rows have grown."""
        for lane, shown in self._shown.items():
            batch, t = self._batch[lane], self._ring.growing
            assert batch is not None and t is not None
            if (size := int(self._growing[t.name].size[lane])) > shown:
                batch.show(0, size)
                self._shown[lane] = size

    # -- the end of rows

    def _fail(self, failed: Mapping[int, Any]) -> None:
        """Ends the rows of some lanes with an error each."""
        for lane, error in failed.items():
            is_lane = isinstance(lane, (int, np.integer)) and not isinstance(lane, bool) and 0 <= lane < self._lanes
            batch = self._batch[lane] if is_lane else None
            if batch is None:
                raise errors.Invalid(f"{{lane: error}} names lane {lane} ({error}), which has no row")
            batch.fail(0, error)
            self._answer(int(lane), failed=True)

    def _answer(self, lane: int, failed: bool = False) -> None:
        batch = self._release(lane)
        batch.set_rounds(self._round - self._begun[lane])
        if self._growing and not failed:
            try:
                batch.set_row_dims(0, [int(g.size[lane]) for g in self._growing.values()])
            except errors.Shape as e:  # the dimension has the name of an input's, which has another size
                batch.fail(0, e)
        batch.complete()

    def _release(self, lane: int) -> RingBatch:
        batch, self._batch[lane] = self._batch[lane], None
        assert batch is not None
        del self._lane_of[batch.at]
        self._free.append(lane)
        self._shown.pop(lane, None)
        self._changed = True
        return batch

    def _divide(self, lanes: np.ndarray, e: Exception) -> None:
        """After an exception: the rows begin again in halves, each by itself, down to the one that is to blame. With
        run_once all of them fail."""
        log.error("a round of %d rows failed", lanes.size, exc_info=e)
        end_if_lost(e)
        rows = [self._release(lane) for lane in lanes.tolist() if self._batch[lane] is not None]
        if len(rows) > 1 and not self._run_once:
            self._suspects += [rows[len(rows) // 2 :], rows[: len(rows) // 2]]
            return
        for batch in rows:
            batch.answer_failed(e)

    def _is_wanted(self, batch: RingBatch) -> bool:
        if not batch.wanted():
            batch.complete()
            return False
        return True

    def _count_busy(self) -> np.ndarray:
        """The busy lanes, in order."""
        if self._changed:
            self._busy = np.array(sorted(self._lane_of.values()), np.intp)
            self._busy_slots, self._changed = self._slot[self._busy], False
        return self._busy

    def _enter_weights(self, follower: Follower) -> None:
        """Takes the version in force, if no version was taken or rows may mix them."""
        if self._entered and self._mix_versions and follower.is_newer():
            self._leave_weights()
        if not self._entered:
            follower.enter()
            self._entered, self._weights = True, follower.arrays()

    def _leave_weights(self) -> None:
        assert self._follower is not None
        self._entered = False
        self._follower.exit()
