# SPDX-License-Identifier: Apache-2.0
"""Live weights: a learner publishes versions of a model's tensors, workers follow. docs/weights.md is the manual."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from ctypes import addressof, c_uint32, c_uint64, c_void_p
from typing import Any, Protocol

import numpy as np

from . import errors
from .binding import structs as c
from .binding.library import SLICE_NS, Duration, check, encode, last_error, load, nanoseconds, seconds
from .binding.tensors import Tensor, declared

log = logging.getLogger("ringbatch")

_CHECK_S = 0.2  # between looks whether the broker was restarted


def publisher(
    model: str, tensors: Any, *, socket: str | os.PathLike[str] | None = None, name: str | None = None, wait: Duration = 10.0
) -> Publisher:
    """Becomes the publisher of a model's weights; raises Busy if there is another one.

    tensors: a torch module, its state_dict, or a dict of arrays: names, types and shapes of the
    weights. They are not published yet. wait: how long to wait for a broker.
    """
    return Publisher(model, tensors, socket, name, wait)


class Publisher:
    """Publishes versions of a model's weights. Threads may share it."""

    def __init__(self, model: str, tensors: Any, socket: str | os.PathLike[str] | None, name: str | None, wait: Duration) -> None:
        specs = {key: (str(v.dtype).removeprefix("torch."), tuple(v.shape)) for key, v in _by_name(tensors).items()}
        texts = " ".join(map(str, declared(specs)))
        self._lib, out = load(), c_uint64()
        o = _options(socket, name, nanoseconds(wait), bool(wait))
        check(self._lib, self._lib.rb_publish_open(model.encode(), texts.encode(), addressof(o), addressof(out)))
        self._handle, self._lock = out.value, threading.Lock()
        self.model, self.version = model, 0  # version: the last one that was published here
        self._tensors = _tensors(self._lib, self._lib.rb_publish_tensor, self._handle)
        threading.Thread(target=_keep_published, args=(self._lib, self._handle), name="ringbatch publisher", daemon=True).start()

    def publish(self, tensors: Any, timeout: Duration | None = None) -> int:
        """Copies the tensors and makes them the current version, whose number it returns.

        A request that is sent after this call is answered with this version or a later one. If
        workers could not load the version before, or it was withdrawn, raises Failed with the
        reason, once, and publishes nothing. While slow workers read all buffers it waits; at the
        timeout it raises Full.
        """
        given = _by_name(tensors)
        if wrong := given.keys() ^ {t.name for t in self._tensors}:
            raise errors.Invalid(f"the weights of {self.model!r} and the given tensors differ in {', '.join(sorted(wrong))}")
        with self._lock:
            memory = ctypes.addressof(self._begin(None if timeout is None else time.monotonic() + seconds(timeout)))
            for t in self._tensors:
                _put(t, given[t.name], _array(t, (ctypes.c_uint8 * t.row_bytes).from_address(memory + t.offset), 0))
            version = c_uint32()
            check(self._lib, self._lib.rb_publish_commit(self._handle, addressof(version)))
            self.version = version.value
        return self.version

    def _begin(self, deadline: float | None) -> ctypes.Array:
        buffer = c_void_p()
        while True:
            status = self._lib.rb_publish_begin(self._handle, SLICE_NS, addressof(buffer))
            if status != errors.Full.status or (deadline is not None and time.monotonic() >= deadline):
                check(self._lib, status)
                return (ctypes.c_uint8 * 1).from_address(buffer.value or 0)

    def close(self) -> None:
        """Ends the publisher; workers keep the last version, and another process may publish."""
        with self._lock:
            self._lib.rb_publish_close(self._handle)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._lib.rb_publish_close(self._handle)


def _keep_published(lib: ctypes.CDLL, handle: int) -> None:
    """Attaches again after a restart of the broker, until the publisher is closed."""
    while lib.rb_publish_check(handle) != errors.Closed.status:
        time.sleep(_CHECK_S)


class Load(Protocol):
    """Loads a version, for example into a module. If it raises, the version is withdrawn."""

    def __call__(self, tensors: list[Tensor], arrays: Mapping[str, np.ndarray]) -> None: ...


