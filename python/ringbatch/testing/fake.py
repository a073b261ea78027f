# SPDX-License-Identifier: Apache-2.0
"""``FakeModel``: a model without a broker."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from .. import errors
from ..binding import structs as c
from ..binding import texts
from ..binding.library import Duration, nanoseconds
from ..binding.tensors import NAMES, Signature, Tensor, parse, sides
from ..client.future import Future
from ..client.model import Model
from ..client.request import chosen
from ..serve.targets import Served, check, worker_of
from ..worker.outputs import Item, _read_only, _same_kind
from ..worker.returned import by_name, forgotten
from ..worker.ring import _reason
from ..worker.states import as_array
from ..worker.worker import _is_async


class FakeModel(Model):
    """A model without a broker: it takes the calls of ``rb.connect(...)``, and runs the worker's function at once.

    ``monkeypatch.setattr(rb, "connect", lambda *_, **__: FakeModel(net))`` gives it to a program. It checks inputs and outputs as
    a broker's model does, with the same errors. A request is a batch of its own. It has no slots, no state and no deadlines:
    ``request`` and ``sequence`` raise Invalid; test those with :func:`running`.
    """

    #: While this is set, each call raises it: ``fake.error = rb.Expired("too late")``.
    error: BaseException | None = None

    _core: Any = property(lambda self: self._fake_core)  # type: ignore[assignment]  # the base takes a connection only
    _unwarned = False

    def __init__(self, worker: Served, *, cast: bool = False) -> None:
        check(worker)
        worker, self._cast = worker_of(worker), cast
        reads, writes, keeps = sides(worker.signature)
        policy = dict(line.split("=", 1) for line in (worker._options.policy or b"").decode().splitlines())
        has = ["state"] * bool(keeps) + ["tensors on a GPU"] * ("@" in worker.signature)
        has += ["ragged or packed rows"] * (policy.get("ragged", "").lower() in ("true", "t", "1"))
        has += ["named dimensions"] * any(any(parse(d).names) for d in [*reads, *writes])
        has += ["lanes"] * bool(worker._options.lanes)
        has += ["a coroutine function"] * _is_async(worker.function)
        if has:
            raise errors.Invalid(f"{worker.model} has {' and '.join(has)}, which no FakeModel has: use ringbatch.testing.running")
        self._function = worker._made(None)
        levels, most = int(policy.get("priorities", 1)), int(policy.get("max_batch_size", 32))
        self._fake_core = SimpleNamespace(
            name=worker.model, model=worker.model, signature=Signature(_tensors(reads), _tensors(writes), []), closed=False, in_c=False,
            info=SimpleNamespace(max_batch_size=most, window=most, wait_time=-1, levels=levels), rows_of=lambda inputs: 0,
        )  # fmt: skip

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.infer(*inputs, **named)

    def infer(
        self, *inputs: Any, timeout: Duration | None = None, priority: int | None = None, cost: int | None = None, split: bool = True,
        version: bool = False, **named: Any,
    ) -> Any:
        self._check()
        arrays, rows = self._arrays(inputs, named)
        if nanoseconds(timeout) == 1:
            raise errors.Expired("the request's deadline passed")
        chosen(self._core, priority, cost)
        if (priority or 0) >= self._core.info.levels:
            raise errors.NoLevel(f"no such priority level: {priority}, the model has 0..{self._core.info.levels - 1}")
        if self.error is not None:
            raise self.error
        most, single = self.max_batch_size, rows < 0
        if not split and rows > most:
            raise errors.TooLarge(f"the request has more rows than max_batch_size: {rows} rows, at most {most}")
        every = [a[None] if single else a for a in arrays]
        parts = [self._answers([a[i : i + most] for a in every]) for i in range(0, abs(rows), most)]
        outs = [[row for part in parts for row in part[k]] for k in range(len(self.outputs))]
        given = [rows[0] if single else _together(rows) for rows in outs]
        answer = given[0] if len(given) == 1 else dict(zip(self._core.signature.output_names, given))
        return (answer, 0) if version else answer

    def _answers(self, arrays: list[np.ndarray]) -> list[list[np.ndarray]]:
        """The rows of each output."""
        batch: Any = _Batch(self._core.signature, arrays)
        try:
            return batch.answers(self._function(batch))
        except Exception as e:
            if e is batch._failed_with:
                raise
            raise errors.Failed(_reason(e).decode()) from e

    def submit(self, *inputs: Any, **named: Any) -> Future:
        future = Future()
        try:
            future.set_result(self.infer(*inputs, **named))
        except errors.Error as e:
            future.set_exception(e)
        return future

    async def ainfer(self, *inputs: Any, **named: Any) -> Any:
        return self.infer(*inputs, **named)

    def _has_none(self, *_: Any, **__: Any) -> Any:
        raise errors.Invalid(f"{self.name} is a FakeModel, without slots and statistics: use ringbatch.testing.running")

    request = commit = sequence = mapping = stats = _has_none

    def close(self) -> None:
        self._core.closed = True


def _tensors(texts: list[str]) -> list[Tensor]:
    found: list[Tensor] = []
    for d in map(parse, texts):
        t = c.Tensor(name=d.name.encode(), dtype=1 + NAMES.index(d.kind), rank=len(d.shape), variable=sum(1 << i for i in d.variable))
        t.shape[: len(d.shape)] = d.shape
        for i, name in zip(d.variable, d.names):
            t.dim[i].value = name.encode()
        found.append(Tensor(t, sum(len(f.variable) for f in found)))
    return found


def _together(rows: list[Any]) -> Any:
    """Rows as an array, unless they are text or differ in shape."""
    return np.stack(rows) if isinstance(rows[0], np.ndarray) and len({r.shape for r in rows}) == 1 else rows


class _Outputs(dict[str, np.ndarray]):
    """Arrays that are made when the function touches them."""

    def __init__(self, rows: int, tensors: list[Tensor]) -> None:
        self._rows, self._tensors = rows, {t.name: t for t in tensors}

    def __missing__(self, name: str) -> np.ndarray:
        t = self._tensors[name]
        if t.is_text:
            raise errors.Invalid(f"{name!r} is text, and has no array: return a list with a str for each row")
        self[name] = made = np.zeros((self._rows, *t.shape), t.dtype)
        return made


class _Batch:
    """The part of ringbatch.Batch that needs no shared memory, for one request."""

    contiguous, ragged, version = True, False, 0
    weights: Mapping[str, np.ndarray] = MappingProxyType({})
    _asked_runs, _packed = (), False
    _failed_with: errors.Error | None = None

    def __init__(self, signature: Signature, arrays: list[np.ndarray]) -> None:
        self._sig = signature
        self.rows = self.padded = len(arrays[0])
        self.inputs = {t.name: texts.decode(a, t) if t.is_text else _read_only(a.copy()) for t, a in zip(signature.inputs, arrays)}
        self.outputs = self._made_out = _Outputs(self.rows, signature.outputs)
        self.fresh = np.ones(self.rows, bool)
        dims = tuple(self.inputs[t.name].shape[1 + i] for t in signature.inputs for i in t.variable)
        self.requests = [Item(0, self.rows, 0.0, 0.0, dims)]

    def __len__(self) -> int:
        return self.rows

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the batch of a FakeModel has no {name!r}: test this function with ringbatch.testing.running")

    def input_shape(self, row: int, name: str) -> tuple[int, ...]:
        return self.inputs[name].shape[1:]

    def request_of(self, row: int) -> int:
        return 0

    def fail(self, i: int, error: Any) -> None:
        self._failed_with = error if isinstance(error, errors.Error) else errors.Failed(_reason(error).decode())

    def answers(self, result: Any) -> list[Any]:
        """The rows of each output, checked as ringbatch.Batch does."""
        returned = {} if result is None or result is self.outputs else by_name(self, result)[0]
        if self._failed_with:
            raise self._failed_with
        found = {**returned, **self.outputs}
        return [self._rows_of(t, found) for t in self._sig.outputs]

    def _rows_of(self, t: Tensor, found: Mapping[str, Any]) -> list[np.ndarray]:
        value = found.get(t.name)
        if value is None:
            raise forgotten(t.name, found, self._sig.output_names)
        if t.is_text:
            if isinstance(value, str) or not hasattr(value, "__len__") or len(value) != self.rows:
                raise errors.Shape(f"output {t.name!r}: expected a list of {self.rows} rows of {t.expected_row}")
            encoded = [texts.encode(row, t, "output") for row in value]
            for text in encoded:
                if text.shape != t.shape:
                    raise errors.Shape(f"output {t.name!r}: expected rows of {t.expected_row}; got shape {text.shape[:-1]}")
            return [texts.decode(text, t) for text in encoded]
        rows = [as_array(row) for row in (value if t.variable and isinstance(value, (list, tuple)) else as_array(value))]
        if len(rows) != self.rows:
            raise errors.Rows(f"output {t.name!r}: a batch of {self.rows} rows, got {len(rows)}")
        for row in rows:
            if not t.holds(row.shape):
                raise errors.Shape(f"output {t.name!r}: expected a row of {t.expected_row}; got shape {row.shape}")
        return [_same_kind(t, row) for row in rows]
