# SPDX-License-Identifier: Apache-2.0
"""The publisher of a model's weights."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping
from ctypes import addressof, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

import numpy as np

from .. import errors
from ..binding.casting import is_masked
from ..binding.library import SLICE_NS, Duration, Pauses, check, last_error, load, not_negative, seconds
from ..binding.tensors import Tensor, declared, in_memory
from .buffers import Buffer, Buffers, options

log = logging.getLogger("ringbatch")

_CHECK_S = 0.2  # between looks whether the broker was restarted
_REASON_BYTES = 1025


def publisher(
    model: str, tensors: Any, *, memory: str | None = None, socket: str | os.PathLike[str] | None = None, name: str | None = None,
    wait: Duration = 10.0,
) -> Publisher:  # fmt: skip
    """Becomes the publisher of a model's weights; raises Busy if there is another one.

    tensors: a torch module, its state_dict, or a dict of arrays: names, types and shapes of the
    weights. They are not published yet. wait: how long to wait for a broker, for a worker that follows, or
    for the end of the publisher before. Without such a worker it raises UnknownModel, or NoWorker if those of the model do not follow.
    memory: "device" or "device:0" publishes in the memory of that GPU ("device": where the tensors are);
    all workers must use the same GPU. The default is host memory.
    """
    return Publisher(model, tensors, memory, socket, name, wait)


class Withdrawn(NamedTuple):
    """A version that workers could not load, or that was withdrawn by hand."""

    version: int
    reason: str


_open: weakref.WeakSet[Publisher] = weakref.WeakSet()


def publishes(other_than: str) -> bool:
    """Whether this process publishes weights of another model: its worker is a learner."""
    return any(p.model != other_than and p.pid == os.getpid() for p in list(_open))


class Publisher:
    """Publishes versions of a model's weights. Threads may share it."""

    def __init__(
        self, model: str, tensors: Any, memory: str | None, socket: str | os.PathLike[str] | None, name: str | None, wait: Duration
    ) -> None:
        given = _by_name(tensors)
        specs = {key: (str(v.dtype).removeprefix("torch."), tuple(v.shape)) for key, v in sorted(given.items())}
        if memory == "device":
            memory = next((f"device:{v.device.index}" for v in given.values() if getattr(v, "is_cuda", False)), memory)
        texts = " ".join(str(in_memory(t, memory)) for t in declared(specs))
        self._lib, self.pid = load(), os.getpid()
        self._handle, self._lock = self._open(model, texts, socket, name, not_negative("wait", wait)), threading.Lock()
        self.model, self.version = model, 0  # version: the last one that was published here
        self._buffers = Buffers(self._lib, "publish", self._handle, None)
        threading.Thread(target=_keep_published, args=(self._lib, self._handle, model), name="ringbatch publisher", daemon=True).start()
        _open.add(self)

    def _open(self, model: str, texts: str, socket: str | os.PathLike[str] | None, name: str | None, wait: float) -> int:
        """Waits for a broker, and for a worker that follows."""
        out, o, end = c_uint64(), options(socket, name), time.monotonic() + wait
        pauses, warned = Pauses(), False
        while status := self._lib.rb_publish_open(model.encode(), texts.encode(), addressof(o), addressof(out)):
            error = last_error(self._lib, status)
            unfollowed = isinstance(error, (errors.UnknownModel, errors.NoWorker))
            pause = pauses.next(end)
            if not error.retry_attach or pause is None:
                raise error
            if unfollowed and not warned:
                log.warning("waiting %g s for a worker that follows: %s", wait, error)
                warned = True
            time.sleep(pause)
        return out.value

    def publish(self, tensors: Any, timeout: Duration | None = None) -> int:
        """Copies the tensors and makes them the current version, whose number it returns.

        A request that is sent after this call is answered with this version or a later one. While slow workers read both
        buffers that have not the last two good versions, it waits; at the timeout it raises Full.
        """
        given = _by_name(tensors)
        _compare(self.model, given, self._buffers.tensors)
        deadline = None if timeout is None else time.monotonic() + seconds(timeout)
        buffer, version = c_void_p(), c_uint32()
        while True:
            with self._lock:  # with acquire and try, a signal between them would lock it
                status = self._lib.rb_publish_begin(self._handle, SLICE_NS, addressof(buffer))
                if status != errors.Full.status or (deadline is not None and time.monotonic() >= deadline):
                    check(self._lib, status)
                    _put(self._buffers.at(buffer.value or 0), given)
                    check(self._lib, self._lib.rb_publish_commit(self._handle, addressof(version)))
                    self.version = version.value
                    return version.value

    @property
    def withdrawn(self) -> Withdrawn | None:
        """The latest version of this publisher that was withdrawn, and the reason. Workers go on with the one before."""
        return _withdrawn(self._lib, self._handle)

    def close(self) -> None:
        """Ends the publisher; workers keep the last version, and another process may publish."""
        with self._lock if os.getpid() == self.pid else contextlib.nullcontext():  # after a fork a thread of the parent may have it
            _open.discard(self)
            self._buffers.clear()  # pinned memory is unpinned while it is mapped
            self._lib.rb_publish_close(self._handle)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_buffers"):
            self._buffers.clear()
        if hasattr(self, "_handle"):
            self._lib.rb_publish_close(self._handle)


