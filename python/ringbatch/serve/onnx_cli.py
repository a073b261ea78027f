# SPDX-License-Identifier: Apache-2.0
"""The flags of ``ringbatch onnx``. Without onnxruntime, so that --help works where it is not installed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import flags


def parser() -> argparse.ArgumentParser:
    p = flags.Parser("onnx", "Serve an ONNX file with ONNX Runtime.", flags.POLICY)
    p.add_argument("file", type=Path, help="the ONNX file; the first dimension of each input is the batch")
    p.add_argument(
        "--dim", action="append", default=[], metavar="NAME='<=SIZE'",
        help="largest size of a dimension that the graph leaves open, or NAME=SIZE if it never changes (repeatable)",
    )  # fmt: skip
    p.add_argument("--output", action="append", metavar="NAME", help="an output of the graph to serve (repeatable; default: all)")
    p.add_argument("--state", action="append", default=[], metavar="NAME=IN:OUT",
        help="state of sequences: the graph's input for it, and the output for the next one, like h=h_in:h_out (repeatable)")
    p.add_argument("--name", help="the model's name (default: $RINGBATCH_MODEL, or the file's)")
    p.add_argument("--provider", action="append",
        help="cpu, cuda or another of onnxruntime's; the first that can run an operation does (default cpu)")
    p.add_argument("--threads", type=int, default=0, help="threads of one operation (default: one per core)")
    p.add_argument("--no-spin", action="store_false", dest="spin",
        help="threads sleep between operations: where other processes need the cores")
    flags.add_sizes(p)
    p.add_argument("--no-check", action="store_false", dest="check",
        help="serve also a model whose rows give other results in a batch than alone")
    p.add_argument("--tolerance", type=float,
        help="how far results may differ, as a part of the largest number (default 0.001, with float16 outputs 0.02)")
    p.add_argument("--depth", type=int, default=2, help="batches handed over at once (default 2)")
    flags.add_join(p)
    p.add_argument("--socket", help="the broker's control socket")
    return p


def main() -> int:
    parsed = flags.parse(parser(), None)
    try:
        from ..onnx.serving import serve_file
    except ModuleNotFoundError as e:
        return flags.say_missing("onnx", e)
    return serve_file(*parsed)


if __name__ == "__main__":
    sys.exit(main())
