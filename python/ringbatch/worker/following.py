# SPDX-License-Identifier: Apache-2.0
"""The weights that a worker follows: by ``@worker(live_weights=…)``, or by a module that its ``setup`` registers."""

from __future__ import annotations

import os
import threading
from typing import Any

from .. import errors
from ..binding.library import Duration
from ..weights.following import Follower, Load, follower
from .ring import Stop

_setup = threading.local()  # loads: a list, while a worker is set up in this thread


class Following:
    """What a worker follows. Used as a context manager around its setup."""

    def __init__(self, model: str, live_weights: Any) -> None:
        self._model, self._wanted = model, live_weights is True
        self._loads: list[Load] = []
        if not isinstance(live_weights, bool):
            from ..weights.modules import ModuleLoad

            self._loads.append(ModuleLoad(live_weights))

    def __enter__(self) -> Following:
        _setup.loads = self._loads
        return self

    def __exit__(self, *_: object) -> None:
        _setup.loads = None

    def open(self, socket: str | os.PathLike[str] | None, ended: Stop, wait: Duration, is_async: bool) -> Follower | None:
        """Waits for the first version; None if the worker follows nothing, or ended."""
        if len(self._loads) > 1:
            raise errors.Invalid("a worker follows the weights of one module: put the parts into one torch.nn.Module")
        if not self._wanted and not self._loads:
            return None
        refuse_async(is_async)
        return follower(self._model, socket, ended.is_set, wait, self._loads[0] if self._loads else None)


def check(live_weights: Any, is_async: bool) -> None:
    if not isinstance(live_weights, bool) and not hasattr(live_weights, "state_dict"):
        raise errors.Invalid(f"live_weights={live_weights!r}: want True, or the torch.nn.Module that gets them")
    if live_weights is not False:
        refuse_async(is_async)


def refuse_async(is_async: bool) -> None:
    if is_async:
        raise errors.Invalid("a coroutine function runs several batches at once, and cannot follow weights; use a plain function")


def register(load: Load) -> None:
    loads = getattr(_setup, "loads", None)
    if loads is None:
        raise errors.Invalid("follow(net) belongs into setup() of a worker's class; for a function, @rb.worker(live_weights=net)")
    loads.append(load)
