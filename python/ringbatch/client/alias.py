# SPDX-License-Identifier: Apache-2.0
"""Models that a client asked for by an alias.

A connection moves to other versions by itself as long as they have its
signature. Here a call goes on when the alias stands for another one: with a
further connection, if its arrays fit that.
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

_MISFITS = (errors.SignatureMismatch, errors.Shape, errors.DType, errors.Rows, errors.Size, errors.Invalid)
_LOOK_TIME = 0.2  # for room in the window


class _Further(Model):
    """A connection to what the alias stands for, of another signature than the first."""

    users = 0  # calls of it that are under way


class FollowingModel(Model):
    """A model of ``connect(alias)``: see there."""

    def _start(self, again: Callable[[], Core]) -> None:
        self._again = again
        self._making = threading.Lock()  # of a further connection
        self._counting = threading.Lock()  # guards what follows
        self._now: _Further | None = None  # None: this one's own connection serves
        self._left: list[_Further] = []  # earlier ones, until what is under way there has ended

    def _hold(self) -> _Further | None:
        """What serves now; to be released."""
        if self._now is None:
            return None
        with self._counting:
            now = self._now
            if now is not None:
                now.users += 1
            return now

    def _release(self, now: _Further | None, answer: Any = None) -> None:
        """A call has ended, or will with its future."""
        if now is None:
            return
        if isinstance(answer, concurrent.futures.Future):
            answer.add_done_callback(lambda _: self._release(now))
            return
        with self._counting:
            now.users -= 1
            over = not now.users and now in self._left
            if over:
                self._left.remove(now)
        if over:
            now.close()

    def _use(self, next_: _Further | None) -> None:
        """Another one serves from now on; the former is closed, or when its last call has ended."""
        with self._counting:
            before, self._now = self._now, next_
            if before is not None and before.users:
                self._left.append(before)
                return
        if before is not None:
            before.close()

    def _follow(self, now: _Further | None) -> None:
        """The one that served so far has another signature than the alias."""
        with self._making:
            if self._now is not now:
                return
            self._check()
            core = self._again()
            # This one's own again; but if that has just said that it is not, it is only late.
            if now is not None and str(core.signature) == str(self._core.signature):
                core.close()
                self._use(None)
            else:
                self._use(_Further(core, self._socket, self._cast))

    @staticmethod
    def _moved(model: Model) -> bool:
        """Whether the alias has another signature than this connection: who claims learns it."""
        try:
            model.request(timeout=_LOOK_TIME).release()
        except (errors.SignatureMismatch, errors.Closed):  # closed: somebody has followed already
            return True
        except errors.Error:
            pass
        return False

    def _follow_unless_wrong(self, now: _Further | None, error: errors.Error) -> None:
        """Follows if the arrays of a call may fit what the alias stands for now; raises if they do not."""
        if not isinstance(error, errors.SignatureMismatch) and not self._moved(now or self):
            raise self._misfit(now, error) from None
        self._follow(now)

    def _misfit(self, now: _Further | None, error: errors.Error) -> errors.Error:
        """What a call raises whose arrays do not fit: if the signature has changed, that."""
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

    _call = Model.infer  # of the base's __call__

    def submit(self, *inputs: Any, **named: Any) -> concurrent.futures.Future:
        return self._call_on(Model.submit, inputs, named)

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

    # -- about the model that it is now

    @property
    def inputs(self) -> list[Tensor]:
        return list((self._now or self)._core.signature.inputs)

    @property
    def outputs(self) -> list[Tensor]:
        return list((self._now or self)._core.signature.outputs)

    def close(self) -> None:
        with self._making, self._counting:
            others = [*self._left, *([self._now] if self._now else [])]
            self._left.clear()
        for other in others:
            other.close()
        super().close()


class RetryingFollowingModel(RetryingModel, FollowingModel):
    """Both: what ended for a reason that passes is sent again, to what the alias stands for then."""
