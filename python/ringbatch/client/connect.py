# SPDX-License-Identifier: Apache-2.0
"""``connect``: a model of the broker on this host, by its name or an alias."""

from __future__ import annotations

import os

from .. import errors
from ..binding.library import Duration, not_negative
from .alias import FollowingModel, RetryingFollowingModel
from .connection import Core
from .model import Model
from .retrying import RetryingModel
from .starting import Starter


def connect(
    model: str,
    *,
    socket: str | os.PathLike[str] | None = None,
    window: int | None = None,
    name: str | None = None,
    wait: Duration = 10.0,
    cast: bool = False,
    retry: bool | Duration = False,
    start: bool | Duration = False,
) -> Model:
    """Connects to a model of the broker on this host, or to an alias.

    When an alias changes to another model, the client follows without losing
    requests. If the new model has another signature, calls whose arrays fit it
    go on; other calls, and request(), raise SignatureMismatch.

    Durations are seconds, texts like "5ms", or timedeltas.

    socket: the broker's; default $RINGBATCH_SOCKET or the user's runtime folder.
    window: rows that may be in use at once, at least one for each thread; default 8, fewer if the model's ring is small.
    name: of this client, for the broker's log and statistics.
    wait: how long to wait for a broker, a model, or room in its ring; 0 raises at once.
    cast: convert inputs to the model's types within one kind (float64 to float32).
        Without it another type is an error.
    retry: send a request again if the broker restarts, the queue is full or no worker
        is attached. It stops at the request's timeout, or without one after this
        duration; True never stops. It is for calls, submit and ainfer, not for request().
    start: start a broker if none runs, as ``ringbatch broker --detach`` does. Its models come from
        ~/.config/ringbatch/ringbatch.toml. It ends after this duration without clients, True: 10 minutes.
        With retry, it is started again if it goes.
    """
    if not isinstance(model, str):
        raise TypeError(f"connect takes the name of a model, got {type(model).__name__}")
    if "\0" in model:
        raise errors.Invalid(f"no model has a name like {model!r}")
    if not isinstance(cast, bool):
        raise errors.Invalid(f"cast is True or False, got {cast!r}")
    limit = retry if isinstance(retry, bool) else not_negative("retry", retry)
    if start is False:
        core = Core(model, socket, window, name, wait)
    else:
        started = Starter(socket, "10m" if start is True else start)
        core = started.connected(lambda wait: Core(model, socket, window, name, wait), wait)
    follows = core.model != model  # the name is an alias
    if limit is False and not follows:
        return Model(core, socket, cast)
    made: Model
    if limit is False:
        made = FollowingModel(core, socket, cast)
    else:
        made = (RetryingFollowingModel if follows else RetryingModel)(core, socket, cast)
        made._retry = None if limit is True else limit
        made._start_broker = started.start if start is not False else None
    if isinstance(made, FollowingModel):
        made._start(lambda: Core(model, socket, window, name, 0))
    return made
