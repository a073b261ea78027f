#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts lines of comments and manuals whose subject is hidden: clauses and pronouns in place of broker, worker, client.

    python3 hack/words.py [--list]      fails above 1.5 % in all, or 3 % in a folder; --list prints the lines

It skips the lab notebook and the changelog. Go's net/http, os and sync have 0.2 to 0.5 %.
"""

from __future__ import annotations

import collections
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST, MOST_IN_FOLDER, FEW = 1.5, 3.0, 30  # percent, percent, lines: smaller folders are not judged
HIDDEN = re.compile(
    r"\b(what (is|was|are|were|it|they|he|has|had|comes|came|goes|else|ran|runs)|one (that|who|which)|ones that|those (that|who|which)|"
    r"that which|so many|as many of them|tells?|told|who (is|has|waits?|asks?|comes|holds|looks|claims|writes|leaves|was)|whoever|"
    r"whichever|nobody|for ever|anew|held against|all the same|of (its|their) own|lies? (there|in|beside|one)|in haste|mend(s|ed)?|"
    r"of the moment|the (former|latter)|goes? apart|news)\b", re.I)  # fmt: skip


def texts(path: Path) -> list[tuple[int, str]]:
    """The comments of a source file, or the prose of a page, by line."""
    text = path.read_text(errors="replace")
    if path.suffix == ".py":
        kept = (tokenize.COMMENT, tokenize.STRING)
        found = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type in kept]
        found = [t for t in found if t.type == tokenize.COMMENT or t.string.lstrip("rR").startswith('"""')]
        return [(t.start[0] + i, line) for t in found for i, line in enumerate(t.string.splitlines())]
    if path.suffix == ".md":
        text = re.sub(r"^```.*?^```[^\n]*$", lambda m: "\n" * m.group().count("\n"), text, flags=re.S | re.M)
        return list(enumerate(text.splitlines(), 1))
    comment = re.compile(r"(?:^|\s)//\s?(.*)$" if path.suffix == ".go" else r"^\s*(?:/\*|\*|//)\s?(.*)|/\*\s(.*)\*/")
    found = [(n, comment.search(line)) for n, line in enumerate(text.splitlines(), 1)]
    return [(n, next(filter(None, m.groups()), "")) for n, m in found if m]


def main() -> int:
    seen, hidden = collections.Counter(), collections.Counter()
    for name in subprocess.check_output(["git", "ls-files", "*.go", "*.c", "*.h", "*.cu", "*.py", "*.md"], cwd=ROOT, text=True).split():
        path = ROOT / name
        if not path.exists() or "docs/results/" in name or name.endswith((".pb.go", "CHANGELOG.md")) or name == "hack/words.py":
            continue
        folder = "docs" if path.suffix == ".md" else "/".join(name.split("/")[:-1][:2])
        for number, line in texts(path):
            if line.strip():
                seen[folder] += 1
                if HIDDEN.search(line):
                    hidden[folder] += 1
                    if "--list" in sys.argv[1:]:
                        print(f"{name}:{number}: {line.strip()}")
    share = 100 * sum(hidden.values()) / sum(seen.values())
    over = [f for f in hidden if seen[f] >= FEW and 100 * hidden[f] / seen[f] > MOST_IN_FOLDER]
    print(f"{share:.2f} % of {sum(seen.values())} lines hide their subject" + "".join(f"; {f}: above {MOST_IN_FOLDER} %" for f in over))
    return 1 if share > MOST or over else 0


if __name__ == "__main__":
    sys.exit(main())
