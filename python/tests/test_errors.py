# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re

import pytest
from conftest import REPOSITORY

import ringbatch as rb
from ringbatch import errors
from ringbatch.binding.library import load
from ringbatch.binding.structs import PROTOTYPES


def test_exceptions_mirror_the_statuses_of_the_library():
    lib = load()
    for status, cls in errors.BY_STATUS.items():
        assert lib.rb_status_name(status).decode() == cls.__name__ and getattr(rb, cls.__name__) is cls
        assert bool(lib.rb_status_retryable(status)) == cls.retryable
        assert cls.__name__ in errors.__all__
        assert cls.__doc__
    assert lib.rb_status_name(len(errors.BY_STATUS) + 1) == b"Unknown"
    assert rb.ForkedClient is rb.Forked


def test_prototypes_are_those_of_the_header():
    header = REPOSITORY / "cbindings" / "ringbatch.h"
    if not header.exists():
        pytest.skip("no header here")
    declared = re.findall(r"^RB_API [^(]*?\*?(rb_\w+)\(([^;]*)\);", header.read_text(), re.M)
    counts = {name: 0 if arguments == "void" else arguments.count(",") + 1 for name, arguments in declared}
    for name, (_, arguments) in PROTOTYPES.items():
        assert counts[name] == len(arguments), name


def test_unknown_status():
    assert "status 99" in str(errors.error_for(99, "?"))
