# SPDX-License-Identifier: Apache-2.0
"""Serves a Python object: a function of arrays, a scikit-learn estimator, a worker, or a function that makes one of these.

``ringbatch serve`` starts it for .joblib and .pkl files and import paths.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import errors
from ..binding.tensors import FULL, NAMES, Declared, parse
from ..worker import program, trials
from ..worker.arguments import in_order, listed
from ..worker.axes import Input
from ..worker.batch import Batch
from ..worker.import_path import imported, name_of
from ..worker.refusal import report
from ..worker.results import Outputs, only_names
from ..worker.ring import worker_options
from ..worker.signals import StopEvent, stop_on_signals
from ..worker.trust import WARNING, open_trusted
from ..worker.worker import Worker
from . import flags, torch_cli

METHODS = ("predict", "transform")  # of an estimator that cannot be called; the first that it has
_WAIT_S = 10.0

# A function raises these if it does not take its rows. Others, like OSError, may be gone at the next start.
_WRONG = (TypeError, ValueError, LookupError, AttributeError, NameError, ArithmeticError, AssertionError)


def parser() -> argparse.ArgumentParser:
    p = flags.Parser("serve", f"Serve a Python object. Beware: {WARNING}.")
    p.add_argument("target", help="model.joblib, model.pkl, or package.module:name")
    p.add_argument("--input", action="append", metavar="SPEC",
        help="input tensor of one row, like 'x:f32[4]' (repeatable; an estimator may tell its own)")
    p.add_argument("--args", metavar="NAMES", help="the inputs in the order of the function's arguments, where those have other names: a,b")
    p.add_argument("--output", action="append", metavar="SPEC",
        help="an output by its name, like logits, or a declared one, like 'y:f32[4]' (default: all, found by running one row)")
    p.add_argument("--no-check", action="store_false", dest="check",
        help="serve also what gives other results for rows in a batch than for each alone")
    p.add_argument("--method", help="the method of the object to call (default: the object itself, or predict, or transform)")
    p.add_argument("--name", help="the model's name (default: $RINGBATCH_MODEL, or the target's)")
    flags.add_join(p)
    p.add_argument("--socket", help="the broker's control socket")
    return p


def load(target: str) -> Any:
    """The object, loaded from a file or imported; a factory is called."""
    path = Path(target)
    if path.exists():
        if path.suffix == ".joblib":
            try:
                import joblib  # type: ignore[import-not-found, import-untyped, unused-ignore]
            except ModuleNotFoundError:
                raise errors.Invalid(f"{target} needs the package joblib: pip install joblib") from None
            read: Callable[[Any], Any] = joblib.load
        else:
            read = pickle.load
        try:
            with open_trusted(path) as f:
                return read(f)
        except (pickle.UnpicklingError, EOFError, IndexError, KeyError, ImportError, AttributeError) as e:
            raise errors.Invalid(f"{target} cannot be loaded: {type(e).__name__}: {e}") from e
    found = imported(target)
    return found() if _is_factory(found) else found


def _is_factory(found: Any) -> bool:
    """Whether it takes no arguments: then its result is served."""
    if isinstance(found, Worker) or not (inspect.isfunction(found) or isinstance(found, type)):
        return False
    try:
        inspect.signature(found).bind()
    except (TypeError, ValueError):
        return False
    return True


def function_of(thing: Any, method: str | None) -> Callable[..., Any]:
    """The function that is called with arrays of rows."""
    if method:
        found = getattr(thing, method, None)
        if not callable(found):
            raise errors.Invalid(f"{type(thing).__name__} has no method {method!r}")
        return found
    if inspect.iscoroutinefunction(thing):
        raise errors.Invalid("it is a coroutine function: decorate it with @ringbatch.worker, which runs those")
    if callable(thing) and not isinstance(thing, type):
        return thing
    for name in METHODS:
        if callable(getattr(thing, name, None)):
            return getattr(thing, name)
    raise errors.Invalid(f"{thing!r} cannot be served: it is neither a function nor has it {' or '.join(METHODS)}; name the method, "
        "--method decision_function")


def fixed(text: str) -> Declared:
    """A tensor whose sizes do not vary."""
    t = parse(text)
    if t.variable or t.memory:
        raise errors.Invalid(f"tensor {text!r}: want name:dtype[dims] with sizes that do not vary, like x:f32[4]; others need "
            "@ringbatch.worker")
    return t


def inputs_of(thing: Any, given: Sequence[str] | None) -> list[Declared]:
    features = getattr(thing, "n_features_in_", None)
    if not given and features is None:
        raise errors.Invalid("the object does not tell its inputs: name them, --input 'x:f32[4]'")
    return list(map(fixed, given or [f"x:{_kind_of(thing)}[{features}]"]))


def _kind_of(thing: Any) -> str:
    """The type that an estimator was fitted with: float32 if all numbers that it learned are."""
    learned = {value.dtype for name, value in getattr(thing, "__dict__", {}).items() if name.endswith("_") and isinstance(value, np.ndarray)
        and value.dtype.kind == "f"}  # fmt: skip
    return "f32" if learned == {np.dtype("f4")} else "f64"


def zeros(inputs: Sequence[Declared], rows: int) -> list[np.ndarray]:
    """Rows of zeros, or of empty texts."""
    return [np.full((rows, *t.items), "", object) if t.kind == "str" else np.zeros((rows, *t.shape), t.dtype) for t in inputs]


def is_array(value: Any) -> bool:
    """Whether a result is an array: a list has its rows."""
    return isinstance(value, (list, bool, int, float)) or hasattr(value, "__array__")


def outputs_of(function: Callable[..., Any], inputs: Sequence[Declared], taken: Outputs) -> list[str]:
    """Runs one row of zeros, then three: as many rows must come out."""
    try:
        tried = [list(map(np.asarray, taken(function(*zeros(inputs, rows))))) for rows in (1, 3)]
    except errors.Error:
        raise
    except _WRONG as e:
        why = f"given {' and '.join(map(str, inputs))}, rows of zeros, it raises {type(e).__name__}: {e}"
        raise errors.Invalid(f"{why}. If it takes no zeros, say what it gives: --output 'y:f32[4]'") from e
    for rows, ys in zip((1, 3), tried):
        wrong = [k for k, y in enumerate(ys) if not y.ndim or len(y) != rows]
        for k in wrong:
            raise errors.Invalid(f"{rows} rows went in, and an array of shape {ys[k].shape} came out: a served function returns a row for "
                f"each row{taken.others(wrong)}")
    texts = []
    for name, y in zip(taken.names, tried[0]):
        kind = dict(zip(FULL, NAMES)).get(y.dtype.name)
        if kind is None:
            text = f", for text --output '{name}:str[<=64]'" if y.dtype.kind in "UO" else ""
            raise errors.Invalid(f"it gives {y.dtype}, which is no tensor's type; --method predict_proba gives numbers, and so may your "
                f"own function{text}")
        texts.append(f"{name}:{kind}[{','.join(map(str, y.shape[1:]))}]")
    return texts


def check_outputs(function: Callable[..., Any], inputs: Sequence[Declared], outputs: Sequence[str], taken: Outputs) -> None:
    """Refuses a function whose outputs for a row of zeros differ from --output."""
    try:
        specs = list(map(fixed, outputs))
        result = function(*zeros(inputs, 1))
    except Exception:  # the sizes vary, or the function takes no zeros
        return
    ys = taken(result)
    if len(ys) != len(specs):
        raise errors.Invalid(f"--output {', '.join(t.name for t in specs)}: it gives {len(ys)} outputs: {', '.join(taken.names)}")
    for t, y in zip(specs, ys):
        got = np.shape(y)
        if got != (1, *t.items):
            raise errors.Invalid(f"--output {t.name}: one row went in, and an array of shape {got} came out, not {(1, *t.items)}")


class _Tried:
    """The function, for trials before serving."""

    def __init__(self, function: Callable[..., Any], taken: Outputs) -> None:
        self._function, self._taken = function, taken

    def run(self, rows: Sequence[np.ndarray], true: object) -> list[np.ndarray]:
        return list(map(np.asarray, self._taken(self._function(*(x.copy() for x in rows)))))  # it may write into them


def check_rows(function: Callable[..., Any], inputs: Sequence[Declared], taken: Outputs) -> None:
    """Refuses a function whose rows give other results in a batch than alone."""
    texts = np.array(["a", "text", ""], object)
    xs = [np.resize(texts, (3, *t.items)) if t.kind == "str" else trials.example([Input.of(t)], [t.shape], [t.dtype], 3)[0] for t in inputs]
    try:
        trials.refuse_mixed_rows(_Tried(function, taken), xs, trials.TOLERANCE, adjustable=False)
    except errors.Invalid:
        raise
    except Exception:  # it takes no random numbers
        return


def worker_for(thing: Any, a: argparse.Namespace, settings: dict[str, Any]) -> Worker:
    if isinstance(thing, Worker):
        given = [key for key in ("input", "args", "output", "method") if getattr(a, key)]
        unused = [f"--{key.replace('_', '-')}" for key in (*given, *settings)]
        if unused:
            raise errors.Invalid(f"it is a @ringbatch.worker, which has its tensors and settings with it: leave {', '.join(unused)} away")
        return thing.with_version(a.join) if a.join else thing
    function = function_of(thing, a.method)
    inputs = inputs_of(thing, a.input)
    function = in_order(function, [t.name for t in inputs], listed(a.args))
    picked = only_names(a.output)
    taken = Outputs(is_array, [parse(text).name for text in a.output or ()] if picked is None else picked, picked is not None)
    if a.output and not picked and a.check:
        check_outputs(function, inputs, a.output, taken)
    outputs = a.output if a.output and not picked else outputs_of(function, inputs, taken)
    if a.check and str(settings.get("max_batch_size")) != "1":
        check_rows(function, inputs, taken)

    def run(batch: Batch) -> Any:
        # Copies: the function may write into its arguments.
        ys = taken(function(*(np.array(batch.inputs[t.name], object if t.kind == "str" else None) for t in inputs)))
        return dict(zip(taken.names, ys))

    signature = f"{' '.join(map(str, inputs))} -> {' '.join(outputs)}"
    name = a.name or os.environ.get("RINGBATCH_MODEL") or name_of(a.target)
    settings.setdefault("version", a.join or program.of_target(a.target, [a.method, a.args]))
    return Worker(run, name, signature, worker_options(**settings))


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    a, settings = flags.parse(parser(), argv)
    stop = StopEvent()
    try:
        thing = load(a.target)
        if "torch" in sys.modules and isinstance(thing, sys.modules["torch"].nn.Module):
            return torch_cli.main(argv)
        worker = worker_for(thing, a, settings)
        stop_on_signals(stop)
        print(f"serving {worker.model}: {worker.signature}", flush=True)
        worker.run(socket=a.socket, stop=stop, wait=_WAIT_S)
    except Exception as e:
        report("ringbatch serve", a.target, e, f"{a.target}: {type(e).__name__}: {e}")
        return 1
    return 0


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(main())
