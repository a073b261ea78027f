# SPDX-License-Identifier: Apache-2.0
"""Models that a client asked for by an alias.

A connection moves to other versions by itself while they have its signature.
If the alias changes to a model of another signature, a call goes on with a
further connection, if its arrays fit.
"""

from __future__ import annotations

import concurrent.futures
import threading
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


class _Further(Model):
    """A connection to the alias's present model, whose signature differs from the first."""

    users = 0  # calls in flight


class FollowingModel(Model):
    """The model of ``connect(alias)``."""

    def _start(self, again: Callable[[], Core]) -> None:
        self._again = again
        self._making = threading.Lock()  # held while a further connection is made
        self._counting = threading.Lock()  # guards the next two
        self._now: _Further | None = None  # None: the first connection serves
        self._left: list[_Further] = []  # earlier connections with calls in flight

    def _hold(self) -> _Further | None:
        """The connection that serves now; the caller releases it."""
        if self._now is None:
            return None
        with self._counting:
            now = self._now
            if now is not None:
                now.users += 1
            return now

    def _release(self, now: _Further | None, answer: Any = None) -> None:
        """Ends a call, or lets its future end it."""
        if now is None:
            return
        if isinstance(answer, concurrent.futures.Future):
            answer.add_done_callback(lambda _: self._release(now))
            return
        if isinstance(answer, Sequence):
            self._keep(now, answer)
            return
        if isinstance(answer, Stream):
            answer._at_close = lambda: self._release(now)
            return
        with self._counting:
            now.users -= 1
            over = not now.users and now in self._left
            if over:
                self._left.remove(now)
        if over:
            now.close()

    def _keep(self, now: _Further, sequence: Sequence) -> None:
        """Leaves the call to a sequence, which ends it, and to its copies."""
        sequence._at_close = lambda: self._release(now)

        def copied(other: Sequence) -> None:
            with self._counting:
                now.users += 1
            self._keep(now, other)

        sequence._at_copy = copied

    def _use(self, next_: _Further | None) -> None:
        """Changes the serving connection; the old one is closed with its last call."""
        with self._counting:
            before, self._now = self._now, next_
            if before is not None and before.users:
                self._left.append(before)
                return
        if before is not None:
            before.close()

    def _follow(self, now: _Further | None) -> None:
        """Connects again, if now is still the serving connection."""
        with self._making:
            if self._now is not now:
                return
            self._check()
            core = self._again()
            # Back to the first connection, unless now is the first one, which has only not heard of the change yet.
            if now is not None and str(core.signature) == str(self._core.signature):
                core.close()
                self._use(None)
            else:
                self._use(_Further(core, self._socket, self._cast))

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

    def _follow_unless_wrong(self, now: _Further | None, error: errors.Error) -> None:
        """Follows if a call's arrays may fit the alias's present model; raises if they do not."""
        if not isinstance(error, errors.SignatureMismatch) and not self._moved(now or self):
            raise self._misfit(now, error) from None
        self._follow(now)

    def _misfit(self, now: _Further | None, error: errors.Error) -> errors.Error:
        """The error of a call whose arrays do not fit: SignatureMismatch if the signature has changed."""
        was = self._core.signature
        if now is None or str(now._core.signature) == str(was):
            return error
        return errors.SignatureMismatch(f"{self.name} is {now._core.signature} now, it was {was} when this client connected ({error})")

    def _call_on(self, method: Callable[..., Any], inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        while True:
            now, answer = self._hold(), None
            try:
                try:
                    answer = method(now or self, *inputs, **named)
                finally:
                    self._release(now, answer)
                return answer
            except _MISFITS as e:
                self._follow_unless_wrong(now, e)

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
            now = self._hold()
            try:
                try:
                    return await Model.ainfer(now or self, *inputs, **named)
                finally:
                    self._release(now)
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
        with self._making, self._counting:
            others = [*self._left, *([self._now] if self._now else [])]
            self._left.clear()
        for other in others:
            other.close()
        super().close()


class RetryingFollowingModel(RetryingModel, FollowingModel):
    """Sends requests again, to the alias's model of that moment."""
