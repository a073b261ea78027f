# SPDX-License-Identifier: Apache-2.0
"""``connect``: a model of the broker on this host, by its name or an alias."""

from __future__ import annotations

import os

from .. import errors
from .alias import FollowingModel, RetryingFollowingModel
from .connection import Core
from .model import Model
from .retrying import RetryingModel


def connect(
    model: str,
    *,
    socket: str | os.PathLike[str] | None = None,
    window: int | None = None,
    name: str | None = None,
    wait: float = 0.0,
    cast: bool = False,
    retry: bool | float = False,
) -> Model:
    """Connects to a model of the broker on this host, or to an alias.

    Of an alias the model is one that it stands for, and another one whenever it
    stands for others: nothing is lost by that. If those have another signature,
    calls whose arrays fit it go on; others, and request(), raise
    SignatureMismatch.

    socket: the broker's; default $RINGBATCH_SOCKET or the user's runtime folder.
    window: how many rows may be in use at once; without it 8, or fewer where
        the model's ring is small.
    name: for the broker's log and statistics.
    wait: seconds to wait for a broker or model that is not there yet, or for room in its ring.
    cast: convert inputs to the model's types where that is of the same kind
        (float64 to float32); otherwise another type is an error.
    retry: send a request again that ended for a reason that passes (the
        broker is restarted, the queue is full, no worker is attached), within
        its timeout; without one for so many seconds, or with True for ever.
        It holds for calls, submit and ainfer, not for request(), whose views
        are the caller's.
    """
    if not isinstance(model, str):
        raise TypeError(f"connect takes the name of a model, got {type(model).__name__}")
    if "\0" in model:
        raise errors.Invalid(f"no model has a name like {model!r}")
    core = Core(model, socket, window, name, wait)
    follows = core.model != model  # it is an alias
    if retry is False and not follows:
        return Model(core, socket, cast)
    made: Model
    if retry is False:
        made = FollowingModel(core, socket, cast)
    else:
        made = (RetryingFollowingModel if follows else RetryingModel)(core, socket, cast)
        made._retry = None if retry is True else float(retry)
    if isinstance(made, FollowingModel):
        made._start(lambda: Core(model, socket, window, name, 0))
    return made
