# SPDX-License-Identifier: Apache-2.0
"""Models that send a request again if its error is retryable."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from typing import Any, Callable

from .. import errors
from ..binding.library import Duration, Pauses, seconds
from .future import Future
from .model import Model


class RetryingModel(Model):
    """The model of ``connect(retry=…)``."""

    _retry: float | None = None  # seconds to retry a request without a timeout; None: without end
    _start_broker: Callable[..., None] | None = None  # of connect(start=…)

    def __call__(self, *inputs: Any, timeout: Duration | None = None, **more: Any) -> Any:
        limit = self._retry if timeout is None else seconds(timeout)
        began = 0.0
        try:
            if limit is None:
                return super().__call__(*inputs, **more)
            began = time.monotonic()
            return super().__call__(*inputs, timeout=limit, **more)
        except errors.Error as e:
            attempts = _Attempts(self, timeout, began)
            time.sleep(attempts.pause(e))
        return self._infer(attempts, inputs, more)

    def infer(self, *inputs: Any, timeout: Duration | None = None, **more: Any) -> Any:
        return self._infer(_Attempts(self, timeout), inputs, more)

    def _infer(self, attempts: _Attempts, inputs: tuple[Any, ...], more: dict[str, Any]) -> Any:
        while True:
            try:
                return super().infer(*inputs, timeout=attempts.left(), **more)
            except errors.Error as e:
                time.sleep(attempts.pause(e))

    async def ainfer(self, *inputs: Any, timeout: Duration | None = None, **more: Any) -> Any:
        import asyncio

        attempts = _Attempts(self, timeout)
        while True:
            try:
                return await super().ainfer(*inputs, timeout=attempts.left(), **more)
            except errors.Error as e:
                await asyncio.sleep(await asyncio.to_thread(attempts.pause, e))  # it may start a broker

    def submit(self, *inputs: Any, timeout: Duration | None = None, **more: Any) -> concurrent.futures.Future:
        attempts = _Attempts(self, timeout)
        outer = Future()
        outer.set_running_or_notify_cancel()
        send_first = super().submit

        def again(error: BaseException) -> None:
            if not is_retryable(error):
                outer.set_exception(error)
                return
            try:
                # Not on this thread, which completes other requests: pause may start a broker.
                threading.Thread(target=send_again, args=(error,), daemon=True).start()
            except RuntimeError as no_thread:
                outer.set_exception(no_thread)

        def send_again(error: BaseException) -> None:
            try:
                time.sleep(attempts.pause(error))
            except BaseException as final:
                outer.set_exception(final)
            else:
                send()

        def send() -> None:
            try:
                inner = send_first(*inputs, timeout=attempts.left(), **more)
            except errors.Error as e:
                again(e)
            except BaseException as e:
                outer.set_exception(e)
            else:
                inner.add_done_callback(ended)

        def ended(inner: concurrent.futures.Future) -> None:
            error = inner.exception()
            if error is None:
                outer.version = getattr(inner, "version", 0)
                outer.set_result(inner.result())
            else:
                again(error)

        send()
        return outer


def is_retryable(error: BaseException) -> bool:
    return isinstance(error, errors.Error) and error.retryable


class _Attempts:
    """The time left for a request, and the pauses between its attempts."""

    def __init__(self, model: RetryingModel, timeout: Duration | None, began: float | None = None) -> None:
        limit = model._retry if timeout is None else seconds(timeout)
        self._start_broker = model._start_broker
        self._end = None if limit is None else (time.monotonic() if began is None else began) + limit
        self._pauses = Pauses()

    def left(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def pause(self, error: BaseException) -> float:
        """Seconds before the next attempt; raises the error if there is none."""
        try:
            pause = self._pauses.next(self._end)
            if pause is None or not is_retryable(error):
                raise error
            if self._start_broker and isinstance(error, (errors.BrokerGone, errors.NoBroker)):
                left = self.left()
                try:
                    self._start_broker() if left is None else self._start_broker(left)
                except errors.NoBroker as e:
                    raise (error if self.left() == 0 else e) from None
            return pause
        finally:
            del error  # or it would keep this frame, and its callers', until a garbage collection

