# SPDX-License-Identifier: Apache-2.0
"""Models that were asked for by an alias.

A connection moves to other versions by itself as long as they have its
signature. Here a call goes on when the alias stands for another one: with a
further connection, if its arrays fit that.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Awaitable
from typing import Any, Callable

from . import errors
from ._client import Model
from ._core import Core
from ._retry import RetryingModel
from ._tensors import Tensor

_MISFITS = (errors.Shape, errors.DType, errors.Rows, errors.Size, errors.Invalid)


class FollowingModel(Model):
    """A model of ``connect(alias)``: see there."""

    def _start(self, again: Callable[[], Core]) -> None:
        self._again = again
        self._making = threading.Lock()
        self._now: Model | None = None  # of another signature; None: this one's own connection serves
        self._left: list[Model] = []  # earlier ones: requests of theirs may be under way

    def _follow(self, now: Model | None) -> None:
        """The one that served so far has another signature than the alias."""
        with self._making:
            if self._now is now:
                self._check()
                core = self._again()
                if now is not None:
                    self._left.append(now)
                self._now = Model(core, self._socket, self._cast)

    def _back(self, now: Model) -> None:
        """This one's own connection serves again."""
        with self._making:
            if self._now is now:
                self._left.append(now)
                self._now = None

    def _misfit(self, now: Model | None, error: errors.Error) -> errors.Error:
        """What a call raises whose arrays do not fit: if the signature has changed, that."""
        was = self._core.signature
        if now is None or str(now._core.signature) == str(was):
            return error
        return errors.SignatureMismatch(f"{self.name} is {now._core.signature} now, it was {was} when this client connected ({error})")

    def _call_on(self, method: Callable[..., Any], inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        while True:
            now = self._now
            try:
                return method(now or self, *inputs, **named)
            except errors.SignatureMismatch:
                self._follow(now)
                continue
            except _MISFITS as e:
                error = self._misfit(now, e)
                if now is None or error is e:
                    raise error from None
            try:  # perhaps the alias stands for the former signature again
                answer = method(self, *inputs, **named)
            except errors.SignatureMismatch:
                raise error from None
            self._back(now)
            return answer

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self._call_on(Model.__call__, inputs, named)

    def infer(self, *inputs: Any, **named: Any) -> Any:
        return self._call_on(Model.infer, inputs, named)

    _call = Model.infer  # of the base's __call__

    def submit(self, *inputs: Any, **named: Any) -> concurrent.futures.Future:
        return self._call_on(Model.submit, inputs, named)

    async def ainfer(self, *inputs: Any, **named: Any) -> Any:
        while True:
            now = self._now
            answer: Awaitable[Any] = Model.ainfer(now or self, *inputs, **named)
            try:
                return await answer
            except errors.SignatureMismatch:
                self._follow(now)
                continue
            except _MISFITS as e:
                error = self._misfit(now, e)
                if now is None or error is e:
                    raise error from None
            try:  # as in _call_on
                result = await Model.ainfer(self, *inputs, **named)
            except errors.SignatureMismatch:
                raise error from None
            self._back(now)
            return result

    # -- about the model that it is now

    @property
    def inputs(self) -> list[Tensor]:
        return list((self._now or self)._core.signature.inputs)

    @property
    def outputs(self) -> list[Tensor]:
        return list((self._now or self)._core.signature.outputs)

    def close(self) -> None:
        with self._making:
            others = [*self._left, *([self._now] if self._now else [])]
            self._left.clear()
        for other in others:
            other.close()
        super().close()


class RetryingFollowingModel(RetryingModel, FollowingModel):
    """Both: what ended for a reason that passes is sent again, to what the alias stands for then."""
