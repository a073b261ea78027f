# SPDX-License-Identifier: Apache-2.0
"""A broker, or a process, that has no room for one more connection."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from conftest import broker_at

import ringbatch as rb

MODEL = """
[[model]]
name = "m"
inputs = ["x:f32[1]"]
outputs = ["y:f32[1]"]
"""


def test_one_connection_too_many_is_refused_by_name(home, at):
    (home / "b.toml").write_text("max_clients = 1\n" + MODEL)
    with broker_at(at, "--config", str(home / "b.toml")), rb.connect("m", socket=at, window=1):
        with pytest.raises(rb.TooManyConnections, match="max_clients is 1") as refused:
            rb.connect("m", socket=at, window=1, wait=0)
        assert refused.value.retryable and isinstance(refused.value, ConnectionError)


def test_a_process_without_descriptors_is_told_that_it_is_its_own(socket):
    script = """
        import os, resource, sys
        import ringbatch as rb

        rb.stats(socket=sys.argv[1])  # everything that is opened once is open
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        taken = []
        try:
            while True:
                taken.append(os.dup(0))
        except OSError:
            pass
        for room in range(8):  # for the socket, then also for what comes with the answer
            try:
                rb.connect("no such model", socket=sys.argv[1], wait=0)
            except rb.Error as e:
                print(type(e).__name__, "this process" in str(e), isinstance(e, OSError))
            os.close(taken.pop())
    """
    said = subprocess.run([sys.executable, "-c", textwrap.dedent(script), socket], check=True, capture_output=True, text=True,
        timeout=200).stdout.splitlines()
    assert said[0] == "NoDescriptors True True"
    assert said[-1] == "UnknownModel False False"
    assert set(said) == {said[0], said[-1]}
