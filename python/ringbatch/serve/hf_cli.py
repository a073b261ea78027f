# SPDX-License-Identifier: Apache-2.0
"""Serves a Hugging Face folder, for ``ringbatch serve``. Without transformers, so that --help works where it is not installed."""

from __future__ import annotations

import os
import sys

from .. import errors
from ..worker.import_path import name_of
from ..worker.refusal import report
from ..worker.signals import StopEvent, stop_on_signals
from . import flags


def parser() -> flags.Parser:
    p = flags.Parser("serve", "Serve a Hugging Face folder: text in, vectors or labels out.", flags.POLICY)
    p.add_argument("target", help="the folder, with config.json, safetensors and a tokenizer")
    p.add_argument("--task", help="embed or classify (default: as config.json says)")
    p.add_argument("--truncate", action="store_true", help="cut texts that are too long for the model, which are refused otherwise")
    p.add_argument("--max-bytes", type=int, help="the longest text in UTF-8 (default: 8 for each token, 32 with --truncate, at most 65536)")
    p.add_argument("--allow-pickle", action="store_true", help="load weights that are pickles, which may run any code")
    p.add_argument("--device", help="cuda, cuda:1 or cpu (default: a GPU if there is one)")
    p.add_argument("--half", action="store_true", help="compute in float16")
    p.add_argument("--bfloat16", action="store_true", help="compute in bfloat16")
    p.add_argument("--name", help="the model's name (default: $RINGBATCH_MODEL, or the folder's)")
    flags.add_join(p)
    p.add_argument("--socket", help="the broker's control socket")
    return p


def main() -> int:
    a, policy = flags.parse(parser(), None)
    try:
        import torch
        import transformers  # noqa: F401
    except ModuleNotFoundError as e:
        return flags.say_missing("hf", e)
    from ..hf import serve

    stop = StopEvent()
    stop_on_signals(stop)
    if a.join:
        policy["version"] = a.join
    name = a.name or os.environ.get("RINGBATCH_MODEL") or name_of(a.target)
    try:
        serve.__wrapped__(  # type: ignore[attr-defined]
            a.target, name, task=a.task, truncate=a.truncate, max_bytes=a.max_bytes, allow_pickle=a.allow_pickle, device=a.device,
            dtype=torch.float16 if a.half else torch.bfloat16 if a.bfloat16 else None, stop=stop, socket=a.socket, **policy)  # fmt: skip
    except (errors.Error, OSError, RuntimeError, ValueError) as e:
        report("ringbatch serve", a.target, e, f"{type(e).__name__}: {e}")
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # as ringbatch torch
