# SPDX-License-Identifier: Apache-2.0
"""What a worker computes, as a short text.

The broker refuses a worker beside workers of another text: their answers would mix. So the processes of
one program have one text, and different programs have different ones.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import CodeType
from typing import Any

from .import_path import is_import_path

_MOST_CHARACTERS = 100  # of a name
_PIECE = 1 << 20


def of_function(function: Any) -> str:
    """Of a function, class or object: its source file, the script, and the script's arguments."""
    code = _code(function)
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    files = [os.path.abspath(p) for p in (sys.argv[0] if sys.argv else "", code.co_filename if code else "")]
    read = code is None or Path(files[1]).is_file()
    return _text(name, files, [name, *sys.argv[1:], *files, *([] if read or code is None else _constants(code))])


def of_target(target: str | Path | bytes, options: Iterable[object] = ()) -> str:
    """Of a file, its bytes, or an import path that was imported; options change the answers."""
    if isinstance(target, bytes):
        return _text("model", [], [target, *options])
    if is_import_path(text := str(target)):
        found = sys.modules.get(text.partition(":")[0])
        return _text(text, [getattr(found, "__file__", None) or ""], [text, *options])
    return _text(Path(text).name, [text], options)


def of_folder(folder: Path, options: Iterable[object]) -> str:
    """Of the files in a folder and in the folders below it."""
    ends = (".json", ".txt", ".model", ".safetensors", ".bin")
    files = sorted(str(f) for f in (*folder.glob("*"), *folder.glob("*/*")) if f.suffix in ends)
    return _text(folder.resolve().name, files, options)


def _text(name: str, files: Iterable[str], parts: Iterable[object]) -> str:
    h = hashlib.sha256()
    for part in parts:
        raw = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogateescape")
        h.update(b"%d " % len(raw) + raw)
    for file in files:
        if Path(file).is_file():
            h.update(b"file")
            with open(file, "rb") as f:
                while piece := f.read(_PIECE):
                    h.update(piece)
    printable = "".join(c if c.isascii() and c.isprintable() else "?" for c in name[:_MOST_CHARACTERS])
    return f"{printable} {h.hexdigest()[:12]}"


def _code(function: Any) -> CodeType | None:
    """The code of a function, or of the first method of a class or object."""
    function = inspect.unwrap(function) if callable(function) else function
    kind = function if isinstance(function, type) else type(function)
    members = (value for base in kind.__mro__ for value in vars(base).values())
    return next((v.__code__ for v in (function, *members) if hasattr(v, "__code__")), None)


def _constants(code: CodeType) -> list[object]:
    """A code without a file: it was typed in, or is a text."""
    own = [c for c in code.co_consts if not isinstance(c, CodeType)]
    return [code.co_code, own, *(x for c in code.co_consts if isinstance(c, CodeType) for x in _constants(c))]
