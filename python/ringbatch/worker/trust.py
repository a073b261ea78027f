# SPDX-License-Identifier: Apache-2.0
"""Refuses model files that another user may have written: loading such a file may run code.

A file is trusted if no other user can have written or placed it: the file and
every folder and link on its path belong to this user or to root, and no others
may write them. internal/trust does the same for Go.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .. import errors

WARNING = "a pickle (.pkl, .joblib, and what is inside .pt2) can run any code when it is loaded: serve only files that you trust"

_MOST_LINKS = 40  # as in the kernel


def open_trusted(path: str | Path) -> BinaryIO:
    """Opens a model's file; raises Invalid. Load it from the descriptor: the name may lead elsewhere later."""
    try:
        refuse_way_of_others(path)
        if stat.S_ISFIFO(os.stat(path).st_mode):  # open would wait for a writer
            raise errors.Invalid(f"{path} is a pipe, not a model's file")
        f = open(path, "rb")  # noqa: SIM115 - the caller closes it
        try:
            _refuse_others(str(path), os.fstat(f.fileno()), path)
        except errors.Invalid:
            f.close()
            raise
        return f
    except IsADirectoryError:
        raise errors.Invalid(f"{path} is a folder, not a model's file") from None
    except OSError as e:
        raise errors.Invalid(f"{path}: {e.strerror}") from None


def descriptor_path(f: BinaryIO) -> str:
    """The path of an open file, for loaders that take a path."""
    return f"/proc/self/fd/{f.fileno()}"


def refuse_way_of_others(path: str | Path) -> None:
    """Raises Invalid if another user could have written or replaced the file or folder."""
    for entry, about in _way_to(path):
        _refuse_others(entry, about, path)


def cache_folder() -> str:
    """The folder of compiled code, created if it is missing."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(base, "ringbatch", "torch"))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        refuse_way_of_others(folder)
    except errors.Invalid as e:
        raise errors.Invalid(f"{e}; name another folder for compiled code in $TORCHINDUCTOR_CACHE_DIR") from None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return str(folder)


def _way_to(path: str | Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every folder and link on the path of a file, and the file, from the root on."""
    at, todo, links = "/", list(reversed(Path(os.getcwd(), path).parts)), 0
    while todo:
        name = todo.pop()
        if name == "..":
            at = os.path.dirname(at)
            continue
        entry = os.path.join(at, name)
        about = os.lstat(entry)
        yield entry, about
        if not stat.S_ISLNK(about.st_mode):
            at = entry
        elif (links := links + 1) > _MOST_LINKS:
            raise errors.Invalid(f"{path}: too many links lead to it")
        else:
            todo += reversed(Path(os.readlink(entry)).parts)


def _refuse_others(entry: str, about: os.stat_result, path: str | Path) -> None:
    """In a folder with the sticky bit, such as /tmp, users cannot replace the entries of others."""
    risk = "and loading it may run what they wrote"
    if about.st_uid not in (0, os.geteuid()):
        raise errors.Invalid(f"{path}: {entry} belongs to uid {about.st_uid}, {risk}: files of this user and of root are loaded, and no "
            "others")
    folder = stat.S_ISDIR(about.st_mode)
    if stat.S_ISLNK(about.st_mode) or (folder and about.st_mode & stat.S_ISVTX):
        return
    does = f"may replace files in {entry}" if folder else "may write this file"
    fix = f"{entry}, or move the file" if folder else entry
    if about.st_mode & stat.S_IWOTH:
        raise errors.Invalid(f"{path}: everybody {does}, {risk}: chmod o-w {fix}")
    if about.st_mode & stat.S_IWGRP and not _is_own_group(about.st_gid):
        raise errors.Invalid(f"{path}: everybody in group {about.st_gid} {does}, {risk}: chmod g-w {fix}")


def _is_own_group(gid: int) -> bool:
    """Whether the group has this user's name, as many systems create one for each user. In a container it may have none."""
    if gid not in (os.getegid(), *os.getgroups()):
        return False
    try:
        name = grp.getgrgid(gid).gr_name
    except KeyError:
        return True
    try:
        return name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
