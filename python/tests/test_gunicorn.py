# SPDX-License-Identifier: Apache-2.0
"""gunicorn, which forks its workers: with and without preload."""

from __future__ import annotations

import contextlib
import os
import socket as sockets
import subprocess
import sys
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


@contextlib.contextmanager
def listening(command, **kwargs):
    """A server that inherits a socket as {fd}, where callers may queue before it is up; gives its port."""
    with sockets.create_server(("127.0.0.1", 0)) as s:
        fd, port = s.fileno(), s.getsockname()[1]
        p = subprocess.Popen([part.format(fd=fd) for part in command], pass_fds=[fd], **kwargs)
    try:
        yield port
    finally:
        p.terminate()
        assert p.wait(120) == 0


def gunicorn(*arguments: str) -> list[str]:
    """With two workers, of which none is killed because it, or the machine, stood still for 30 seconds."""
    return [sys.executable, "-m", "gunicorn", "--workers", "2", "--bind", "fd://{fd}", "--timeout", "300", "--log-level", "error",
        *arguments]


def get(port: int, path: str = "/") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=120) as r:
        return r.read().decode()


@pytest.mark.parametrize(
    "source, flags, expected",
    [(LAZY, [], "48"), (LAZY, ["--preload"], "48"), (EAGER, [], "48"), (EAGER, ["--preload"], "48")],
    ids=["lazy", "lazy-preload", "eager", "eager-preload"],
)
def test_gunicorn(echo, tmp_path, source, flags, expected):
    (tmp_path / "app.py").write_text(source)
    with listening(gunicorn(*flags, "app:app"), cwd=tmp_path, env={**os.environ, "RINGBATCH_SOCKET": echo}) as port:
        answers = [get(port) for _ in range(10)]
        assert all(expected in a for a in answers), answers
