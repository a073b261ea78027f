# SPDX-License-Identifier: Apache-2.0
"""The inputs and outputs of an ONNX graph, as ringbatch declares them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort

from .. import errors
from ..binding import tensors
from ..worker.axes import Axes, Extra, Input, Output, extra_inputs
from ..worker.trust import open_trusted

_KINDS = {
    "tensor(bool)": "bool", "tensor(uint8)": "u8", "tensor(int8)": "i8", "tensor(int16)": "i16", "tensor(int32)": "i32",
    "tensor(int64)": "i64", "tensor(float16)": "f16", "tensor(float)": "f32", "tensor(double)": "f64",
}  # fmt: skip
NUMPY = {kind: np.dtype(name).type for kind, name in zip(tensors.NAMES, tensors.NUMPY)}


class Node(NamedTuple):
    """An input or output of the graph."""

    name: str  # in the graph
    kind: str
    dims: tuple[Any, ...]  # with the batch dimension: numbers, symbols, None

    @property
    def public(self) -> str:
        """Its name in the ring, which excludes some characters."""
        return re.sub(r"[:\[\],\s]", "_", self.name)


class State(NamedTuple):
    """A state of sequences: the graph reads it as an input and writes the next one as an output."""

    name: str
    read: Node
    write: Node


class Graph:
    """The graph's inputs and outputs, with the largest size of each dimension. The states are the last of both."""

    def __init__(
        self, session: ort.InferenceSession, dims: Mapping[str, str], lengths: str | None, mask: str | None,
        states: Mapping[str, tuple[str, str]] | None = None, outputs: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        nodes = [_node("input", n) for n in session.get_inputs()]
        results = [_node("output", n) for n in session.get_outputs() if n.type in _KINDS or not outputs]
        self.states = [_state(name, *pair, nodes, results) for name, pair in (states or {}).items()]
        for side in zip(*self.states):
            if len(set(side)) < len(self.states):
                raise errors.Invalid("each --state has its own input and output of the graph")
        self.outputs = _last(_picked(results, outputs), [s.write for s in self.states])
        made = {text.partition("=")[0]: what for what, text in (("lengths", lengths), ("mask", mask)) if text}
        for name, what in made.items():
            if name not in [n.name for n in nodes]:
                raise errors.Invalid(f"--{what} {name}: the graph has no such input; it has {', '.join(n.name for n in nodes)}")
        self.nodes = _last([n for n in nodes if n.name not in made], [s.read for s in self.states])
        if len(self.nodes) == len(self.states):
            raise errors.Invalid("the graph has no input that a request could bring")
        _check_batch(nodes)
        sizes = _Sizes(dims)
        self.inputs = [sizes.input(n) for n in self.nodes]
        sizes.finish()
        first = len(self.nodes) - len(self.states)
        self.inputs[first:] = [i._replace(name=s.name) for i, s in zip(self.inputs[first:], self.states)]
        axes = Axes(self.inputs, None)
        self.extras = extra_inputs(axes, _with_axis(lengths, nodes, axes), _with_axis(mask, nodes, axes))
        self.extra_nodes = {n.name: n for n in nodes if n.name in made}
        for e in self.extras:
            _check_extra(e, self.extra_nodes[e.name])

    def dtypes(self) -> list[np.dtype]:
        return [np.dtype(NUMPY[n.kind]) for n in self.nodes]

    def extra(self, e: Extra, lengths: np.ndarray, most: int) -> np.ndarray:
        """The lengths of some rows, or their mask, in the graph's shape and type."""
        node = self.extra_nodes[e.name]
        ones = (1,) * (len(node.dims) - (1 if e.what == "lengths" else 2))
        mask = (np.arange(most) < lengths[:, None]).reshape(len(lengths), *ones, most)
        return np.ascontiguousarray(lengths.reshape(-1, *ones) if e.what == "lengths" else mask, NUMPY[node.kind])


def session_of(model: str | Path | bytes, threads: int, providers: Sequence[str] | None, spin: bool = True) -> ort.InferenceSession:
    """Loads a file; an error has one line."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if not spin:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    there = ort.get_available_providers()
    wanted = [_provider(p, there) for p in providers or ["CPUExecutionProvider"]]
    if not isinstance(model, bytes):
        open_trusted(model).close()  # onnxruntime opens it by name: weights may be in files beside it
    try:
        return ort.InferenceSession(model if isinstance(model, bytes) else str(model), options, providers=wanted)
    except Exception as e:
        what = "the model" if isinstance(model, bytes) else model
        raise failure(e, wanted, f"{what}: onnxruntime cannot load it: ") from None


def _provider(name: str, there: Sequence[str]) -> str:
    """CUDAExecutionProvider, or cuda for short."""
    for p in there:
        if name.lower() in (p.lower(), p.lower().removesuffix("executionprovider")):
            return p
    raise errors.Invalid(f"--provider {name}: this onnxruntime has {', '.join(there)}")


_WRONG = ("InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NoModel", "NotImplemented")  # of onnxruntime


def failure(e: Exception, providers: Sequence[str], text: str) -> Exception:
    """The exception for an error of onnxruntime: Invalid if the graph is wrong, so that no restart helps. A device without
    memory, or that is not up yet, gives the same errors as some wrong graphs."""
    passing = isinstance(e, (OSError, MemoryError)) or "alloc" in str(e).lower()
    elsewhere = any(p != "CPUExecutionProvider" for p in providers) and type(e).__name__ not in _WRONG
    return (RuntimeError if passing or elsewhere else errors.Invalid)(text + first_line(e))


def first_line(e: BaseException) -> str:
    return str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__


def _node(side: str, n: Any) -> Node:
    if n.type not in _KINDS:
        raise errors.Invalid(f"{side} {n.name!r} is a {n.type}, which no ring holds; there are {', '.join(_KINDS)}"
            + ". Name the outputs to serve without it, --output NAME" * (side == "output"))  # fmt: skip
    return Node(n.name, _KINDS[n.type], tuple(d or None if isinstance(d, str) else d for d in n.shape))


def _state(name: str, read: str, write: str, inputs: Sequence[Node], outputs: Sequence[Node]) -> State:
    for side, wanted, nodes in (("input", read, inputs), ("output", write, outputs)):
        if wanted not in [n.name for n in nodes]:
            raise errors.Invalid(f"--state {name}={read}:{write}: the graph has no {side} {wanted!r}; it has "
                f"{', '.join(n.name for n in nodes)}")
    return State(name, *(next(n for n in nodes if n.name == wanted) for wanted, nodes in ((read, inputs), (write, outputs))))


def _picked(results: Sequence[Node], names: Sequence[str] | None) -> list[Node]:
    """The outputs with these names, in their order; all without names."""
    if not names:
        return list(results)
    for name in names:
        if not any(name in (n.name, n.public) for n in results) or names.count(name) > 1:
            raise errors.Invalid(f"--output {name}: want different outputs of the graph; it has {', '.join(n.name for n in results)}")
    return [next(n for n in results if name in (n.name, n.public)) for name in names]


def _last(nodes: Sequence[Node], states: list[Node]) -> list[Node]:
    return [n for n in nodes if n not in states] + states


def refuse_states(states: Sequence[State], inputs: Sequence[Input], outputs: Sequence[Output]) -> None:
    """Refuses a next state that differs from the state in type or shape."""
    first = len(inputs) - len(states), len(outputs) - len(states)
    for s, i, o in zip(states, inputs[first[0] :], outputs[first[1] :]):
        if s.read.kind != s.write.kind or i.shape != o.largest or i.variable or o.variable:
            raise errors.Invalid(f"--state {s.name}: the graph reads {_text(s.read)} from {s.read.name!r} and writes {_text(s.write)} to "
                f"{s.write.name!r}: both have one type, and rows of one fixed shape")


def _text(n: Node) -> str:
    return f"{n.kind}[{','.join('?' if d is None else str(d) for d in n.dims)}]"


def _check_batch(nodes: Sequence[Node]) -> None:
    """The first dimension of every input must be free, and the same."""
    others = {d for n in nodes for d in n.dims[1:] if isinstance(d, str)}
    for n in nodes:
        if not n.dims:
            raise errors.Invalid(f"input {n.name!r} has no dimensions, so none for the batch: make it a constant, or one number per row")
        if isinstance(n.dims[0], int):
            raise errors.Invalid(
                f"input {n.name!r} has a fixed batch of {n.dims[0]}, {_text(n)}: the first dimension must be free for requests to share a "
                f"batch. Export it so, torch.onnx.export(..., dynamic_axes={{{n.name!r}: {{0: 'batch'}}, ...}}), or free it with "
                "onnx.tools.update_model_dims"
            )
        if n.dims[0] in others:
            raise errors.Invalid(f"input {n.name!r}, {_text(n)}: the batch must be the first dimension of all inputs, but {n.dims[0]!r} "
                "is another one too")


def _with_axis(text: str | None, nodes: Sequence[Node], axes: Axes) -> str | None:
    """Adds the axis to --lengths or --mask, if the graph names it by a symbol."""
    if not text or "=" in text:
        return text
    symbols = [d for n in nodes if n.name == text for d in n.dims[1:] if any(d == a.symbol for a in axes.axes)]
    return f"{text}={symbols[0]}" if symbols else text


def _check_extra(e: Extra, n: Node) -> None:
    free = n.dims[1:] if e.what == "lengths" else n.dims[1:-1]
    if (e.what == "mask" and len(n.dims) < 2) or any(d != 1 for d in free):
        want = "[batch] or [batch,1]" if e.what == "lengths" else "[batch,size] or [batch,1,...,size]"
        raise errors.Invalid(f"--{e.what} {e.name}: the graph wants {_text(n)} there, and {e.what} are {want}")


class _Sizes:
    """The largest sizes by --dim. A dimension is named by its symbol, or by its place: tokens.0."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = {name: self._read(name, str(text)) for name, text in given.items()}
        self._used: set[str] = set()
        self._missing: list[str] = []
        self._known: list[str] = []

    @staticmethod
    def _read(name: str, text: str) -> tuple[int, bool]:
        m = re.fullmatch(r"\s*(<=)?\s*([1-9]\d*)\s*", text)
        if not m:
            raise errors.Invalid(f"--dim {name}={text}: want a largest size, --dim {name}='<=512', or a fixed one, --dim {name}=128")
        return int(m[2]), bool(m[1])

    def input(self, n: Node) -> Input:
        shape, variable, symbols = [], [], []
        for i, d in enumerate(n.dims[1:]):
            if isinstance(d, int):
                shape.append(d)
                continue
            place = f"{n.public}.{i}"
            name = next((name for name in (place, d) if name in self._given), None)
            self._known.append(d or place)
            if name is None:
                self._missing.append(d or place)
                continue
            self._used.add(name)
            most, varies = self._given[name]
            shape.append(most)
            if varies:
                variable.append(i)
                symbols.append(d or place)
        return Input(n.public, n.kind, tuple(shape), tuple(variable), tuple(symbols))

    def finish(self) -> None:
        missing = list(dict.fromkeys(self._missing))
        if missing:
            flags = " ".join(f"--dim {name}='<=512'" for name in missing)
            raise errors.Invalid(
                f"the graph leaves {', '.join(map(repr, missing))} open: say how large it gets, like {flags} (or --dim {missing[0]}=128 "
                "where it never changes)"
            )
        for name in self._given:
            if name not in self._used:
                raise errors.Invalid(f"--dim {name}: the graph has no such open dimension; it has "
                    f"{', '.join(dict.fromkeys(self._known)) or 'none'}")
