#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that every source file names its licence in its first lines.

    spdx.py          names the files that do not; exit status 1 if there are any
    spdx.py --fix    writes the line into them
"""

import subprocess
import sys
from pathlib import Path

LINE = "SPDX-License-Identifier: Apache-2.0"
FIRST_LINES = 3  # a shebang or a doctype may come first

# The licence comment by the end of the file's name. For Go and protoc an empty line
# keeps it out of the documentation.
HASH, SLASHES, STAR = f"# {LINE}\n", f"// {LINE}\n", f"/* {LINE} */\n"
COMMENT = {
    **dict.fromkeys((".go", ".proto"), SLASHES + "\n"),
    **dict.fromkeys((".s", ".cu", ".cc", ".rs", ".js"), SLASHES),
    **dict.fromkeys((".c", ".h", ".pml", ".css"), STAR),
    **dict.fromkeys((".py", ".sh", ".mk", "Makefile", "Containerfile", ".yaml", ".yml", ".toml", ".service"), HASH),
    ".html": f"<!-- {LINE} -->\n",
}


def comment(path: Path) -> str:
    """The licence comment for the file; "" if it is not source."""
    found = next((c for end, c in COMMENT.items() if path.name.endswith(end)), "")
    if not found and not path.suffix and path.read_bytes()[:2] == b"#!":
        return HASH
    return found


def fix(path: Path, line: str) -> None:
    text = path.read_text(encoding="utf-8")
    stays = text.index("\n") + 1 if text.startswith(("#!", "<!doctype")) else 0
    path.write_text(text[:stays] + line + text[stays:], encoding="utf-8")


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    listed = subprocess.check_output(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root)
    missing = 0
    for name in listed.decode().split("\0")[:-1]:
        path = root / name
        if not path.is_file() or not (line := comment(path)):
            continue
        with path.open(encoding="utf-8") as f:
            if any(LINE in next(f, "") for _ in range(FIRST_LINES)):
                continue
        if "--fix" in sys.argv[1:]:
            fix(path, line)
        else:
            missing += 1
            print(f"{name}: no licence line", file=sys.stderr)
    if missing:
        print(f"python3 hack/spdx.py --fix writes {LINE!r} into them", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
