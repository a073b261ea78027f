# SPDX-License-Identifier: Apache-2.0
"""The flags of ``ringbatch torch``. Without torch, so that --help works where it is not installed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from . import flags, serve_cli


def parser() -> argparse.ArgumentParser:
    p = flags.Parser(
        "torch",
        "Serve a PyTorch model: an exported program (.pt2), a TorchScript file, or a torch.nn.Module by its import path. "
        "Loading a .pt2 file or importing a module can run any code in it: serve only what you trust.",
        flags.POLICY,
    )
    p.add_argument("target", help="model.pt2 of torch.export.save, a file of torch.jit.save, or package.module:name, a module or a "
        "function that makes one")
    p.add_argument("--input", action="append", metavar="SPEC",
        help="input tensor of one row, like 'x:f32[3,224,224]' (repeatable; .pt2 files tell theirs)")
    p.add_argument("--args", metavar="NAMES", help="the inputs in the order of the module's arguments, where those have other names: a,b")
    p.add_argument("--output", action="append", metavar="SPEC",
        help="an output by its name, like logits, or a declared one, like 'y:f32[10]' (default: all, found by running the model once)")
    p.add_argument("--state", action="append", default=[], metavar="SPEC",
        help="state tensor of a sequence, like 'h:f32[512]' (repeatable): a keyword argument of the model, which returns the new state "
        "behind its outputs")
    p.add_argument("--name", help="the model's name (default: $RINGBATCH_MODEL, or the file's)")
    p.add_argument("--device", help="cuda, cuda:1 or cpu (default: a GPU if there is one)")
    p.add_argument("--memory", help="device: the tensors lie in the GPU's memory, for producers that have theirs there; host (default)")
    p.add_argument("--live-weights", action="store_true", help="follow the weights that a ringbatch.publisher of this model publishes")
    p.add_argument("--half", action="store_true", help="compute in float16")
    p.add_argument("--bfloat16", action="store_true", help="compute in bfloat16")
    p.add_argument("--channels-last", action="store_true", help="lay images out channels last")
    p.add_argument("--cuda-graphs", action="store_true", default=None,
        help="record the model once per batch size and replay it (default: where that works)")
    p.add_argument("--no-cuda-graphs", action="store_false", dest="cuda_graphs", help="launch the model's kernels one by one")
    p.add_argument("--no-freeze", action="store_false", dest="freeze", help="leave the module as it is: fold and fuse no operations")
    p.add_argument(
        "--compile", choices=("auto", "on", "off"), default="off",
        help="torch.compile: auto takes it where results agree and a full batch is quicker, measured before serving; "
        "needs a C++ compiler on the CPU. The code is kept in $TORCHINDUCTOR_CACHE_DIR, or ringbatch/torch in the user's cache folder "
        "(default off)",
    )  # fmt: skip
    flags.add_sizes(p)
    p.add_argument("--packed", metavar="NAMES",
        help="all inputs whose size varies: rows of all sizes share a batch without padding, and the model gets each input as one tensor, "
        "and offsets")
    p.add_argument("--lists", action="store_true",
        help="the model takes a list of rows for each input, and returns a list with a result for each row, as detectors do: declare the "
        "most that a row may have, --output 'boxes:f32[<=100,4]'")
    p.add_argument("--index", metavar="NAME",
        help="the model returns the boxes of all rows as one tensor, and the result of this name (y0, y1 ... of a tuple) is the row of "
        "the batch that each belongs to: declare the most that a row may have, as with --lists")
    p.add_argument(
        "--tolerance", type=float,
        help="how far results of a row may differ in a batch from those alone, as a part of the largest number (default 0.001; "
        "0.02 on a GPU, and with 16 bits or a quantized model)",
    )  # fmt: skip
    p.add_argument(
        "--no-check", action="store_false", dest="check",
        help="serve also a model whose rows give other results in a batch than alone, or whose outputs are others than --output says (not "
        "where inputs vary)",
    )  # fmt: skip
    p.add_argument("--depth", type=int, default=2, help="batches in flight (default 2)")
    p.add_argument("--processes", type=int, default=1, help="worker processes; one that dies is started again (default 1)")
    flags.add_join(p)
    p.add_argument("--socket", help="the broker's control socket")
    p.add_argument("--alone", type=int, metavar="ROWS", help="no broker: run full batches of own data, one for each byte on standard input")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    a, settings = flags.parse(parser(), argv)
    if a.processes > 1:
        return serve_cli.main(["--kind", "torch", "--no-costs", *(sys.argv[1:] if argv is None else argv)])
    try:
        from ..torch.serving import serve_file
    except ModuleNotFoundError as e:
        return flags.say_missing("torch", e)
    return serve_file(a, settings)


def main_and_exit() -> None:
    status = main()
    sys.stdout.flush()
    os._exit(status)  # at the interpreter's end the driver's clean-up of a lost context can hang


if __name__ == "__main__":
    main_and_exit()