def _withdrawn(lib: ctypes.CDLL, handle: int) -> Withdrawn | None:
    version, reason = c_uint32(), ctypes.create_string_buffer(_REASON_BYTES)
    check(lib, lib.rb_publish_withdrawn(handle, addressof(version), addressof(reason), _REASON_BYTES))
    return Withdrawn(version.value, reason.value.decode(errors="replace")) if version.value else None


def _keep_published(lib: ctypes.CDLL, handle: int, model: str) -> None:
    """Attaches again after a restart of the broker, and warns of withdrawn versions, until the publisher is closed."""
    before, said = 0, None
    with contextlib.suppress(errors.Closed):
        while (status := lib.rb_publish_check(handle)) != errors.Closed.status:
            if status and status != before:
                log.warning("the weights are not published again yet: %s", last_error(lib, status))
            if (bad := _withdrawn(lib, handle)) and bad != said:
                log.warning("version %d of the weights of %s was withdrawn: %s", bad.version, model, bad.reason)
            before, said = status, bad
            time.sleep(_CHECK_S)


def _by_name(tensors: Any) -> dict[str, Any]:
    """The tensors of a module or a dict by name."""
    found = tensors.state_dict() if hasattr(tensors, "state_dict") else tensors
    if not isinstance(found, Mapping):
        raise errors.Invalid(f"weights are a module or a dict of arrays, got {type(tensors).__name__}")
    for name, v in found.items():
        if not isinstance(name, str) or not name or any(c in ":@\0" or c.isspace() for c in name):
            raise errors.Invalid(f"weights have names without blanks, ':' and '@'; got {name!r}")
        if is_masked(v):
            raise errors.Invalid(f"weight {name!r}: a masked array, and the mask would be lost; pass x.filled(...) of it")
    return {name: v if hasattr(v, "detach") else np.asarray(v) for name, v in found.items()}


def _compare(model: str, given: Mapping[str, Any], tensors: list[Tensor]) -> None:
    """Refuses tensors that are not those of the model."""
    if wrong := given.keys() ^ {t.name for t in tensors}:
        raise errors.Invalid(f"the weights of {model!r} and the given tensors differ in {', '.join(sorted(wrong))}")
    for t in tensors:
        v = given[t.name]
        if tuple(v.shape) != t.shape:
            raise errors.Shape(f"weight {t.name!r}: expected shape {t.shape}, got {tuple(v.shape)}")
        if not hasattr(v, "detach") and v.dtype != t.dtype:  # torch converts
            raise errors.DType(f"weight {t.name!r}: expected {t.dtype}, got {v.dtype}")


def _put(buffer: Buffer, given: Mapping[str, Any]) -> None:
    if buffer.device is not None or any(hasattr(v, "detach") for v in given.values()):
        from . import modules

        modules.put(buffer, given)
        return
    for name, array in buffer.arrays.items():
        array[...] = given[name]
