# SPDX-License-Identifier: Apache-2.0
"""The publisher of a model's weights."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections.abc import Mapping
from ctypes import addressof, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np

from .. import errors
from ..binding.library import SLICE_NS, Duration, check, last_error, load, seconds
from ..binding.tensors import Tensor, declared, in_memory
from .buffers import Buffer, Buffers, options

log = logging.getLogger("ringbatch")

_CHECK_S = 0.2  # between looks whether the broker was restarted


def publisher(
    model: str, tensors: Any, *, memory: str | None = None, socket: str | os.PathLike[str] | None = None, name: str | None = None,
    wait: Duration = 10.0,
) -> Publisher:  # fmt: skip
    """Becomes the publisher of a model's weights; raises Busy if there is another one.

    tensors: a torch module, its state_dict, or a dict of arrays: names, types and shapes of the
    weights. They are not published yet. wait: for a broker, or for the end of the publisher before.
    memory: "device" or "device:0" publishes in the memory of that GPU ("device": where the tensors are);
    all workers must use the same GPU. The default is host memory.
    """
    return Publisher(model, tensors, memory, socket, name, wait)


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
        self._lib, self._pid = load(), os.getpid()
        self._handle, self._lock = self._open(model, texts, socket, name, seconds(wait)), threading.Lock()
        self.model, self.version = model, 0  # version: the last one that was published here
        self._buffers = Buffers(self._lib, "publish", self._handle, None)
        threading.Thread(target=_keep_published, args=(self._lib, self._handle), name="ringbatch publisher", daemon=True).start()

    def _open(self, model: str, texts: str, socket: str | os.PathLike[str] | None, name: str | None, wait: float) -> int:
        """Waits for a broker."""
        out, o, end = c_uint64(), options(socket, name), time.monotonic() + wait
        while status := self._lib.rb_publish_open(model.encode(), texts.encode(), addressof(o), addressof(out)):
            error = last_error(self._lib, status)
            if not error.retry_attach or time.monotonic() >= end:
                raise error
            time.sleep(0.02)
        return out.value

    def publish(self, tensors: Any, timeout: Duration | None = None) -> int:
        """Copies the tensors and makes them the current version, whose number it returns.

        A request that is sent after this call is answered with this version or a later one. If
        workers could not load an earlier version, or it was withdrawn, raises Failed with the
        reason, once, and publishes nothing. While slow workers read both buffers that have not the last two good versions,
        it waits; at the timeout it raises Full.
        """
        given = _by_name(tensors)
        _compare(self.model, given, self._buffers.tensors)
        deadline = None if timeout is None else time.monotonic() + seconds(timeout)
        if not self._lock.acquire(timeout=-1 if timeout is None else seconds(timeout)):
            raise errors.Full("another thread of this process publishes")
        try:
            _put(self._buffers.at(self._begin(deadline)), given)
            version = c_uint32()
            check(self._lib, self._lib.rb_publish_commit(self._handle, addressof(version)))
            self.version = version.value
        finally:
            self._lock.release()
        return self.version

    def _begin(self, deadline: float | None) -> int:
        buffer = c_void_p()
        while True:
            status = self._lib.rb_publish_begin(self._handle, SLICE_NS, addressof(buffer))
            if status != errors.Full.status or (deadline is not None and time.monotonic() >= deadline):
                check(self._lib, status)
                return buffer.value or 0

    def close(self) -> None:
        """Ends the publisher; workers keep the last version, and another process may publish."""
        with self._lock if os.getpid() == self._pid else contextlib.nullcontext():  # after a fork a thread of the parent may have it
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


def _keep_published(lib: ctypes.CDLL, handle: int) -> None:
    """Attaches again after a restart of the broker, until the publisher is closed."""
    before = 0
    while (status := lib.rb_publish_check(handle)) != errors.Closed.status:
        if status and status != before:
            log.warning("the weights are not published again yet: %s", last_error(lib, status))
        before = status
        time.sleep(_CHECK_S)


def _by_name(tensors: Any) -> dict[str, Any]:
    """The tensors of a module or a dict by name."""
    found = tensors.state_dict() if hasattr(tensors, "state_dict") else tensors
    if not isinstance(found, Mapping):
        raise errors.Invalid(f"weights are a module or a dict of arrays, got {type(tensors).__name__}")
    for name, v in found.items():
        if not isinstance(name, str) or not name or any(c in ":@\0" or c.isspace() for c in name):
            raise errors.Invalid(f"weights have names without blanks, ':' and '@'; got {name!r}")
        if isinstance(v, np.ma.MaskedArray):
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
