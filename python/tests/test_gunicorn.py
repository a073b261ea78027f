# SPDX-License-Identifier: Apache-2.0
"""gunicorn, which forks its workers: with and without preload."""

from __future__ import annotations

import os
import socket as sockets
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

pytest.importorskip("gunicorn")

LAZY = """
import os
import numpy as np
import ringbatch as rb

_model = None

def model():
    global _model
    if _model is None:          # once per worker process, after the fork
        _model = rb.connect("echo")
    return _model

def app(environ, start_response):
    y = model()(np.full(16, 3, "float32"))
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [f"{os.getpid()} {y.sum():.0f}".encode()]
"""

EAGER = """
import numpy as np
import ringbatch as rb

model = rb.connect("echo")      # in the parent, if it preloads

def app(environ, start_response):
    text = f"{model(np.full(16, 3, 'float32')).sum():.0f}"
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [text.encode()]
"""


def free_port() -> int:
    with sockets.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def get(port: int) -> str:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as r:
                return r.read().decode()
        except urllib.error.HTTPError:
            raise
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@pytest.mark.parametrize(
    "source, flags, expected",
    [(LAZY, [], "48"), (LAZY, ["--preload"], "48"), (EAGER, [], "48"), (EAGER, ["--preload"], "48")],
    ids=["lazy", "lazy-preload", "eager", "eager-preload"],
)
def test_gunicorn(echo, tmp_path, source, flags, expected):
    (tmp_path / "app.py").write_text(source)
    port = free_port()
    command = [sys.executable, "-m", "gunicorn", "--workers", "2", "--bind", f"127.0.0.1:{port}", "--log-level", "error", *flags, "app:app"]
    p = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "RINGBATCH_SOCKET": echo})
    try:
        answers = [get(port) for _ in range(10)]
        assert all(expected in a for a in answers), answers
    finally:
        p.terminate()
        assert p.wait(60) == 0
