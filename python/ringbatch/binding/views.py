# SPDX-License-Identifier: Apache-2.0
"""Arrays over shared memory that raise once their request or batch has ended.

A slot belongs to its request, and a request ends. Three rules make late arrays
harmless:

1. Users get a :class:`View`, an ndarray that belongs to a :class:`Life`, and so does
   every slice of it. At the end it becomes an :class:`Over`, each use of which raises.
2. Views and their slices lose their memory at the end: ``np.asarray`` of one gives
   an empty array then.
3. Plain arrays and tensors that were made of a view *before* the end
   (``np.asarray``, ``torch.from_numpy``) keep the mapping alive. Late reads see
   the slot's later content, and zeros once the client is closed; they never crash.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, Callable

import numpy as np

from .. import errors
from . import structs as c
from .casting import converted
from .device import device_memory, end_device_array
from .tensors import Tensor, slots_behind


class Mapping:
    """The memory of a model's tensors, mapped while anything uses it."""

    def __init__(self, lib: ctypes.CDLL, m: c.Map) -> None:
        self.base: int = m.base
        self.bytes: int = m.bytes
        self.attachment: int = m.attachment
        #: The offset of each tensor in this mapping. By tensor, since an input and an
        #: output may have one name. Not in the tensor, since a restarted broker may
        #: have another number of slots.
        self.offsets: dict[Tensor, int] = {}
        # The base of every array over the mapping; the mapping goes with the last one.
        self.memory = (ctypes.c_uint8 * m.bytes).from_address(m.base)
        weakref.finalize(self.memory, lib.rb_map_release, m.id).atexit = False
        #: The memory of tensors on a GPU; None if there are none.
        self.device = device_memory(lib, m.id, self.memory)
        self._planes: dict[Tensor, Any] = {}
        self._rows: dict[tuple[Tensor, int], np.ndarray] = {}  # by tensor and slot

    def base_of(self, t: Tensor) -> int:
        """The address that the tensor's offset counts from."""
        return self.device.base if t.on_device and self.device else self.base

    def plane(self, t: Tensor) -> Any:
        """All slots of a tensor of fixed shape, and the bytes behind them: an array, or for a tensor on the device a torch tensor."""
        plane = self._planes.get(t)
        if plane is None:
            offset = self.offsets[t]
            if t.on_device and self.device:
                plane = self.device.plane(t, offset)
            else:
                plane = np.ndarray((slots_behind(self.bytes - offset, t), *t.shape), t.dtype, self.memory, offset)
            self._planes[t] = plane
        return plane

    def row(self, t: Tensor, slot: int) -> np.ndarray:
        """One slot of a tensor of fixed shape."""
        row = self._rows.get((t, slot))
        if row is None:
            row = self._rows[(t, slot)] = self.plane(t)[slot, ...]
        return row

    def rows(self, t: Tensor, slot: int, rows: int, shape: tuple[int, ...]) -> np.ndarray:
        """Some consecutive slots of a tensor, with rows of the given shape."""
        if not t.variable:
            return self.plane(t)[slot : slot + rows]
        return strided(self.memory, t.dtype, self.offsets[t] + slot * t.stride, t.stride, (rows, *shape))


def strided(memory: Any, dtype: np.dtype, offset: int, stride: int, shape: tuple[int, ...]) -> np.ndarray:
    """Rows that are stride bytes apart and compact inside."""
    strides = [dtype.itemsize]
    for d in shape[:1:-1]:
        strides.insert(0, strides[0] * d)
    return np.ndarray(shape, dtype, memory, offset, (stride, *strides[: len(shape) - 1]))


_FEW = 64


class Weakly(list):
    """Weak references to arrays."""

    __slots__ = ("_prune_at",)

    def __init__(self) -> None:
        self._prune_at = _FEW

    def add(self, array: View) -> None:
        if len(self) >= self._prune_at:
            self[:] = [ref for ref in self if ref() is not None]
            self._prune_at = max(_FEW, 2 * len(self))
        self.append(weakref.ref(array))

    def arrays(self) -> list[View]:
        return [array for array in (ref() for ref in self) if array is not None]


