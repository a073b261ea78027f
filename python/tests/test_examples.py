# SPDX-License-Identifier: Apache-2.0
"""The examples run."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket as sockets
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest
from conftest import REPOSITORY, Load, program, rb_wait

import ringbatch as rb

EXAMPLES = REPOSITORY / "examples" / "python"
ROBOTS = REPOSITORY / "examples" / "robots"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="no examples here")


@contextlib.contextmanager
def listening(command, **kwargs):
    """A server that inherits a listening socket as {fd}: callers may connect before the server is up. Yields the port."""
    with sockets.create_server(("127.0.0.1", 0)) as s:
        fd, port = s.fileno(), s.getsockname()[1]
        p = subprocess.Popen([part.format(fd=fd) for part in command], pass_fds=[fd], **kwargs)
    try:
        yield port
    finally:
        p.terminate()
        assert p.wait(120) == 0


def gunicorn(*arguments: str) -> list[str]:
    """With two workers. On a slow machine gunicorn must not kill a worker as stuck."""
    flags = ["--workers", "2", "--bind", "fd://{fd}", "--timeout", "300", "--log-level", "error"]
    return [sys.executable, "-m", "gunicorn", *flags, *arguments]


def get(port: int, path: str = "/") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=120) as r:
        return r.read().decode()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """numpy_worker.py, which starts its own broker."""
    folder = tmp_path_factory.mktemp("run")
    folder.chmod(0o700)
    env = {**os.environ, "RINGBATCH_SOCKET": str(folder / "b.sock")}
    with program(env, EXAMPLES / "numpy_worker.py", how=signal.SIGINT):
        rb_wait(env["RINGBATCH_SOCKET"], "classifier")
        yield env


def test_gunicorn_app(served):
    pytest.importorskip("gunicorn")
    with listening(gunicorn("--chdir", str(EXAMPLES), "--preload", "gunicorn_app:app"), env=served) as port:
        with pytest.raises(urllib.error.HTTPError, match="400"):
            get(port)
        assert 0 <= json.loads(get(port, "/?x=" + ",".join(["1"] * 64)))["class"] < 10


def test_fastapi_under_uvicorn_with_two_workers(served):
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(EXAMPLES), "--workers", "2", "--fd", "{fd}", "--log-level", "error"]
    patient = ["--timeout-worker-healthcheck", "300"]  # by default uvicorn kills a worker after 5 silent seconds
    with listening([*command, *patient, "fastapi_app:app"], env=served) as port, contextlib.ExitStack() as stack:
        url = f"http://127.0.0.1:{port}/classify"
        client = stack.enter_context(httpx.Client(timeout=120))
        answer = client.post(url, json=[0.5] * 64)
        assert answer.status_code == 200 and 0 <= answer.json()["class"] < 10
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert {r.status_code for r in pool.map(lambda _: client.post(url, json=[0.1] * 64), range(64))} == {200}
        rows = client.post(url, json=[[0.5] * 64, [0.1] * 64, [-0.5] * 64]).json()["class"]
        assert len(rows) == 3 and rows[0] == answer.json()["class"]
        for wrong, status in (("[1, 2, 3]", 400), ("[[1, 2], [3]]", 400), ("[1, 2", 422), ('["x"]', 422), ("{}", 422), ("", 422)):
            refused = client.post(url, content=wrong, headers={"Content-Type": "application/json"})
            assert refused.status_code == status and refused.json()["detail"], wrong


def test_the_deployed_web_service_is_reloaded_and_loses_a_model_process_under_load(env, at, tmp_path):
    """The commands of compose.yaml, which are those of the units, with folders of the test."""
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    deploy, bin = REPOSITORY / "deploy" / "web", os.path.dirname(sys.executable)

    def here(text: str) -> str:
        return text.replace("/srv/app/venv/bin", bin).replace("/srv/app/ringbatch.toml", str(tmp_path / "ringbatch.toml")).replace(
            "/srv/app", str(EXAMPLES)).replace("/run/ringbatch/broker.sock", at)

    toml = re.sub(r"(?s)\[\[allow.*?\n\n", "", (deploy / "ringbatch.toml").read_text())
    (tmp_path / "ringbatch.toml").write_text(here(toml))
    compose = (deploy / "compose.yaml").read_text()
    broker, web = (json.loads(here(text)) for text in re.findall(r"command: (\[.*\])", compose))
    units = (deploy / "broker.conf").read_text() + (deploy / "web.service").read_text()
    assert all(here(units).count(" ".join(command[:5])) == 1 for command in (broker, web))
    at_port = web.index("--host")
    web[at_port : at_port + 2] = ["--fd", "{fd}", "--app-dir", str(EXAMPLES), "--log-level", "error"]
    with subprocess.Popen(broker, env=env, stderr=subprocess.DEVNULL) as p, contextlib.ExitStack() as stack:
        stack.callback(p.terminate)
        rb_wait(at, "classifier")
        port = stack.enter_context(listening(web, env=env))
        masters = [int(pid) for pid in subprocess.check_output(["pgrep", "-P", str(os.getpid()), "-f", "fastapi_app"]).split()]

        def post() -> None:
            for _ in range(20):  # as a proxy does: a process that ends closes connections without a request
                with contextlib.suppress(httpx.TransportError):
                    answer = httpx.post(f"http://127.0.0.1:{port}/classify", json=[0.5] * 64, timeout=120, verify=False)
                    assert answer.status_code == 200, answer.text
                    return
            raise AssertionError("no connection")

        post()
        workers = lambda: rb.stats(at)["models"][0]["workers"]
        processes = lambda: set(subprocess.run(["pgrep", "-P", str(masters[0]), "-f", "spawn_main"], capture_output=True).stdout.split())
        before = processes()
        with Load(post, post, post) as load:
            load.wait_for_answers(20)
            os.kill(masters[0], signal.SIGHUP)
            os.kill(workers()[0]["pid"], signal.SIGKILL)
            load.wait_for(lambda: not before & processes())
            load.wait_for_answers(20)
            load.wait_for(lambda: len(workers()) == 3)  # two, and the spare


def test_fastapi_tells_its_callers_whose_fault_an_error_is(monkeypatch):
    pytest.importorskip("fastapi")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from fastapi_app import status_of

    e = rb.errors
    wants = {
        504: [e.Expired, e.QueueTimeout, e.Timeout], 500: [e.Failed, e.WorkerDied], 429: [e.RingFull, e.Overloaded, e.QueueFull],
        503: [e.BrokerGone, e.Draining, e.NoWorker], 400: [e.Shape, e.DType, e.TooLarge],
    }  # fmt: skip
    assert {status: [status_of(kind("it")) for kind in kinds] for status, kinds in wants.items()} == {s: [s] * len(k) for s, k in wants.items()}


def test_uploads_are_measured_with_one_model_process_and_with_copies(tmp_path):
    pytest.importorskip("PIL.Image")
    pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    command = [sys.executable, str(EXAMPLES / "upload" / "measure.py"), "--workers", "1", "--clients", "2", "--seconds", "0.2", "--rounds", "1", "--json"]
    out = subprocess.check_output(command, env={**os.environ, "UPLOAD_HIDDEN": "8"}, text=True, timeout=250)
    *ways, ratios = json.loads(out).values()
    assert all(r["requests_per_s"] > 0 and r["memory_mb"] > 0 for r in ways) and len(ways) == 2 and ratios[0] > 0


def test_robots_and_simulators_share_a_policy_through_openpis_protocol():
    pytest.importorskip("openpi_client")
    command = [sys.executable, ROBOTS / "robots.py", "--door", "--simulators", "3", "--hang", "1", "--seconds", "0.2", "--width", "32", "--json"]
    result = json.loads(subprocess.check_output(command, text=True, timeout=250).splitlines()[-1])
    assert result["max_difference"] < 1e-4
    assert all(result[part]["robot_ms"]["p95"] > 0 and result[part]["mean_batch"] >= 1 for part in ("all", "1 hung"))


def test_the_door_answers_a_wrong_observation_with_its_error_and_goes_on(served):
    pytest.importorskip("openpi_client")
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    with program(served, ROBOTS / "door.py", "classifier", "0", stdout=subprocess.PIPE, text=True) as door:
        port = int(re.search(r"port (\d+)", door.stdout.readline())[1])
        assert get(port, "/healthz") == "OK\n"
        one, other = (WebsocketClientPolicy("127.0.0.1", port) for _ in range(2))
        assert one.get_server_metadata()["inputs"] == ["x:f32[64]"]
        right = one.infer({"observation": {"x": np.ones(64)}, "prompt": "not asked for"})
        assert right["p"].shape == (10,) and right["server_timing"]["infer_ms"] > 0
        object_array = {b"__ndarray__": True, b"data": b"12345678", b"dtype": "O", b"shape": [1]}
        too_large = {b"__npgeneric__": True, b"data": 300, b"dtype": "|i1"}
        for wrong, why in (({"y": 1}, "not in the observation: x; it has y"), ({"x": np.ones(3)}, "Shape"), ({"x": "text"}, "DType"),
            ([1], "a dict, not list"), ({"x": np.ones(64), "a/x": np.ones(64)}, "two values for 'x'"), ({"x": object_array}, "Error"), ({"x": too_large}, "Error")):  # fmt: skip
            with pytest.raises(RuntimeError, match=why):
                one.infer(wrong)
        for noise in (b"\xc1", "text", b""):
            one._ws.send(noise)
            assert isinstance(one._ws.recv(), str)
        other._ws.send(other._packer.pack({"x": np.ones(64)}))
        other._ws.socket.close()  # as when its process is killed
        assert np.allclose(one.infer({"x": np.ones(64, "float32")})["p"], right["p"])  # another batch, another last bit


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("from_simpledbi.py 4 20", "80 requests"),
        ("recurrent_policy.py 3 60", "180 of 180 steps as in one process"),  # although its worker is killed
        ("read_lines.py 3 20", "60 of 60 lines were read right"),
        ("relax.py 3 5", "15 clusters relaxed"),
        ("recognise.py 3 5", r"(?s)15 of 15 sentences were understood in lanes.*\n15 of 15 sentences were understood by a call"),
    ],
)
def test_a_program_that_serves_and_asks(env, command, says):
    name, *arguments = command.split()
    out = subprocess.check_output([sys.executable, EXAMPLES / name, *arguments], env=env, text=True, timeout=200)
    assert re.match(says, out), out


def test_text_is_read_by_a_worker_that_calls_two_models(env):
    with program(env, EXAMPLES / "read_text.py"):
        out = subprocess.check_output([sys.executable, str(EXAMPLES / "read_text.py"), "ask"], env=env, text=True, timeout=120)
    assert re.match(r"[1-8] words: [a-z0-9]", out)


def test_live_weights(env):
    with program(env, EXAMPLES / "live_weights.py"):
        out = subprocess.check_output([sys.executable, str(EXAMPLES / "live_weights.py"), "learn"], env=env, text=True, timeout=200)
    assert re.match(r"version 201: the error is 0\.00", out)
