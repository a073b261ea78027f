# SPDX-License-Identifier: Apache-2.0
"""Brokers that clients start: one, whoever races, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import eventually

import ringbatch as rb

X = np.ones((1, 4), "float32")
TOOL = """
import sys, numpy as np, ringbatch as rb
with rb.connect("triple", start=sys.argv[1], wait=60, retry=1e10) as model:
    print("connected", flush=True)
    for line in sys.stdin:
        print(model(np.ones((1, 4), "float32"))[0, 0], flush=True)
"""


@pytest.fixture
def at(tmp_path, monkeypatch):
    """The socket of a user whose configuration has one model, that sleeps at first."""
    config = tmp_path / "ringbatch" / "ringbatch.toml"
    config.parent.mkdir()
    command = f'["{rb.binary_path()}", "worker", "affine", "--scale", "3", "--input", "x:f32[4]"]'
    config.write_text(
        f'[[model]]\nname = "triple"\ninputs = ["x:f32[4]"]\noutputs = ["y:f32[4]"]\nidle = "1s"\n[[model.worker]]\ncommand = {command}\n'
        "instances = [0, 1]\n"
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("RINGBATCH_SOCKET", str(tmp_path / "run" / "b.sock"))
    return tmp_path / "run" / "b.sock"


def tool(idle: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", TOOL, idle], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(p: subprocess.Popen) -> str:
    p.stdin.write("\n")
    p.stdin.flush()
    return p.stdout.readline().strip()


def brokers(at) -> list[int]:
    """The processes that have the socket as an argument."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                words = f.read().split(b"\0")
        except OSError:
            continue
        if str(at).encode() in words and b"--detach" not in words:
            found.append(int(pid))
    return found


def nothing_is_left(at) -> bool:
    return not brokers(at) and os.listdir(at.parent) == [at.name + ".log"]


def test_ten_tools_that_race_share_one_broker_and_the_last_ends_it(at):
    tools = [tool("1s") for _ in range(10)]
    assert [p.stdout.readline() for p in tools] == ["connected\n"] * 10
    eventually(lambda: len(brokers(at)) == 1)  # the losers end
    tools[0].kill()  # it may have started the broker
    assert [ask(p) for p in tools[1:]] == ["3.0"] * 9
    for p in tools:
        p.communicate()
    eventually(lambda: nothing_is_left(at))


def test_a_killed_broker_is_started_again_with_the_next_call(at):
    first, second = tool("1s"), tool("1s")
    assert [p.stdout.readline() for p in (first, second)] == ["connected\n"] * 2
    for _ in range(2):
        os.kill(rb.stats()["pid"], signal.SIGKILL)
        assert [ask(p) for p in (first, second)] == ["3.0"] * 2
    for p in (first, second):
        p.communicate()
    eventually(lambda: nothing_is_left(at))


def test_a_start_that_hangs_delays_no_other_request(at, tmp_path, monkeypatch):
    go, wrapper = tmp_path / "go", tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\ncase "$*" in *--detach*) until [ -e {go} ]; do sleep 0.05; done;; esac\n'
        f'exec {rb.binary_path()} "$@"\n')  # fmt: skip
    wrapper.chmod(0o700)
    monkeypatch.setenv("RINGBATCH_BINARY", str(wrapper))
    go.touch()
    with rb.connect("triple", start="1s", wait=60, retry=True) as model:
        model(X)
        go.unlink()
        os.kill(rb.stats()["pid"], signal.SIGKILL)
        pending = [model.submit(X) for _ in range(4)]
        hurried = [model.submit(X, timeout=1) for _ in range(4)]
        assert {type(f.exception(60)) for f in hurried} <= {rb.NoBroker, rb.BrokerGone, rb.Expired}
        assert not any("has not started" in str(f.exception()) for f in hurried)  # but the request's own error
        assert not any(f.done() for f in pending)
        go.touch()
        assert [f.result(60)[0, 0] for f in pending] == [3] * 4
    eventually(lambda: nothing_is_left(at))


def test_a_client_that_comes_as_the_broker_ends_starts_another(at):
    for k in range(10):
        with rb.connect("triple", start="1s", wait=60) as model:
            assert model(X)[0, 0] == 3
        time.sleep(0.98 + 0.005 * k)
    eventually(lambda: nothing_is_left(at))


def test_a_broker_that_cannot_start_is_reported(at, tmp_path):
    config = tmp_path / "ringbatch" / "ringbatch.toml"
    config.write_text("model = 3")
    with pytest.raises(rb.NoBroker, match=r"did not start.*ringbatch\.toml.*log is"):
        rb.connect("triple", start=True)
    config.unlink()
    with pytest.raises(rb.NoBroker, match=r"ringbatch\.toml: no such file"):
        rb.connect("triple", start=True)
    with pytest.raises(rb.Invalid, match="without clients"):
        rb.connect("triple", start=0)


def test_serve_ends_when_nobody_has_come_for_its_idle_time(at, tmp_path):
    (tmp_path / "double.py").write_text("def double(x):\n    return x * 2\n")
    command = [rb.binary_path(), "serve", "double:double", "--input", "x:f32[4]", "--idle", "2s", "--no-costs"]
    p = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHON": sys.executable})
    with rb.connect("double", wait=60) as model:
        assert model(X)[0, 0] == 2
        time.sleep(3)  # a client holds it
        assert model(X)[0, 0] == 2
    assert p.wait(60) == 0
    assert not brokers(at) and not os.listdir(at.parent)
    p = subprocess.run([*command, "--idle", "0"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHON": sys.executable})  # fmt: skip
    assert p.returncode == 1 and "1s or more" in p.stderr