class Life:
    """How long some views may be used."""

    __slots__ = ("__weakref__", "_memory", "_slices", "_views", "error")

    def __init__(self, memory: Any) -> None:
        self._memory = memory  # stays mapped for addresses that were taken from a view
        self.error: Callable[[], errors.Error] = released  # raised by each use after the end
        self._views: list[Any] = []
        self._slices = Weakly()  # a slice of a view ends with it
        _lives.add(self)

    def view(self, array: Any) -> Any:
        """A view of the array that ends with this life. Arrays on the device are returned as they are."""
        v: Any = array
        if isinstance(array, np.ndarray):
            v = array.view(View)
            v._life = self
        self._views.append(v)
        return v

    def end(self, error: Callable[[], errors.Error]) -> None:
        self.error = error
        for v in [*self._views, *self._slices.arrays()]:
            _end(v, error)
        self._views.clear()
        self._slices.clear()


_lives: weakref.WeakSet[Life] = weakref.WeakSet()


def _in_child() -> None:
    """The parent's views are over in a forked child."""
    for life in list(_lives):
        life.error = parents
        for v in [*life._views, *life._slices.arrays()]:
            if isinstance(v, View):
                v.__class__ = Over


os.register_at_fork(after_in_child=_in_child)


def fresh(array: Any, memory: Any) -> Any:
    """A view with a new life, which end_view ends. Arrays on the device are returned as they are."""
    if not isinstance(array, np.ndarray):
        return array
    v = array.view(View)
    v._life = life = Life(memory)
    life._slices.add(v)
    return v


def end_view(view: Any, error: Callable[[], errors.Error]) -> None:
    """Ends a view of fresh, or a list of them."""
    for v in view if isinstance(view, list) else [view]:
        if isinstance(v, View) and v._life is not None:
            v._life.end(error)
        else:
            _end(v, error)


def _end(view: Any, error: Callable[[], errors.Error]) -> None:
    """Takes the view's memory away."""
    if isinstance(view, View):
        _setstate(view, _EMPTY)
        view.__class__ = Over
    elif not isinstance(view, (str, list)):  # texts are copies
        end_device_array(view, error)


def released() -> errors.Error:
    return errors.Released("this array belonged to a request or batch that is over; copy what you want to keep")


def parents() -> errors.Error:
    return errors.Forked("this request and its arrays are the parent process's: a forked child takes its own, model.request()")


def committed() -> errors.Error:
    return errors.Committed("the request was committed: its inputs belong to the worker now")


_get = np.ndarray.__getattribute__
_setitem = np.ndarray.__setitem__
_setstate: Any = np.ndarray.__setstate__
_EMPTY = (1, (0,), np.dtype("u1"), False, b"")  # of an array that has lost its memory
_QUIET = frozenset(("__class__", "__array_finalize__", "__array_priority__", "_life"))


def _plain(value: Any) -> Any:
    """Views as plain arrays; also inside of tuples and lists."""
    if isinstance(value, View):
        return value.view(np.ndarray)
    if isinstance(value, (tuple, list)):
        return type(value)([_plain(v) for v in value])
    return value


def _held(value: Any, dtype: np.dtype) -> Any:
    """What is assigned, in a type that changes no value of it."""
    if type(value) in (int, float) and -128 <= value < 128 and (dtype.kind == "f" or (dtype.kind == "i" and type(value) is int)):
        return value  # fits all of them
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    return value if array.dtype is dtype else converted(array, dtype)


# What writes into its first argument, and the place of the values.
_WRITERS: dict[Any, int] = {np.copyto: 1, np.fill_diagonal: 1, np.put: 2, np.putmask: 2, np.place: 2, np.put_along_axis: 2}


