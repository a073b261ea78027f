# SPDX-License-Identifier: Apache-2.0
"""Models that a client asked for by an alias.

A connection moves to other versions by itself while they have its signature.
If the alias changes to a model of another signature, a call goes on with a
further connection, if its arrays fit.
"""

from __future__ import annotations

import concurrent.futures
import threading
import weakref
from typing import Any, Callable

from .. import errors
from ..binding.tensors import Tensor
from .connection import Core
from .model import Model
from .retrying import RetryingModel
from .sequence import Sequence
from .stream import Stream

_MISFITS = (errors.SignatureMismatch, errors.Shape, errors.DType, errors.Rows, errors.Size, errors.Invalid)
_LOOK_TIME = 0.2  # for room in the window


class FollowingModel(Model):
    """The model of ``connect(alias)``. A further connection lives while it serves, or a call, a future, a sequence or a stream
    refers to it."""

    def _start(self, again: Callable[[], Core]) -> None:
        self._again = again
        self._making = threading.Lock()  # held while a further connection is made
        self._now: Model | None = None  # None: the first connection serves
        self._further: weakref.WeakSet[Model] = weakref.WeakSet()
        self._futures: dict[concurrent.futures.Future, Model] = {}  # in flight, by their connection

    def _follow(self, now: Model | None) -> None:
        """Connects again, if now is still the serving connection."""
        with self._making:
            if self._now is not now:
                return
            self._check()
            core = self._again()
            # Back to the first connection, unless now is the first one, which has only not heard of the change yet.
            if now is not None and str(core.signature) == str(self._core.signature):
                core.close()
                self._now = None
            else:
                self._now = Model(core, self._socket, self._cast)
                self._further.add(self._now)

    @staticmethod
    def _moved(model: Model) -> bool:
        """Whether the alias has another signature than this connection: claiming a slot shows it."""
        try:
            model.request(timeout=_LOOK_TIME).release()
        except (errors.SignatureMismatch, errors.Closed):  # closed: another thread has followed
            return True
        except errors.Error:
            pass
        return False

    def _follow_unless_wrong(self, now: Model | None, error: errors.Error) -> None:
        """Follows if a call's arrays may fit the alias's present model; raises if they do not."""
        if not isinstance(error, errors.SignatureMismatch) and not self._moved(now or self):
            try:
                raise self._misfit(now, error) from None
            finally:
                del error  # or it would keep this frame, and its connection, until a garbage collection
        self._follow(now)

    def _misfit(self, now: Model | None, error: errors.Error) -> errors.Error:
        """The error of a call whose arrays do not fit: SignatureMismatch if the signature has changed."""
        was = self._core.signature
        if now is None or str(now._core.signature) == str(was):
            return error
        return errors.SignatureMismatch(f"{self.name} is {now._core.signature} now, it was {was} when this client connected ({error})")

    def _call_on(self, method: Callable[..., Any], inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        while True:
            now = self._now
            try:
                answer = method(now or self, *inputs, **named)
            except _MISFITS as e:
                self._follow_unless_wrong(now, e)
                continue
            if now is not None and isinstance(answer, concurrent.futures.Future):
                self._futures[answer] = now
                answer.add_done_callback(lambda future: self._futures.pop(future, None))
            return answer

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self._call_on(Model.__call__, inputs, named)

    def infer(self, *inputs: Any, **named: Any) -> Any:
        return self._call_on(Model.infer, inputs, named)

    _call = Model.infer  # for the base's __call__

    def submit(self, *inputs: Any, **named: Any) -> concurrent.futures.Future:
        return self._call_on(Model.submit, inputs, named)

    def stream(self, *inputs: Any, **named: Any) -> Stream:
        return self._call_on(Model.stream, inputs, named)

    def sequence(self, *rows: Any, **named: Any) -> Sequence:
        return self._call_on(Model.sequence, rows, named)

    async def ainfer(self, *inputs: Any, **named: Any) -> Any:
        while True:
            now = self._now
            try:
                return await Model.ainfer(now or self, *inputs, **named)
            except _MISFITS as e:
                self._follow_unless_wrong(now, e)

    # -- about the present model

    @property
    def inputs(self) -> list[Tensor]:
        return list((self._now or self)._core.signature.inputs)

    @property
    def outputs(self) -> list[Tensor]:
        return list((self._now or self)._core.signature.outputs)

    @property
    def state(self) -> list[Tensor]:
        return list((self._now or self)._core.signature.state)

    def close(self) -> None:
        with self._making:
            others = list(self._further)
        for other in others:
            other.close()
        super().close()


class RetryingFollowingModel(RetryingModel, FollowingModel):
    """Sends requests again, to the alias's model of that moment."""
