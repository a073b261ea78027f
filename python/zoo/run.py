#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serves each architecture of models.py by one line, and compares each answer with a direct call.

    zoo/run.py [--table docs/results/zoo.md] [NAME…]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import platform
import re
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python/tests"))
from conftest import broker_at, serving, until_stopped  # noqa: E402
from models import ENTRIES, WORDS, Entry  # noqa: E402

import ringbatch as rb  # noqa: E402
import ringbatch.hf  # noqa: E402
import ringbatch.torch  # noqa: E402
from ringbatch.binding.tensors import parse  # noqa: E402
from ringbatch.serve import object_cli  # noqa: E402
from ringbatch.worker.results import named  # noqa: E402

ROWS, TOLERANCE = 6, 1e-3


def row(entry: Entry, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A request. Sizes that vary are drawn; they go together."""
    size, made = int(rng.integers(3, 33)), {}
    for text in entry.inputs:
        t = parse(text)
        shape = tuple(size if d in t.variable else n for d, n in enumerate(t.shape))
        if t.kind == "str":
            made[t.name] = np.array(" ".join(rng.choice(WORDS[4:], size)))
        elif "mask" in t.name:
            made[t.name] = np.ones(shape, t.dtype)
        elif t.dtype.kind == "i":
            made[t.name] = rng.integers(0, 2 if "type" in t.name else 60, shape).astype(t.dtype)
        else:
            made[t.name] = rng.random(shape).astype(t.dtype)
    return made


def direct(model: Any, x: dict[str, np.ndarray], lists: bool = False) -> dict[str, np.ndarray]:
    """A call of the model itself with one row."""
    if isinstance(model, tempfile.TemporaryDirectory):
        return of_text(model.name, str(x["text"]))
    if not isinstance(model, torch.nn.Module):
        return {"y": np.asarray(object_cli.function_of(model, None)(x["x"][None]))[0]}
    tensors = {name: torch.from_numpy(np.asarray(value)[None]) for name, value in x.items()}
    with torch.inference_mode():
        if lists:
            return {name: y.numpy() for name, y in model([torch.from_numpy(x["image"])])[0].items()}
        result = model(*tensors.values()) if "x" in tensors else model(**tensors)
    found = named(result, torch.is_tensor)
    names = ["y"] if len(found.tensors) == 1 and not found.by_name else list(found.tensors)
    return {name: y[0].numpy() for name, y in zip(names, found.tensors.values())}


def of_text(folder: str, text: str) -> dict[str, np.ndarray]:
    """What transformers' own model gives for a text: the mean of its hidden states, or its scores."""
    import transformers

    name = json.loads(Path(folder, "config.json").read_text())["architectures"][0]
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt", return_token_type_ids=False)
    with torch.inference_mode():
        result = getattr(transformers, name).from_pretrained(folder).eval()(**tokens)
    count = np.array(tokens["input_ids"].shape[1])
    if "logits" not in result:
        return {"embedding": result.last_hidden_state[0].mean(0).numpy(), "tokens": count}
    scores = result.logits[0].softmax(0).numpy()
    return {"label": np.array(f"LABEL_{scores.argmax()}"), "score": scores.max(), "scores": scores, "tokens": count}


def apart(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference as a part of the largest number."""
    if got.shape != want.shape:
        raise AssertionError(f"the answer has shape {got.shape}, a direct call {want.shape}")
    if want.dtype.kind == "U":
        return float(got != want)
    if not want.size:
        return 0.0
    got, want = got.astype("float64"), want.astype("float64")
    most = np.abs(want).max()
    return float(np.abs(got - want).max() / most) if most else float(np.abs(got).max())


def check(entry: Entry, socket: str, name: str) -> tuple[list[str], float, int]:
    """The outputs, the largest difference, and the rows of the largest batch (0: it was not counted)."""
    torch.manual_seed(0)
    model = entry.make()
    if isinstance(model, torch.nn.Module):
        model.eval()
        line: dict[str, Any] = dict(inputs=entry.inputs, outputs=entry.outputs, device="cpu", max_batch_size=4,
            wait_time=0.05, socket=socket, **({"lists": True} if entry.lists else {}))  # fmt: skip
        sizes: list[int] = []
        model.register_forward_pre_hook(lambda _, args, by_name: sizes.append(len([*args, *by_name.values()][0])), with_kwargs=True)
        if entry.refused:
            rb.torch.serve(model, name, **line)
        served = until_stopped(rb.torch.serve, model, name, **line)
    elif isinstance(model, tempfile.TemporaryDirectory):
        sizes = []
        served = until_stopped(rb.hf.serve, model.name, name, device="cpu", max_batch_size=4, wait_time=0.05, socket=socket)
    else:
        sizes = []
        a = object_cli.parser().parse_args([f"{name}.joblib", "--name", name, "--input", *entry.inputs])
        served = serving(object_cli.worker_for(model, a, {"max_batch_size": 4, "wait_time": 0.05}), socket)
    rng = np.random.default_rng(1)
    rows = [row(entry, rng) for _ in range(ROWS)]
    with served, rb.connect(name, socket=socket, wait=30) as client:
        sizes.clear()
        answers = [f.result() for f in [client.submit(**x) for x in rows]]
        most = max(sizes, default=0)
        names, worst = [t.name for t in client.outputs], 0.0
        for x, answer in zip(rows, answers):
            want = direct(model, x, entry.lists)
            if {*names} != {name.partition(":")[0] for name in entry.outputs or want}:
                raise AssertionError(f"served {names}, a direct call gives {list(want)}")
            for output in names:
                y = np.asarray(answer if len(names) == 1 else answer[output])
                worst = max(worst, apart(y.reshape(()) if want[output].ndim == 0 else y, want[output]))
    return names, worst, most


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--table", type=Path)
    p.add_argument("names", nargs="*")
    a = p.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    lines, failed, served, libraries = [], [], 0, set()
    with tempfile.TemporaryDirectory(prefix="rb-zoo-") as folder, broker_at(f"{folder}/b.sock"):
        for k, e in enumerate(ENTRIES):
            if a.names and e.name not in a.names:
                continue
            began, said = time.monotonic(), io.StringIO()
            try:
                with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                    names, worst, most = check(e, f"{folder}/b.sock", f"m{k}")
                ok, text = most != 1 and worst <= TOLERANCE and e.refused is None, f"{worst:.0e}" if worst else "0"
                served += ok
                libraries.add(e.library.removeprefix("folder of "))
            except Exception as error:
                names, most = [], 0
                text = re.sub(r"\s+", " ", str(error))
                ok = e.refused is not None and re.search(e.refused, text) is not None
                text = f"refused: {text[:300]}" if ok else f"FAILS: {text[:300]}"
                if not ok:
                    said.write(traceback.format_exc())
            failed += [] if ok else [e.name]
            print(f"{e.library} {e.name}: {', '.join(names)} {text}, {most} rows ({time.monotonic() - began:.1f} s)", flush=True)
            if not ok:
                print(said.getvalue()[-1500:], flush=True)
            note = re.search("note: (left out.*): no tensor|only requests of equal size", said.getvalue())
            note = "" if note is None else note[1] or "no buckets: padding changes results"
            lines.append(f"| {e.library} | {e.name} | {' '.join(e.inputs)} | {shown(names)} | {most or ''} | {text} | {note} |")
    print(f"{served} of {len(lines)} served, of {len(libraries)} libraries; failed: {', '.join(failed) or 'none'}")
    if a.table:
        a.table.write_text(page(lines, served, len(libraries)))
    return bool(failed)


def shown(names: list[str]) -> str:
    return ", ".join(names if len(names) < 6 else [*names[:3], f"and {len(names) - 3} more"])


def page(lines: list[str], served: int, libraries: int) -> str:
    import importlib.metadata as packages

    versions = ", ".join(f"{name} {packages.version(name)}" for name in ("torch", *dict.fromkeys(e.library.removeprefix("folder of ") for e in ENTRIES)))
    return f"""# Models of other libraries, each served by one line

{datetime.date.today()}, `make zoo`, {platform.machine()}, CPU; {versions}.

{served} architectures of {libraries} libraries, in small configurations with random weights. Each is served as its library makes it,
by `rb.torch.serve(model, name, inputs=[…])`, detectors with their outputs and `lists=True`; folders by `rb.hf.serve(folder)`;
estimators by the worker that `ringbatch serve` makes of them. {ROWS} requests of one row are in flight at once.
*batch* is the rows of the largest batch (folders and estimators are not counted). *difference* is the largest from a direct call of the model
with that row alone, as a part of the largest number; up to {TOLERANCE:g} passes.

| library | architecture | inputs | outputs | batch | difference | note |
|---|---|---|---|---|---|---|
{chr(10).join(lines)}
"""


if __name__ == "__main__":
    sys.exit(main())
