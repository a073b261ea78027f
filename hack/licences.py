#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The licences of all modules in the ringbatch command, for `ringbatch licenses`.

    licences.py           write cmd/ringbatch/licenses.txt
    licences.py --check   fail if the file is out of date

The text has every module's licence and notice files from Go's module cache. Modules with
the same text share it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
TARGET = REPOSITORY / "cmd/ringbatch/licenses.txt"
NAMES = ("LICENSE", "LICENCE", "COPYING", "NOTICE")
RULE = "=" * 80


def go(*args: str) -> str:
    return subprocess.check_output(["go", *args], cwd=REPOSITORY, text=True)


def linked() -> dict[str, Path]:
    """The modules whose packages are in the command, and their folders."""
    found, form = {}, "{{with .Module}}{{if not .Main}}{{.Path}} {{.Version}}\t{{.Dir}}{{end}}{{end}}"
    for line in go("list", "-deps", "-f", form, "./cmd/ringbatch").splitlines():
        name, _, folder = line.partition("\t")
        if name:
            found[name] = Path(folder)
    return dict(sorted(found.items()))


def texts(folder: Path) -> str:
    files = sorted(f for f in folder.iterdir() if f.is_file() and f.name.upper().startswith(NAMES))
    return "\n\n".join(f.read_text(encoding="utf-8").strip() for f in files)


def document() -> str:
    version = "go" + json.loads(go("mod", "edit", "-json"))["Go"]
    by_text: dict[str, list[str]] = {texts(Path(go("env", "GOROOT").strip())): [f"the Go standard library ({version} or later)"]}
    for name, folder in linked().items():
        text = texts(folder)
        if not text:
            sys.exit(f"{name} has no licence file")
        by_text.setdefault(text, []).append(name)
    parts = ["ringbatch is under the Apache License 2.0. Its command also contains what follows.\n"]
    for text, names in by_text.items():
        parts.append(f"{RULE}\n" + "\n".join(names) + f"\n{RULE}\n\n{text}\n")
    return "\n".join(parts)


def main() -> int:
    wanted = document()
    if sys.argv[1:] == ["--check"]:
        if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != wanted:
            sys.exit(f"{TARGET.relative_to(REPOSITORY)} does not fit go.mod; run hack/licences.py")
        return 0
    TARGET.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
