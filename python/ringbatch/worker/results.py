# SPDX-License-Identifier: Apache-2.0
"""A model's results as outputs with names.

    a tensor                                        y
    (a, None, (b, c))                               y0, y2.0, y2.1
    {"logits": a, "past": [b]}, or a dataclass      logits, past.0

None and other objects are left out.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from typing import Any, Callable, NamedTuple

import numpy as np

from .. import errors


class Results(NamedTuple):
    tensors: dict[str, Any]
    left_out: dict[str, str]  # the types of other objects
    by_name: bool  # the model names its results: it does not return a tensor, a list or a tuple


def named(result: Any, is_tensor: Callable[[Any], bool]) -> Results:
    """The tensors in a result, by name."""
    tensors: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, value in _leaves("", result, is_tensor):
        if name in tensors or name in left_out:
            raise errors.Invalid(f"the model gives two results with the name {name!r}")
        if is_tensor(value):
            tensors[name] = value
        else:
            left_out[name] = "None" if value is None else type(value).__name__
    return Results(tensors, left_out, not is_tensor(result) and _fields(result) is not None)


def of_batch(result: Any, ranks: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, str]]:
    """What a worker's function returned, by output, and the types of all else. ranks: of the outputs' rows.

    A list is the rows of one output, and so is a tuple of rows. Other results without names are the outputs in order.
    """
    names, fields = list(ranks), _fields(result)
    found: dict[str, Any] = {}
    if fields is not None:
        found = {name: fields.pop(name) for name in names if fields.get(name) is not None}
        result = fields
    elif isinstance(result, (tuple, list)) and len(result) == len(names) > 1:
        return dict(zip(names, result)), {}
    elif len(names) == 1 and (not isinstance(result, tuple) or all(_rank(v) == ranks[names[0]] for v in result)):
        return {names[0]: result}, {}
    tensors, left_out, _ = named(result, lambda v: isinstance(v, (list, Number)) or hasattr(v, "dtype"))
    if fields is None and len(tensors) == len(names):
        return dict(zip(names, tensors.values())), left_out
    found.update((name, tensors.pop(name)) for name in names if name in tensors)
    return found, {**left_out, **{name: type(v).__name__ for name, v in tensors.items()}}


def _rank(value: Any) -> int | None:
    return None if value is None or _fields(value) is not None else np.ndim(value)


def _fields(value: Any) -> dict[str, Any] | None:
    if isinstance(value, Mapping):  # before dataclasses: transformers' ModelOutput is both, and as a dict it omits None
        return {str(key): v for key, v in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value))
    return None


def _leaves(name: str, value: Any, is_tensor: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    found = None if is_tensor(value) else _fields(value)
    if found is None and isinstance(value, (tuple, list)) and not is_tensor(value):
        found = {str(k): v for k, v in enumerate(value)} if name else {f"y{k}": v for k, v in enumerate(value)}
    if found is None:
        yield name or "y", value
        return
    for key, v in found.items():
        yield from _leaves(f"{name}.{key}" if name else key, v, is_tensor)


class Outputs:
    """Takes the outputs, and then the new states or the index, out of a model's results. The first result decides which these are.

    declared: the names of the outputs. picked: the model gives those names; otherwise the caller may have made
    them for a model whose results have none. index: the result that has the rows of the others.
    """

    def __init__(
        self, is_tensor: Callable[[Any], bool], declared: Sequence[str] = (), picked: bool = False, states: Sequence[str] = (),
        index: str | None = None,
    ) -> None:  # fmt: skip
        self._is_tensor, self._declared, self._picked, self._states = is_tensor, list(declared), picked, list(states)
        self._index = index
        self._given: list[str] = []  # the results that every call must give
        self._keys: list[str] = []  # of outputs, then states or the index
        self.names: list[str] = []  # of the outputs; empty before the first result

    def __call__(self, result: Any) -> list[Any]:
        if self._given == ["y"] == self._keys and self._is_tensor(result):
            return [result]
        r = named(result, self._is_tensor)
        if not self._keys:
            self._decide(r)
        elif list(r.tensors) != self._given and (not self._picked or not r.tensors.keys() >= {*self._keys}):
            raise errors.Invalid(f"the model gave {_listed(self._given)} in its first run, and now {_listed(r.tensors)}")
        return [r.tensors[key] for key in self._keys]

    def others(self, wrong: Sequence[int]) -> str:
        """Advice, for outputs that cannot be served."""
        left = [name for k, name in enumerate(self.names) if k not in wrong]
        if not left:
            return ""
        named = ", ".join(self.names[k] for k in wrong if k < len(self.names))
        return f". That is {named}; name the other outputs (--output): {_listed(left)}"

    def _decide(self, r: Results) -> None:
        if not r.tensors:
            raise errors.Invalid(f"the model gives no tensor: {_said(r.left_out) or 'its result is empty'}")
        given = list(r.tensors)
        keys, states = self._split(r, given)
        names = ["y"] if len(keys) == 1 and not r.by_name else keys
        if self._picked:
            for name in self._declared:
                if name not in names and name not in keys:
                    raise errors.Invalid(f"the model has no output {name!r}: it gives {_listed(keys)}")
            keys, names = [keys[0] if name == "y" and name in names else name for name in self._declared], self._declared
        elif self._declared and r.by_name and {*self._declared} <= {*keys}:
            keys = names = self._declared
        elif self._declared and r.by_name:
            raise errors.Invalid(f"the model gives {_listed(keys)} by name, and {_listed(self._declared)} are declared: use those names, "
                "or name the outputs to serve, --output NAME")
        elif len(self._declared) == len(keys):
            names = self._declared
        self._given, self._keys, self.names = given, [*keys, *states], names
        if r.left_out and not self._picked:
            print(f"note: left out {_said(r.left_out)}: no tensor", file=sys.stderr, flush=True)

    def _split(self, r: Results, given: list[str]) -> tuple[list[str], list[str]]:
        """The outputs, and the new states, which are behind them or have names, or the index."""
        if self._index is not None:
            if self._index not in given:
                raise errors.Invalid(f"the model returns {_listed(given)}, and not the index {self._index!r}")
            return [name for name in given if name != self._index], [self._index]
        if not self._states:
            return given, []
        if r.by_name:
            for name in self._states:
                if name not in given:
                    raise errors.Invalid(f"the model returns {_listed(given)}, and not the new state {name!r}")
            return [name for name in given if name not in self._states], self._states
        n = len(self._states)
        if len(given) <= n or (self._declared and not self._picked and len(given) != len(self._declared) + n):
            wanted, new = _listed(self._declared) or "its outputs", ", ".join(map(repr, self._states))
            many = f"{len(given)} tensor{'s' * (len(given) != 1)}"
            raise errors.Invalid(f"the model returns {many}: want {wanted}, and then the new state, {new}")
        return given[:-n], given[-n:]


def only_names(outputs: Any) -> list[str] | None:
    """outputs=["logits"] as names; None if the outputs are declared with types and shapes, or not given."""
    if not outputs or isinstance(outputs, Mapping):
        return None
    names = outputs.split() if isinstance(outputs, str) else list(outputs)
    plain = [":" not in name for name in names]
    if not any(plain):
        return None
    if not all(plain) or len({*names}) < len(names):
        raise errors.Invalid(f"--output {_listed(names)}: want different names, like logits, or declarations like logits:f32[10]")
    return names


def _listed(names: Any) -> str:
    return ", ".join(names)


def _said(left_out: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in left_out.items())
