# SPDX-License-Identifier: Apache-2.0
"""How a function takes a model's tensors: by the names of its parameters, or in an order that the caller gives."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

from .. import errors

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ALL = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


class Taken(NamedTuple):
    """The parameters of a function."""

    names: list[str]
    others: bool  # it takes any name; named parameters beside **kwargs mean that it may drop other names
    known: bool = True
    places: int = 0  # the first ones are passed by position only


def taken_by(function: Callable[..., Any]) -> Taken:
    """Asks a function, a torch.nn.Module or a TorchScript one."""
    forward = getattr(function, "forward", function)
    schema = getattr(forward, "schema", None)  # of TorchScript
    if schema is not None:
        return Taken([a.name for a in schema.arguments if a.name != "self"], False)
    try:
        found = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return Taken([], True, known=False)
    inside = [*function.children()] if hasattr(function, "children") else []
    passes_on = type(function).__module__.partition(".")[0] in ("torch", "peft")  # torch.compile, DataParallel, peft
    if passes_on and {p.kind for p in found} == _ALL and len(inside) == 1:
        return taken_by(inside[0])  # which may drop names
    names = [p.name for p in found if p.kind in _NAMED]
    exported = getattr(function, "_in_spec", None)  # a program keeps the places of torch.export
    others = not names and any(p.kind == p.VAR_KEYWORD for p in found)
    return Taken(names, others, places=exported.children_specs[0].num_children if exported else 0)


class Passing(NamedTuple):
    """Where the function takes each tensor."""

    places: list[str]  # tensors by position
    keywords: dict[str, str]  # tensors by parameter

    def caller(self, function: Callable[..., Any], given: Sequence[str]) -> Callable[[Sequence[Any]], Any]:
        """The function of a list of tensors. given: their names."""
        places, keywords = [given.index(name) for name in self.places], [(p, given.index(name)) for p, name in self.keywords.items()]
        if places == [*range(len(given))]:
            return lambda xs: function(*xs)
        return lambda xs: function(*[xs[i] for i in places], **{p: xs[i] for p, i in keywords})


def passing(takes: Taken, inputs: Sequence[str], args: Sequence[str] | None = None, more: Sequence[str] = ()) -> Passing:
    """args: the inputs in the function's order. Without it they are passed by name, and a single one by position if need be.
    more: tensors that are always passed by name."""
    said = f"it takes {', '.join(takes.names) or 'arguments without names'}; the inputs are {', '.join(inputs)}"
    for name in more:
        if name not in takes.names and not takes.others:
            raise errors.Invalid(f"the module has no argument {name!r}: it takes {', '.join(takes.names)}")
    if args is None and all(name in takes.names or (takes.others and takes.known and len(inputs) > 1) for name in inputs):
        order = {name: name for name in inputs}
    elif args is None and len(inputs) > 1:
        raise errors.Invalid(f"{said}: name the inputs as its arguments, or say their order, --args {','.join(inputs)}")
    elif args is not None and sorted(args) != sorted(inputs):
        raise errors.Invalid(f"--args {','.join(args)}: want each input once, in the order of the arguments; {said}")
    elif takes.places:
        order = dict(zip([name for name in takes.names if name not in more], inputs if args is None else args))
    else:
        return Passing(list(inputs if args is None else args), {name: name for name in more})
    order.update((name, name) for name in more)
    by_place = takes.names[: takes.places]
    if takes.places and (sorted(order) != sorted(takes.names) or len(order) != len(inputs) + len(more)):
        raise errors.Invalid(f"{said}: an exported program takes all of its arguments")
    return Passing([order[name] for name in by_place], {p: name for p, name in order.items() if p not in by_place})


def in_order(function: Callable[..., Any], inputs: Sequence[str], args: Sequence[str] | None) -> Callable[..., Any]:
    """The function for arrays in the order of the inputs."""
    call = passing(taken_by(function), inputs, args).caller(function, inputs)
    return lambda *arrays: call(arrays)


def listed(args: Sequence[str] | str | None) -> list[str] | None:
    """--args a,b as a list."""
    return [name.strip() for name in args.split(",")] if isinstance(args, str) else None if args is None else list(args)
