# SPDX-License-Identifier: Apache-2.0
"""A follower of a model's weights."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable
from ctypes import addressof, c_uint32, c_uint64, c_void_p
from typing import Any, Protocol

import numpy as np

from .. import errors
from ..binding.library import Duration, Pauses, check, last_error, load, not_negative
from .buffers import Buffer, Buffers, options

log = logging.getLogger("ringbatch")


class Load(Protocol):
    """Loads a version, for example into a module. If it raises, the version is withdrawn."""

    def __call__(self, buffer: Buffer) -> None: ...

    def done(self, wait: bool) -> bool:
        """Whether the buffer was read. wait: until it was."""


class _Handle:
    """A follower of the library. It is closed when the last array over its memory is gone."""

    def __init__(self, lib: ctypes.CDLL, number: int) -> None:
        self._lib, self.number = lib, number

    def __del__(self) -> None:
        self._lib.rb_follow_close(self.number)


class Follower:
    """Follows the weights of a model. One thread uses it."""

    def __init__(self, model: str, number: int, load_version: Load | None) -> None:
        self._lib, self._model, self._load = load(), model, load_version
        self._handle = _Handle(self._lib, number)
        self._buffers = Buffers(self._lib, "follow", number, self._handle)
        self._address = 0
        self._inside = False  # between enter and exit
        self._reads = False  # update has entered
        self.version = 0

    def enter(self) -> int:
        """Takes the version in force until exit, and loads it if it is another one. Returns the version."""
        version, buffer, changed = c_uint32(), c_void_p(), c_uint32()
        while True:
            status = self._lib.rb_follow_enter(self._handle.number, addressof(version), addressof(buffer), addressof(changed))
            self._inside = status == 0
            if status == errors.Failed.status and version.value and self._load is not None:
                return self.version  # all later versions were withdrawn: the module still has this one
            check(self._lib, status)
            self._address = buffer.value or 0
            if not changed.value or self._loads(version.value):
                self.version = version.value
                return self.version

    def _loads(self, version: int) -> bool:
        try:
            if self._load is not None:
                self._load(self._buffers.at(self._address))
        except Exception as e:
            reason = f"{type(e).__name__}: {e}"  # a text: log handlers may keep an exception, and with it arrays
            log.warning("version %d of the weights of %s is withdrawn, it cannot be loaded: %s", version, self._model, reason)
            self._inside = False
            self._lib.rb_follow_refuse(self._handle.number, reason.encode(errors="replace").replace(b"\0", b" "))
            return False
        except BaseException:
            self.exit()
            raise
        check(self._lib, self._lib.rb_follow_loaded(self._handle.number))
        return True

    def is_newer(self) -> bool:
        """Whether another version is in force than that of the last enter."""
        version = c_uint32()
        check(self._lib, self._lib.rb_follow_current(self._handle.number, addressof(version)))
        return version.value != self.version

    def look(self) -> None:
        """Attaches again after a restart of the broker, before a batch comes: publishers look for workers that follow."""
        self.settle(wait=True)
        version, buffer, changed = c_uint32(), c_void_p(), c_uint32()
        if not self._lib.rb_follow_enter(self._handle.number, addressof(version), addressof(buffer), addressof(changed)):
            self._lib.rb_follow_exit(self._handle.number)

    def exit(self) -> None:
        if self._load is None and self._buffers.device is not None:
            self._buffers.device.synchronize()  # the batch may have queued work that reads the weights
        if self._inside:
            self._inside = False
            self._lib.rb_follow_exit(self._handle.number)

    def close(self) -> None:
        """Ends the follower, as soon as no array over its memory is left."""
        self._buffers.clear()
        del self._handle

    # For batches that overlap on a GPU: a ModuleLoad in order.

    def update(self) -> int:
        """Loads the version in force and returns it. The buffer is kept until it was read: see settle."""
        self.settle(wait=True)
        version = self.enter()
        self._reads = True
        self.settle(wait=False)
        return version

    def settle(self, wait: bool) -> None:
        """Gives the buffer back if it was read. wait: as soon as it was."""
        if self._reads and (self._load is None or self._load.done(wait)):
            self._reads = False
            self.exit()

    def arrays(self) -> dict[str, Any]:
        """The tensors of the version, to read. Copy the ones to keep: a later version is written over them."""
        arrays = {name: a.view() if isinstance(a, np.ndarray) else a for name, a in self._buffers.at(self._address).arrays.items()}
        for a in arrays.values():
            if isinstance(a, np.ndarray):
                a.setflags(write=False)
        return arrays


def follower(
    model: str, socket: str | os.PathLike[str] | None, ended: Callable[[], bool], wait: Duration, load_version: Load | None
) -> Follower | None:
    """Waits until weights of the model are published; None if it ended meanwhile. wait: how long to wait for a broker."""
    lib, out, patience, warned = load(), c_uint64(), time.monotonic() + not_negative("wait", wait), False
    o = options(socket, os.environ.get("RINGBATCH_WORKER_NAME"))
    o.wait, pauses = 1, Pauses()
    while not ended():
        status = lib.rb_follow_open(model.encode(), addressof(o), addressof(out))
        if not status:
            return Follower(model, out.value, load_version)
        e = last_error(lib, status)
        if status == errors.Timeout.status and not warned:
            log.warning("waiting for the first version of the weights of %s: rb.publisher(%r, ...).publish(...)", model, model)
            warned = True
        pause = pauses.next(None if status == errors.Timeout.status else patience)
        if not e.retry_attach or pause is None:
            raise e
        time.sleep(pause)
    return None
