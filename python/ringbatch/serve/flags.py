# SPDX-License-Identifier: Apache-2.0
"""Flags that ``ringbatch serve``, ``torch`` and ``onnx`` share."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from ..worker.refusal import print_error, refused


class Parser(argparse.ArgumentParser):
    """Prints --help as the other commands do. cmd/ringbatch/help holds the same texts,
    for machines without Python."""

    def __init__(self, command: str, description: str, epilog: str = "") -> None:
        super().__init__(prog=f"ringbatch {command}", description=description, epilog=epilog, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        if refused(message):
            self.exit(2)
        super().error(message)

    def format_help(self) -> str:
        given = [a for a in self._actions if not a.option_strings]
        flags = [a for a in self._actions if a.option_strings and a.dest != "help"]
        about = textwrap.fill(" ".join([self.description or "", *(f"{a.dest.upper()} is {a.help}." for a in given)]), 92)
        heads = ["      " + " ".join([a.option_strings[-1], *_value(a)]) for a in flags]
        wide = max(map(len, heads))
        lines = [f"{head:<{wide}}   {a.help}" for head, a in zip(heads, flags)]
        usage = " ".join([f"Usage: {self.prog} [flags]", *(a.dest.upper() for a in given)])
        return "\n\n".join([about, usage, "\n".join(lines), textwrap.fill(self.epilog or "", 92)]).rstrip() + "\n"


def _value(a: argparse.Action) -> list[str]:
    """The value behind a flag in its help; a switch has none."""
    if a.nargs == 0:
        return []
    kind = getattr(a.type, "__name__", "string")
    return ["|".join(a.choices) if a.choices else str(a.metavar or kind)]


POLICY = "Other flags are settings of the model's policy, which the broker reads: --max-batch-size=32 --wait-time=5ms"


def say_missing(command: str, e: ModuleNotFoundError) -> int:
    """Says how to install a missing package; returns the exit status."""
    if not refused(why := f"{e}: pip install './python[{command}]' in a clone of ringbatch"):
        print_error(f"ringbatch {command}: {why}")
    return 1


def parse(p: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, dict[str, str]]:
    """The flags of p, and the settings of the model's policy."""
    own, rest = p.parse_known_args(argv)
    try:
        return own, _settings(rest)
    except ValueError as e:
        p.error(str(e))


def _settings(flags: Sequence[str]) -> dict[str, str]:
    """Flags that the parser does not know: --key=value, --key value, or --key for true."""
    settings: dict[str, str] = {}
    key = ""
    for flag in flags:
        if flag.startswith("--"):
            key, _, value = flag[2:].partition("=")
            name, dot, part = key.partition(".")
            if "_" in name:
                raise ValueError(f"no flag --{name}; did you mean --{name.replace('_', '-')}?")
            key = name.replace("-", "_") + dot + part
            settings[key] = value or "true"
        elif settings.get(key) == "true":
            settings[key] = flag
        else:
            raise ValueError(f"{flag!r} belongs to no flag")
    return settings


def add_join(p: argparse.ArgumentParser) -> None:
    p.add_argument("--join", choices=("any",), help="serve the model also beside workers that compute something else")


def add_sizes(p: argparse.ArgumentParser) -> None:
    """Adds the flags for sizes that vary."""
    p.add_argument(
        "--lengths", metavar="NAME",
        help="argument of the model that takes the true sizes of padded rows; requests do not bring it (NAME=INPUT.DIMENSION where "
        "several sizes vary)",
    )  # fmt: skip
    p.add_argument("--mask", metavar="NAME", help="argument of the model that takes their mask: one in true places, zero in padding")
    known = "the value that the model knows padding by (default none)"
    p.add_argument("--pad", action="append", default=[], metavar="[INPUT=]VALUE", help=known)
    p.add_argument("--no-buckets", action="store_false", dest="pad_sizes",
        help="don't round sizes up: only requests of equal size share a batch")