class ModuleLoad:
    """Copies versions into a torch module, in place: CUDA graphs and compiled code stay valid."""

    def __init__(self, net: Any, check_finite: bool = False) -> None:
        if not hasattr(net, "state_dict"):
            raise errors.Invalid(f"live weights are copied into a torch.nn.Module, got {type(net).__name__}")
        self._net, self._check_finite = net, check_finite

    def __call__(self, tensors: list[Tensor], arrays: Mapping[str, np.ndarray]) -> None:
        import torch

        state = self._net.state_dict()  # now: the module may have moved to a device, or to 16 bits
        published = {t.name: _as_torch(t, arrays[t.name]) for t in tensors}
        for name in [*state, *published]:  # all of them before the first copy
            own, other = state.get(name), published.get(name)
            if own is None or other is None:
                raise errors.Invalid(f"{'the module has no' if own is None else 'the version has no'} {name!r}")
            if own.shape != other.shape:
                raise errors.Shape(f"{name!r}: the module has {list(own.shape)}, the version {list(other.shape)}")
            if self._check_finite and not torch.isfinite(other).all():
                raise errors.Invalid(f"{name!r} has a NaN or an infinity")
        devices = {t.device for t in state.values() if t.is_cuda}
        for d in devices:  # batches that still run use the weights before
            torch.cuda.synchronize(d)
        with torch.no_grad():
            for name, own in state.items():
                own.copy_(published[name])
        for d in devices:
            torch.cuda.synchronize(d)


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
        self.tensors = _tensors(self._lib, self._lib.rb_follow_tensor, number)
        self._bytes = max(t.offset + t.row_bytes for t in self.tensors)
        self._known: dict[int, dict[str, np.ndarray]] = {}  # by the address of a buffer
        self._buffer = 0
        self.version = 0

    def enter(self) -> int:
        """Takes the version in force until exit, and loads it if it is another one. Returns the version."""
        version, buffer, changed = c_uint32(), c_void_p(), c_uint32()
        while True:
            check(self._lib, self._lib.rb_follow_enter(self._handle.number, addressof(version), addressof(buffer), addressof(changed)))
            self._buffer = buffer.value or 0
            if not changed.value or self._loads(version.value):
                self.version = version.value
                return self.version

    def _loads(self, version: int) -> bool:
        try:
            if self._load is not None:
                self._load(self.tensors, self._arrays())
        except Exception as e:
            reason = f"{type(e).__name__}: {e}"  # a text: log handlers may keep an exception, and with it arrays
            log.warning("version %d of the weights of %s is withdrawn, it cannot be loaded: %s", version, self._model, reason)
            check(self._lib, self._lib.rb_follow_refuse(self._handle.number, reason.encode()))
            return False
        except BaseException:
            self.exit()
            raise
        check(self._lib, self._lib.rb_follow_loaded(self._handle.number))
        return True

    def exit(self) -> None:
        self._lib.rb_follow_exit(self._handle.number)

    def close(self) -> None:
        """Ends the follower, as soon as no array over its memory is left."""
        self._known.clear()
        del self._handle

    def update(self) -> int:
        """For weights that are copied: loads the version in force and returns it."""
        version = self.enter()
        self.exit()
        return version

    def arrays(self) -> dict[str, np.ndarray]:
        """The tensors of the version, read-only. Copy the ones to keep: a later version is written over them."""
        arrays = {name: a.view() for name, a in self._arrays().items()}
        for a in arrays.values():
            a.setflags(write=False)
        return arrays

    def _arrays(self) -> dict[str, np.ndarray]:
        if self._buffer not in self._known:
            if len(self._known) > 8:  # buffers of brokers that are gone
                self._known.clear()
            memory: Any = (ctypes.c_uint8 * self._bytes).from_address(self._buffer)
            memory.handle = self._handle  # stays mapped for the arrays
            self._known[self._buffer] = {t.name: _array(t, memory, t.offset) for t in self.tensors}
        return self._known[self._buffer]


def follower(
    model: str, socket: str | os.PathLike[str] | None, ended: Callable[[], bool], wait: Duration, load_version: Load | None
) -> Follower | None:
    """Waits until weights of the model are published; None if it ended meanwhile. wait: how long to wait for a broker."""
    lib, out, patience, said = load(), c_uint64(), time.monotonic() + seconds(wait), False
    o = _options(socket, os.environ.get("RINGBATCH_WORKER_NAME"), SLICE_NS, True)
    while not ended():
        status = lib.rb_follow_open(model.encode(), addressof(o), addressof(out))
        if not status:
            return Follower(model, out.value, load_version)
        if status not in (errors.UnknownModel.status, errors.Timeout.status):
            e = last_error(lib, status)
            if not e.retry_attach or time.monotonic() > patience:
                raise e
        elif not said:
            said = True
            log.info("waiting for the first version of the weights of %s", model)
    return None


def _options(socket: str | os.PathLike[str] | None, name: str | None, timeout_ns: int, wait: bool) -> c.ConnectOptions:
    o = c.ConnectOptions()
    o.size, o.socket, o.name, o.timeout, o.wait = ctypes.sizeof(o), encode(socket), encode(name), timeout_ns, wait
    return o


def _by_name(tensors: Any) -> dict[str, Any]:
    """The tensors of a module or a dict by name."""
    found = tensors.state_dict() if hasattr(tensors, "state_dict") else tensors
    if not isinstance(found, Mapping):
        raise errors.Invalid(f"weights are a module or a dict of arrays, got {type(tensors).__name__}")
    return {name: v if hasattr(v, "detach") else np.asarray(v) for name, v in found.items()}


def _tensors(lib: ctypes.CDLL, function: Any, handle: int) -> list[Tensor]:
    found: list[Tensor] = []
    t = c.Tensor()
    while function(handle, len(found), addressof(t)) == 0:
        found.append(Tensor(t, 0))
    return found


def _array(t: Tensor, memory: Any, offset: int) -> np.ndarray:
    return np.ndarray(t.shape, t.dtype, memory, offset)


def _put(t: Tensor, value: Any, to: np.ndarray) -> None:
    """Copies a tensor into its place."""
    if tuple(value.shape) != t.shape:
        raise errors.Shape(f"weight {t.name!r}: expected shape {t.shape}, got {tuple(value.shape)}")
    if hasattr(value, "detach"):
        _as_torch(t, to).copy_(value.detach())
    elif value.dtype != to.dtype:
        raise errors.DType(f"weight {t.name!r}: expected {t.dtype}, got {value.dtype}")
    else:
        to[...] = value


def _as_torch(t: Tensor, array: np.ndarray) -> Any:
    """A torch tensor over the array."""
    import torch

    if t.kind == "bf16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
