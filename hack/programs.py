# SPDX-License-Identifier: Apache-2.0
"""Says why a command of a page or of a measurement cannot be run from this tree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = "|".join({p.name for p in ROOT.iterdir() if p.is_dir()} - {"bin", "build"})


def commands() -> set[str]:
    """The sub-commands of ringbatch."""
    return {"help", *re.findall(r'^\t+\{"([a-z]+)", "', (ROOT / "cmd/ringbatch/main.go").read_text(), re.M)}


def targets() -> set[str]:
    files = [ROOT / "Makefile", *ROOT.glob("hack/**/*.mk"), *ROOT.glob("deploy/**/*.mk")]
    return {name for f in files for names in re.findall(r"^([\w. -]+):(?!=)", f.read_text(), re.M) for name in names.split()}


def is_built(name: str) -> bool:
    """Whether a main package of that name exists."""
    return any((ROOT / folder / name / "main.go").exists() for folder in ("cmd", "test/cmd", "worker/onnx/cmd"))


def missing(command: str) -> str:
    """Why the command's program does not exist; "" if it does."""
    words = [w for w in command.split() if not re.match(r"[A-Z_]+=", w)]
    while words and words[0] in ("nice", "-n", "10", "taskset", "-c", "0-4"):
        words.pop(0)
    if not words:
        return "no program"
    program, *rest = words
    if program.startswith("bin/") and program != "bin/ringbatch":
        return "" if is_built(program[4:]) else f"no main package builds {program}"
    if program in ("ringbatch", "bin/ringbatch"):
        return "" if rest and rest[0] in commands() else f"ringbatch has no command {' '.join(rest[:1])!r}"
    if program == "make":
        return "" if rest and rest[0] in targets() else f"no target {' '.join(rest[:1])!r}"
    if program == "go":
        folders = [w for w in rest if w.startswith("./")]
        named = re.search(r" -run (\w{3,})", command)
        if named and not any(re.search(rf"func Test\w*{named[1]}", t.read_text()) for f in folders for t in (ROOT / f).glob("*_test.go")):
            return f"no test {named[1]} in {' '.join(folders)}"
        return next((f"no folder {f}" for f in folders if not (ROOT / f.removesuffix("/...")).exists()), "")
    if re.fullmatch(r"(.*/)?(python3?|bash|sh)", program):
        if rest[:1] == ["-m"] and rest[1].split(".")[0] != "ringbatch":
            return ""  # a module of somebody else
        path = f"python/{rest[1].replace('.', '/')}" if rest[:1] == ["-m"] else next((w for w in rest if not w.startswith("-")), "")
        return "" if (ROOT / path).exists() or (ROOT / f"{path}.py").exists() else f"no script {path}"
    return "" if "/" in program and (ROOT / program).exists() else f"no program {program}"


def of_page(text: str) -> Iterator[str]:
    """The commands in a page's code that belong to this tree: in spans, and in lines of shell blocks."""
    ours = re.compile(rf"bin/|\w*bench |(ringbatch|make|go) [a-z]{{2}}|(\S*/)?(python3?|bash) ({FOLDERS})/|({FOLDERS})/\S+\.(py|sh)( |$)")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    for line in "\n".join(blocks).splitlines() + spans:
        command = re.sub(r"^(\s*[A-Z_]+=\S+)* *| +#.*", "", line)
        if ours.match(command):
            yield command
