"""The examples run."""

from __future__ import annotations

import json
import os
import re
import signal
import socket as sockets
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from conftest import REPOSITORY, rb_wait
from test_gunicorn import free_port, get

EXAMPLES = REPOSITORY / "examples" / "python"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="no examples here")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """numpy_worker.py, which starts its own broker."""
    folder = tmp_path_factory.mktemp("run")
    folder.chmod(0o700)
    env = {**os.environ, "RINGBATCH_SOCKET": str(folder / "b.sock")}
    p = subprocess.Popen([sys.executable, str(EXAMPLES / "numpy_worker.py")], env=env)
    rb_wait(env["RINGBATCH_SOCKET"], "classifier")
    yield env
    p.send_signal(signal.SIGINT)
    assert p.wait(30) == 0


def test_producers(served):
    out = subprocess.check_output([sys.executable, str(EXAMPLES / "producers.py"), "6", "50"], env=served, text=True, timeout=60)
    assert re.match(r"300 requests in \d+ batches", out)


def test_asyncio_server(served):
    p = subprocess.Popen([sys.executable, str(EXAMPLES / "asyncio_server.py"), "0"], env=served, stdout=subprocess.PIPE, text=True)
    try:
        port = int(p.stdout.readline().split()[-1])
        with sockets.create_connection(("127.0.0.1", port), 10) as c, c.makefile("rw") as f:
            for line, answer in ((" ".join(["0.5"] * 64), r"\d$"), ("1 2 3", "error: .*expected"), ("x", "error")):
                f.write(line + "\n")
                f.flush()
                assert re.match(answer, f.readline())
            p.send_signal(signal.SIGINT)  # while a client is still connected
            assert p.wait(30) == 0
    finally:
        p.kill()
        p.wait()
        p.stdout.close()


@pytest.mark.parametrize("flags", [[], ["--preload"]], ids=["plain", "preload"])
def test_gunicorn_app(served, flags):
    pytest.importorskip("gunicorn")
    port = free_port()
    command = [sys.executable, "-m", "gunicorn", "--chdir", str(EXAMPLES), "--workers", "2", "--bind", f"127.0.0.1:{port}", *flags, "gunicorn_app:app"]
    p = subprocess.Popen([*command, "--log-level", "error"], env=served)
    try:
        with pytest.raises(urllib.error.HTTPError, match="400"):
            get(port)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/?x=" + ",".join(["1"] * 64), timeout=20) as r:
            assert 0 <= json.load(r)["class"] < 10
    finally:
        p.terminate()
        assert p.wait(30) == 0


def test_simpledbi_example(tmp_path):
    tmp_path.chmod(0o700)
    env = {**os.environ, "RINGBATCH_SOCKET": str(tmp_path / "b.sock")}
    out = subprocess.check_output([sys.executable, str(EXAMPLES / "from_simpledbi.py"), "4", "20"], env=env, text=True, timeout=60)
    assert out.startswith("80 requests")
