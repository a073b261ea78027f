# SPDX-License-Identifier: Apache-2.0
"""What ``import ringbatch`` loads."""

from __future__ import annotations

import subprocess
import sys


def loaded(code: str) -> list[str]:
    code += "; import sys; print(*(name for name in sys.modules if name.partition('.')[0] == 'asyncio'))"
    return subprocess.check_output([sys.executable, "-c", code], text=True).split()


def test_asyncio_is_left_to_those_who_use_it():
    assert loaded("import numpy, ringbatch") == loaded("import numpy") == []


def test_a_worker_of_coroutines_is_declared_without_asyncio():
    declare = "import ringbatch as rb; x = {'x': ('float32', (4,))}; w = rb.worker('m', inputs=x, outputs=x, concurrency=2)"
    define = "exec('async def run(batch): pass'); w(run)"
    assert loaded(f"{declare}; {define}") == []
