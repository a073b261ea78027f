# SPDX-License-Identifier: Apache-2.0
"""Model files that another user may have written, or put there, are not loaded."""

from __future__ import annotations

import os
import pickle

import pytest

import ringbatch as rb
from ringbatch.serve import object_cli
from ringbatch.worker import trust

OTHER = 4321  # an unknown user and group
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


class Trap:
    def __reduce__(self):
        return os.mkdir, (os.environ["SPRUNG"],)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file that makes a folder if it is loaded."""
    tmp_path.chmod(0o755)
    (folder := tmp_path / "models").mkdir(mode=0o755)
    monkeypatch.setenv("SPRUNG", str(tmp_path / "sprung"))
    path = folder / "m.pkl"
    path.write_bytes(pickle.dumps(Trap()))
    path.chmod(0o644)
    yield path
    assert not (tmp_path / "sprung").exists()


def give(path, uid, gid, mode):
    os.chown(path, uid, gid, follow_symlinks=False)
    os.chmod(path, mode)


SPOILT = {
    "everybody, the file": (lambda f: f.chmod(0o646), "everybody may write this file.*chmod o-w"),
    "everybody, its folder": (lambda f: f.parent.chmod(0o777), "everybody may replace files in .*models.*chmod o-w"),
    "everybody, a folder above": (lambda f: f.parent.parent.chmod(0o777), "everybody may replace files in .*chmod o-w"),
    "a group, the file": (lambda f: give(f, -1, OTHER, 0o664), f"everybody in group {OTHER} may write this file.*chmod g-w"),
    "a group, its folder": (lambda f: give(f.parent, -1, OTHER, 0o775), f"everybody in group {OTHER} may replace files"),
    "the owner, of the file": (lambda f: give(f, OTHER, -1, 0o644), f"m.pkl belongs to uid {OTHER}"),
    "the owner, of its folder": (lambda f: give(f.parent, OTHER, -1, 0o755), f"models belongs to uid {OTHER}"),
}


@pytest.mark.parametrize("how", [pytest.param(how, marks=() if "everybody" in how else root) for how in SPOILT])
def test_a_file_that_others_may_have_written_is_refused_and_not_loaded(file, tmp_path_factory, how):
    spoil, says = SPOILT[how]
    spoil(file)
    (link := tmp_path_factory.mktemp("links") / "m.pkl").symlink_to(file)
    for path in (file, link):
        with pytest.raises(rb.Invalid, match=says):
            object_cli.load(str(path))


@root
def test_a_link_of_another_user_is_refused(file):
    (link := file.with_name("link")).symlink_to("m.pkl")
    os.chown(link, OTHER, -1, follow_symlinks=False)
    with pytest.raises(rb.Invalid, match=f"link belongs to uid {OTHER}"):
        object_cli.load(str(link))


def test_a_private_file_is_opened_once(file, monkeypatch):
    """Also by links, in folders with the sticky bit, and where the group is the user's own."""
    file.parent.chmod(0o1777)
    file.chmod(0o664)
    monkeypatch.setattr(trust, "_is_own_group", lambda gid: gid == file.stat().st_gid)
    (link := file.with_name("link")).symlink_to("../models/m.pkl")
    monkeypatch.chdir(file.parent)
    for path in (file, link, "link", "../models/./link"):
        with trust.open_trusted(path) as f:
            assert os.path.samestat(os.fstat(f.fileno()), file.stat())
    with trust.open_trusted(file) as f:  # a new file of the same name is not read
        file.unlink()
        file.write_bytes(b"other")
        with open(trust.descriptor_path(f), "rb") as same:
            assert same.read() == f.read() != b"other"


def test_a_group_is_the_users_own_by_its_name(monkeypatch):
    monkeypatch.setattr(os, "getgroups", lambda: [os.getegid(), OTHER])
    assert trust._is_own_group(OTHER)  # has no name, as in a container
    assert not trust._is_own_group(OTHER + 1)
    monkeypatch.setattr(trust.grp, "getgrgid", lambda gid: trust.grp.struct_group(("staff", "x", gid, [])))
    assert not trust._is_own_group(os.getegid())


def test_the_folder_of_compiled_code_is_this_users(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kept"))
    assert trust.cache_folder() == str(tmp_path / "kept")
    tmp_path.chmod(0o777)
    with pytest.raises(rb.Invalid, match="everybody may replace files.*TORCHINDUCTOR_CACHE_DIR"):
        trust.cache_folder()
