# SPDX-License-Identifier: Apache-2.0
"""Flags that ``ringbatch torch`` and ``ringbatch onnx`` share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def parse(p: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, dict[str, str]]:
    """The flags of p, and the settings of the model's policy."""
    own, rest = p.parse_known_args(argv)
    try:
        return own, _settings(rest)
    except ValueError as e:
        p.error(str(e))


def _settings(flags: Sequence[str]) -> dict[str, str]:
    """Flags that are not ours: --key=value, --key value, or --key for true."""
    settings: dict[str, str] = {}
    key = ""
    for flag in flags:
        if flag.startswith("--"):
            key, _, value = flag[2:].partition("=")
            settings[key] = value or "true"
        elif settings.get(key) == "true":
            settings[key] = flag
        else:
            raise ValueError(f"{flag!r} belongs to no flag")
    return settings


def add_sizes(p: argparse.ArgumentParser) -> None:
    """For sizes that vary."""
    p.add_argument(
        "--lengths", metavar="NAME",
        help="argument of the model that takes the true sizes of padded rows; requests do not bring it (NAME=INPUT.DIMENSION where several sizes vary)",
    )  # fmt: skip
    p.add_argument("--mask", metavar="NAME", help="argument of the model that takes their mask: one in true places, zero in padding")
    p.add_argument("--pad", action="append", default=[], metavar="[INPUT=]VALUE", help="what padding is filled with (default 0)")
    p.add_argument("--no_buckets", action="store_false", dest="buckets", help="don't round sizes up: only requests of equal size share a batch")