def _floats(dtype: np.dtype, values: Any) -> bool:
    """Whether all arrays of the arguments have this type of floats: the result fits then."""
    given = [v for v in _leaves(values) if not isinstance(v, (int, str, type, np.dtype, type(None)))]
    return dtype.kind == "f" and bool(given) and all(getattr(v, "dtype", None) == dtype for v in given)


def _leaves(values: Any) -> Any:
    for v in values:
        if isinstance(v, (list, tuple)):
            yield from _leaves(v)
        else:
            yield v


def _into(view: View, result: Any) -> View:
    if np.shape(result) != view.shape:
        raise errors.Shape(f"out has the shape {view.shape}, the result has {np.shape(result)}")
    view[...] = result
    return view


class View(np.ndarray):
    """An array in shared memory, valid until its request or batch is over."""

    __slots__ = ("_life",)
    _life: Life | None

    def __array_finalize__(self, parent: Any) -> None:
        # A slice shares the life of its view; a copy has none.
        self._life = life = parent._life if isinstance(parent, View) and not self.flags.owndata else None
        if life is not None:
            life._slices.add(self)

    def __setitem__(self, key: Any, value: Any) -> None:
        if type(value) is not np.ndarray or value.dtype is not self.dtype:
            value = _held(value, self.dtype)
        _setitem(self, key, value)

    def fill(self, value: Any) -> None:
        self[...] = value

    # NumPy wraps and overflows where a function writes an array of another type, unless the caller says casting=.
    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out")
        view = out[0] if isinstance(out, tuple) and len(out) == 1 else None
        if method == "at" and isinstance(inputs[0], View):
            inputs = (*inputs[:2], *(_held(v, inputs[0].dtype) for v in inputs[2:]))
        plain, named = _plain(inputs), {k: _plain(v) for k, v in kwargs.items()}
        if not isinstance(view, View) or "casting" in named:
            pass
        elif method != "__call__" and not _floats(view.dtype, plain):
            del named["out"]
            return _into(view, getattr(ufunc, method)(*plain, **named))
        elif method == "__call__" and view.dtype != np.result_type(*(np.asarray(v) if isinstance(v, (list, tuple)) else v for v in plain)):
            named["out"] = None  # NumPy warns of a where without it
            result = ufunc(*plain, **named)
            where: Any = ...
            if "where" in named:
                where = np.broadcast_to(named["where"], view.shape)
                result = np.broadcast_to(result, view.shape)[where]
            view[where] = result
            return view
        result = getattr(ufunc, method)(*plain, **named)
        return result if not isinstance(out, tuple) or len(out) > 1 or out[0] is None else out[0]

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        written, at, view = args[0] if args else None, _WRITERS.get(func, 0), kwargs.get("out")
        if isinstance(written, View) and 0 < at < len(args) and "casting" not in kwargs:
            args = (*args[:at], _held(args[at], written.dtype), *args[at + 1 :])
        plain, named = _plain(args), {k: _plain(v) for k, v in kwargs.items()}
        if not isinstance(view, View) or "casting" in named or _floats(view.dtype, plain):
            return func(*plain, **named)
        del named["out"]
        return _into(view, func(*plain, **named))

    def __reduce__(self) -> Any:
        return np.array(self, subok=False).__reduce__()

    def __repr__(self) -> str:
        return repr(self.view(np.ndarray))

    def __str__(self) -> str:
        return str(self.view(np.ndarray))

    __hash__ = None  # type: ignore[assignment]


def _raise(over: View, *_: Any, **__: Any) -> Any:
    assert over._life is not None
    raise over._life.error()


class Over(View):
    """A view whose request or batch is over."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        return _get(self, name) if name in _QUIET else _raise(self)

    # NumPy before 1.25 turns errors of == and != into a warning and False.
    __getitem__ = __setitem__ = __len__ = __iter__ = __eq__ = __ne__ = __array_ufunc__ = __array_function__ = __reduce__ = _raise

    def __repr__(self) -> str:
        return "<ringbatch view that is over>"

    __str__ = __repr__
