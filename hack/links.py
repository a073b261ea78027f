#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the links of every Markdown page of the repository that point into the
repository: the file must be there, and in a page the heading, too.

    python3 hack/links.py [FILE...]

Takes a fraction of a second and no network: links to other hosts are not followed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!\\)!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+(?:\([^()\s]*\)[^()\s]*)*)(?:\s+\"[^\"]*\")?\)")
OUTSIDE = re.compile(r"^[a-z][a-z0-9+.-]*:", re.I)


def prose(text: str) -> str:
    """The text without code blocks and inline code, with the same number of lines."""
    text = re.sub(r"^(```|~~~).*?^\1[^\n]*$", lambda m: "\n" * m.group().count("\n"), text, flags=re.S | re.M)
    return re.sub(r"`[^`\n]*`", "", text)


def slug(heading: str) -> str:
    heading = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.strip().lower()))


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^(```|~~~).*?^\1[^\n]*$", "", page.read_text(), flags=re.S | re.M)
    found = {slug(h) for h in re.findall(r"^#{1,6}\s+(.+?)\s*#*$", text, re.M)}
    return found | set(re.findall(r"<a (?:name|id)=\"([^\"]+)\"", text))


def pages() -> list[Path]:
    listed = subprocess.check_output(["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"], cwd=ROOT, text=True)
    return [ROOT / name for name in listed.splitlines() if (ROOT / name).exists()]


def broken(page: Path) -> list[str]:
    found = []
    for number, line in enumerate(prose(page.read_text()).splitlines(), 1):
        for link in LINK.findall(line):
            if OUTSIDE.match(link) or link.startswith("//"):
                continue
            where, _, anchor = link.partition("#")
            target = (page.parent / where).resolve() if where else page
            name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
            if not target.exists():
                found.append(f"{name}:{number}: {link}: there is no such file")
            elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                found.append(f"{name}:{number}: {link}: there is no such heading")
    return found


def main() -> int:
    wrong = [w for page in (map(Path, sys.argv[1:]) if sys.argv[1:] else pages()) for w in broken(page.resolve())]
    for w in wrong:
        print(w, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
