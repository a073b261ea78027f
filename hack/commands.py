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

INTRO = """# Commands

Written by `hack/commands.py write` from `ringbatch help`. `ringbatch COMMAND --help` explains the flags, `ringbatch help policy`
those of the batching policy; the site's reference has all of these texts. Exit status: 0 done, 1 failed, 2 wrong usage.

Flags are written with dashes; underscores work, too. Durations are `5ms`, `1.5s`, or a number of seconds.

Every command finds the broker by `--socket`, else by `$RINGBATCH_SOCKET`, else in the user's runtime folder.
"""


def groups(binary: str) -> dict[str, dict[str, str]]:
    """The commands of each group and what each does, in the binary's words."""
    text = subprocess.run([binary, "help"], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^([A-Z]\w+)\n((?:  [a-z]+ +\S.*\n)+)", text, re.M)
    return {group: dict(re.findall(r"^  ([a-z]+) +(\S.*)$", lines, re.M)) for group, lines in found}


def page(binary: str) -> str:
    out = [INTRO]
    for group, briefs in groups(binary).items():
        out += [f"## {group}", "", "| | |", "|---|---|", *(f"| `ringbatch {name}` | {brief} |" for name, brief in briefs.items()), ""]
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
