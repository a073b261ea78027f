#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/commands.md: the commands in groups, from `ringbatch help`.

    hack/commands.py write BINARY     docs/commands.md from the binary's own words
    hack/commands.py check BINARY     fail if the page differs from them

`make site` adds every command's --help (see mksite.py).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/commands.md"

GROUPS = {
    "Start": ["serve", "broker", "worker", "torch", "onnx", "gateway", "relay"],
    "Try": ["infer", "demo", "bench"],
    "Look": ["models", "stats", "top", "dashboard", "trace", "ready", "doctor"],
    "Change": ["set", "scale", "restart", "alias"],
    "Tune": ["profile", "simulate", "tune"],
    "Other": ["completion", "version", "licenses"],
}
INTRO = """# Commands

Written by `hack/commands.py write` from `ringbatch help`. `ringbatch COMMAND --help` explains the flags;
the site's reference has all of these texts. Exit status: 0 done, 1 failed, 2 wrong usage.

Every command finds the broker by `--socket`, else by `$RINGBATCH_SOCKET`, else in the user's runtime folder.
"""


def briefs(binary: str) -> dict[str, str]:
    """The commands and what each does, in the binary's words."""
    text = subprocess.run([binary, "help"], capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"^  ([a-z]+) +(\S.*)$", text.split("--help")[0], re.M))


def page(binary: str) -> str:
    found = briefs(binary)
    listed = [name for names in GROUPS.values() for name in names]
    if wrong := set(listed) ^ set(found):
        sys.exit(f"hack/commands.py and `ringbatch help` disagree on: {', '.join(sorted(wrong))}")
    out = [INTRO]
    for group, names in GROUPS.items():
        out += [f"## {group}", "", "| | |", "|---|---|", *(f"| `ringbatch {name}` | {found[name]} |" for name in names), ""]
    return "\n".join(out)


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in ("write", "check"):
        sys.exit(__doc__)
    text = page(sys.argv[2])
    if sys.argv[1] == "write":
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        sys.exit("docs/commands.md differs from `ringbatch help`; run: hack/commands.py write bin/ringbatch")


if __name__ == "__main__":
    main()
