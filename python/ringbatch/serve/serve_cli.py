# SPDX-License-Identifier: Apache-2.0
"""``ringbatch serve TARGET``: any model in one line.

1. the target's type says which command serves it
2. a broker is started if none runs, then the worker processes, and the gateway if asked for
3. once the model answers: a line of Python, a line of curl, and the cost of its batches
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from .. import errors
from ..binding.library import binary_path, seconds
from ..binding.tensors import FULL, NAMES, parse
from ..worker.import_path import is_import_path, name_of
from ..worker.signals import stopping
from ..worker.trust import WARNING, open_trusted
from . import flags
from .broker import ask_broker, socket_path
from .gateway import gateway_table
from .supervisor import run_commands

# By the end of the file's name: the module of this package that serves it.
KINDS = {
    ".pt": "torch", ".pt2": "torch", ".pth": "torch", ".jit": "torch", ".torchscript": "torch",
    ".onnx": "onnx",
    ".joblib": "object", ".pkl": "object", ".pickle": "object",
}  # fmt: skip
_LOOK_S = 0.2
_MEASURE_S = 3
_SHORT = 16  # elements in a line of curl

# The types' names in the Open Inference Protocol.
_OIP = dict(zip(NAMES, ("BOOL", "UINT8", "INT8", "INT16", "INT32", "INT64", "FP16", "BF16", "FP32", "FP64", "BYTES")))
_NUMPY = {**dict(zip(NAMES, FULL)), "bf16": "uint16"}  # which is right without ml_dtypes, too


def parser() -> argparse.ArgumentParser:
    p = flags.Parser(
        "serve",
        f"Serve a model: a file that ends in {', '.join(KINDS)}, a Hugging Face folder, or a Python object, package.module:name (a "
        "function of arrays, an estimator, a torch.nn.Module, a @ringbatch.worker, or a function without arguments that makes one). "
        f"Starts a broker if none runs. Beware: {WARNING}.",
        "Other flags are those of `ringbatch torch` or `ringbatch onnx`, or settings of the model's policy: --input 'x:f32[4]' "
        "--max-batch-size=32. Of a Python object: --input and --output, one row each, --method and --no-check. Of a folder: --task embed "
        "or classify, --truncate, --max-bytes, --allow-pickle, --device, --half and --bfloat16.",
    )
    p.add_argument("target", help="the file, or package.module:name")
    p.add_argument("--name", help="the model's name (default: the target's)")
    p.add_argument("--processes", type=int, default=1, help="worker processes; one that dies is started again (default 1)")
    p.add_argument("--kind", choices=("torch", "onnx", "object", "hf"), help="how to serve it (default: by the target's type)")
    p.add_argument("--socket", help="the broker's control socket")
    p.add_argument("--idle", metavar="DURATION", help="end after that long without a client, like 10m (default: never)")
    p.add_argument("--http", metavar="PORT", help="also serve HTTP, at this port of this host or this address (docs/gateway.md)")
    p.add_argument("--grpc", metavar="PORT", help="also serve gRPC")
    p.add_argument("--no-costs", action="store_false", dest="costs", help="don't measure what batches cost, once the model answers")
    return p


def main(argv: list[str] | None = None) -> int:
    p = parser()
    a, rest = p.parse_known_args(argv)
    if a.processes < 1:
        p.error("--processes is a number from 1 on")
    try:
        if a.idle is not None and seconds(a.idle) < 1:
            raise errors.Invalid(f"--idle is {a.idle}, must be 1s or more: clients need some time to connect")
        kind = a.kind or kind_of(a.target)
        if Path(a.target).is_file():
            open_trusted(a.target).close()  # checked again when it is loaded
        name = a.name or os.environ.get("RINGBATCH_MODEL") or name_of(a.target)
        at = socket_path(a.socket)
        worker = [sys.executable, "-m", f"ringbatch.serve.{kind}_cli", a.target, "--name", name, "--socket", at, *rest]
        with stopping() as stop:
            ready = threading.Event()
            threading.Thread(target=tell, args=(name, at, a.http, a.costs and kind != "hf", stop, ready), daemon=True).start()
            run_commands([worker], [a.processes], at, stop, gateway_table(at, a.http, a.grpc), True, lambda joined: ready.set(),
                seconds(a.idle or 0))
            stop.set()
    except errors.Error as e:
        print(f"ringbatch serve: {e}", file=sys.stderr)
        return 1
    return 0


def kind_of(target: str) -> str:
    """torch, onnx, object, or hf for a folder."""
    if Path(target).is_dir():
        return "hf"
    if is_import_path(target):
        return "object"
    kind = KINDS.get(Path(target).suffix.lower())
    if kind is None:
        gone = "" if Path(target).exists() else "there is no such file or folder; "
        raise errors.Invalid(f"{target}: {gone}want a file that ends in {', '.join(KINDS)}, a Hugging Face folder, or package.module:name")
    if not Path(target).exists():
        raise errors.Invalid(f"{target}: there is no such file")
    return kind


def tell(name: str, at: str, http: str | None, costs: bool, stop: threading.Event, ready: threading.Event) -> None:
    """Waits for our workers, then prints how to call the model, what its batches cost and what more workers would give."""
    known = {m["name"] for m in _models(at)}
    model = None
    while not ready.is_set() or model is None:
        if stop.wait(_LOOK_S):
            return
        there = [m for m in _models(at) if m["workers"]]
        new = [m for m in there if m["name"] not in known]  # a @ringbatch.worker brings its name
        model = next((m for m in there if m["name"] == name), new[0] if new else None)
    name = model["name"]
    inputs = [_spec(text) for text in model["signature"].split("->")[0].split()]
    print("\n" + python_line(name, inputs, at))
    print(curl_line(name, inputs, http) if http else "curl: --http 8000 also serves HTTP")
    sys.stdout.flush()
    if costs and not stop.is_set():
        measure = [binary_path(), "simulate", name, "--socket", at, "--duration", f"{_MEASURE_S}s", "--requests", "5000"]
        p = subprocess.run(measure, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        print("\n" + p.stdout, flush=True)


def _models(at: str) -> list[dict[str, Any]]:
    return ask_broker("models", at) or []


def _spec(text: str) -> tuple[str, str, list[int]]:
    """Name, type and shape of an example row: a size that varies is 1."""
    t = parse(text)
    return t.name, t.kind, [1 if i in t.variable else d for i, d in enumerate(t.items)]


def _value(kind: str) -> Any:
    return {"bool": False, "str": "text"}.get(kind, 0)


def python_line(name: str, inputs: list[tuple[str, str, list[int]]], at: str) -> str:
    def value(kind: str, shape: list[int]) -> str:
        text = f"np.full({tuple(shape)}, 'text')" if shape else "'text'"
        return text if kind == "str" else f"np.zeros({tuple(shape)}, {_NUMPY[kind]!r})"

    arrays = ", ".join(value(kind, shape) for _, kind, shape in inputs)
    where = "" if at == socket_path(None) else f", socket={at!r}"
    return f'python: python3 -c "import numpy as np, ringbatch as rb; print(rb.connect({name!r}{where})({arrays}))"'


def curl_line(name: str, inputs: list[tuple[str, str, list[int]]], http: str) -> str:
    if any(kind not in _OIP for _, kind, _ in inputs):
        return "curl: the protocol of HTTP has no float8"
    url = f"http://{'127.0.0.1:' + http if http.isdigit() else http}/v2/models/{name}/infer"
    if sum(math.prod(shape) for _, _, shape in inputs) <= _SHORT:
        zeros = [[_value(k)] * math.prod(s) for _, k, s in inputs]
        tensors = [{"name": n, "datatype": _OIP[k], "shape": [1, *s], "data": data} for (n, k, s), data in zip(inputs, zeros)]
        return f"curl: curl {url} -d '{json.dumps({'inputs': tensors}, separators=(',', ':'))}'"
    texts = [f"[{'False' if k == 'bool' else json.dumps(_value(k))}]*{math.prod(s)}" for _, k, s in inputs]
    made = ",".join(f'{{"name":"{n}","datatype":"{_OIP[k]}","shape":{[1, *s]},"data":{z}}}' for (n, k, s), z in zip(inputs, texts))
    return f"curl: python3 -c 'import json; print(json.dumps({{\"inputs\":[{made}]}}))' | curl {url} -d @-"


if __name__ == "__main__":
    sys.exit(main())
