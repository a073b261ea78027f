# SPDX-License-Identifier: Apache-2.0
"""One version: of the file VERSION, the package, its library and its command."""

from __future__ import annotations

import os
import subprocess
from importlib import metadata

from conftest import REPOSITORY

import ringbatch as rb
from ringbatch.binding import library


def test_the_package_the_library_and_the_command_have_the_version_of_the_file():
    version = (REPOSITORY / "VERSION").read_text(encoding="utf-8").strip()
    assert metadata.version("ringbatch") == version
    assert rb.__version__ == version  # which the library tells
    assert subprocess.check_output([rb.binary_path(), "--version"], text=True).split()[:2] == ["ringbatch", version]


def test_the_library_counts_the_cores_that_this_process_may_use():
    assert 1 <= library.cores() <= len(os.sched_getaffinity(0))
