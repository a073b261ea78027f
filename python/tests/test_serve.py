# SPDX-License-Identifier: Apache-2.0
"""serve, signals and the command."""

from __future__ import annotations

import contextlib
import os
import signal
import socket as sockets
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from conftest import eventually, python, serving

import ringbatch as rb
from ringbatch.serve import supervisor

SERVER = """
import os, sys, time
import ringbatch as rb

@rb.worker("pids", inputs={"x": ("float32", (1,))}, outputs={"y": ("int64", ())}, max_batch_size=1, wait_time=0)
def run(batch):
    if batch.inputs["x"][0, 0] == 1:
        os._exit(7)
    time.sleep(0.01)
    batch.outputs["y"][...] = os.getpid()

if not os.environ.get("RINGBATCH_CHILD"):
    print("serving", flush=True)
rb.serve(run, processes=int(sys.argv[1]) if len(sys.argv) > 1 else 2, spares=len(sys.argv) > 2)
print("served", flush=True)
"""


def start(tmp_path, *arguments: str) -> tuple[subprocess.Popen, str]:
    script, socket = tmp_path / "server.py", str(tmp_path / "b.sock")
    script.write_text(SERVER)
    p = subprocess.Popen([sys.executable, str(script), *arguments], env={**os.environ, "RINGBATCH_SOCKET": socket}, stdout=subprocess.PIPE, text=True)
    assert p.stdout.readline() == "serving\n"
    return p, socket


def processes_using(socket: str) -> list[int]:
    """Processes that have this socket in their environment, without this one."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as f, open(f"/proc/{pid}/stat") as s:
                if socket.encode() in f.read() and s.read().rsplit(")", 1)[1].split()[0] != "Z":
                    found.append(int(pid))
        except OSError:
            pass
    return found


def wait_for_nobody(socket: str) -> None:
    eventually(lambda: not processes_using(socket))


AFFINE = """
import sys
import ringbatch as rb

@rb.worker("affine", inputs="x:f32[1]", outputs="y:f32[1]", max_batch_size=1)
def run(batch):
    return batch.inputs["x"] * float(sys.argv[1])

rb.serve(run, processes=2)
"""


def test_another_program_under_a_models_name_is_refused_and_the_same_one_joins(tmp_path):
    script, socket = tmp_path / "affine.py", str(tmp_path / "b.sock")
    script.write_text(AFFINE)
    with contextlib.ExitStack() as after:

        def start(scale: str) -> subprocess.Popen:
            p = subprocess.Popen([sys.executable, str(script), scale], env={**os.environ, "RINGBATCH_SOCKET": socket},
                stderr=subprocess.PIPE, text=True)
            after.callback(p.wait, 120)
            after.callback(p.terminate)
            return p

        start("2")
        with rb.connect("affine", socket=socket, wait=60) as m:
            other = start("3")
            said = other.communicate(timeout=120)[1]
            assert other.returncode == 1 and '"affine" is served by pid' in said and 'version="any"' in said
            twin = start("2")
            assert next(line for line in twin.stderr if "is ready" in line)
            assert {float(m(np.ones(1, "float32"))[0]) for _ in range(20)} == {2.0}


HANGS = """
import sys, time
import ringbatch as rb
from ringbatch.serve import broker, supervisor

broker.DRAIN_S = supervisor._BATCH_S = 3600
supervisor._STOP_S = 7200.0

@rb.worker("hangs", inputs={"x": ("float32", (1,))}, outputs={"y": ("float32", (1,))})
def run(batch):
    while True:
        print("hangs", file=sys.stderr, flush=True)
        time.sleep(0.1)

if __name__ == "__main__":
    rb.serve(run, processes=int(sys.argv[1]))
    print("served")
"""


@pytest.mark.parametrize(("theirs", "processes"), [(False, "1"), (True, "2"), (True, "0")])
def test_a_second_ctrl_c_does_not_wait_for_a_worker_that_hangs(tmp_path, theirs, processes):
    script, socket = tmp_path / "server.py", str(tmp_path / "b.sock")
    script.write_text(HANGS)
    with contextlib.ExitStack() as after:
        if theirs:
            b = after.enter_context(subprocess.Popen([rb.binary_path(), "broker", "--socket", socket]))
            after.callback(b.kill)
        env = {**os.environ, "RINGBATCH_SOCKET": socket}
        p = after.enter_context(subprocess.Popen([sys.executable, str(script), processes], env=env, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True))
        after.callback(p.kill)
        with rb.connect("hangs", socket=socket, wait=60) as m:
            m.submit(np.zeros(1, "float32"))
            next(line for line in p.stderr if "hangs" in line)
            p.send_signal(signal.SIGINT)
            next(line for line in p.stderr if "press Ctrl-C once more" in line)
            p.send_signal(signal.SIGINT)
            assert p.communicate(timeout=120)[0] == "served\n" and p.returncode == 0
    wait_for_nobody(socket)


def test_a_supervised_server_waits_for_a_broker_and_starts_none(tmp_path):
    script, socket = tmp_path / "server.py", str(tmp_path / "b.sock")
    script.write_text(SERVER)
    env = {**os.environ, "RINGBATCH_SOCKET": socket, "RINGBATCH_SUPERVISED": socket}
    broker = [rb.binary_path(), "broker", "--socket", socket]
    with subprocess.Popen(broker) as b, subprocess.Popen([sys.executable, str(script), "2"], env=env, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True) as p:
        try:
            def workers():
                return {w["pid"] for m in rb.stats(socket)["models"] for w in m["workers"]}

            rb.connect("pids", socket=socket, wait=60).close()
            eventually(lambda: len(workers()) == 2)
            before = workers()
            b.kill()
            b.wait()
            said = next(line for line in p.stderr if "is gone" in line)
            assert "waiting for one" in said
            with subprocess.Popen(broker) as b, rb.connect("pids", socket=socket, wait=60) as m:
                assert int(m(np.zeros(1, "float32"), timeout=60)) in before  # the workers have waited, too
                b.terminate()
        finally:
            b.kill()
            p.terminate()
            p.communicate(timeout=120)
    wait_for_nobody(socket)


def test_a_script_that_a_broker_starts_serves_in_its_own_process(tmp_path):
    script, config, socket = tmp_path / "server.py", tmp_path / "b.toml", str(tmp_path / "b.sock")
    script.write_text(SERVER)
    config.write_text(f'[[worker]]\ncommand = ["{sys.executable}", "{script}", "1"]\n')
    with subprocess.Popen([rb.binary_path(), "broker", "--socket", socket, "--config", str(config)]) as b:
        try:
            with rb.connect("pids", socket=socket, wait=60) as m:
                pid = int(m(np.zeros(1, "float32"), timeout=60))
                assert [p["pid"] for p in rb.stats(socket)["processes"]] == [pid]
                os.kill(pid, signal.SIGKILL)  # the broker starts another
                assert int(m(np.zeros(1, "float32"), timeout=60)) != pid
        finally:
            b.terminate()
    assert b.returncode == 0
    wait_for_nobody(socket)


def test_nothing_is_left_when_the_server_is_killed(tmp_path):
    p, socket = start(tmp_path)
    rb.connect("pids", socket=socket, wait=60).close()
    p.kill()
    p.wait()
    p.stdout.close()
    wait_for_nobody(socket)


def test_a_spare_that_has_loaded_replaces_a_dead_worker(tmp_path):
    p, socket = start(tmp_path, "1", "and a spare")

    def there():
        return {s["pid"]: s.get("spare", False) for s in rb.stats(socket)["processes"] if s["attached"]}

    with rb.connect("pids", socket=socket, wait=60) as m:
        eventually(lambda: len(there()) == 2)
        before = there()
        worker = int(m(np.zeros(1, "float32"), timeout=60))
        assert sorted(before.values()) == [False, True] and not before[worker]
        os.kill(worker, signal.SIGKILL)
        assert {int(m(np.zeros(1, "float32"), timeout=60)), worker} == set(before)
    p.terminate()
    assert p.communicate(timeout=120)[0] == "served\n" and p.returncode == 0


def test_the_first_request_imports_nothing(socket):
    @rb.worker("sizes-of-bytes", inputs="x:u8[<=9] n:i64[2]", outputs="y:i64[]", ragged=True)
    def sizes(batch):
        return np.array([len(x) for x in batch.inputs["x"]])

    code = """
        with rb.connect("sizes-of-bytes", wait=60) as m:
            before = set(sys.modules)
            print(m(b"four", [1, 2]), sorted(set(sys.modules) - before))
    """
    with serving(sizes, socket):
        assert python(code, socket=socket) == "4 []"


def test_serve_uses_the_broker_that_runs(tmp_path, socket):
    code = """
        import threading
        @rb.worker("here", inputs={"x": ("f32", (1,))}, outputs={"y": ("f32", (1,))}, wait_time=0)
        def here(batch):
            batch.outputs["y"][...] = 5
        threading.Thread(target=rb.serve, args=(here,), kwargs={"processes": 0}, daemon=True).start()
        with rb.connect("here", wait=60) as m:
            print(m(np.zeros(1, "float32")))
        os._exit(0) if not sys.stdout.flush() else None
    """
    assert python(code, socket=socket) == "[5.]"
    for wrong in (print, int, lambda batch: batch, 5, "no_such_module:run", "no-colon"):
        with pytest.raises((rb.Invalid, TypeError)):
            rb.serve(wrong, socket=socket)


CTRL_C = """
    import asyncio, signal, threading
    def interrupt():
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
    waits = {
        "call": lambda m: m(x),
        "request": lambda m: m.request().run(),
        "submit": lambda m: m.submit(x).result(),
        "room": lambda m: [m.request(), m.request()],
        "ainfer": lambda m: asyncio.run(m.ainfer(x)),
    }
    for name, wait in waits.items():
        m = rb.connect("stuck", wait=60, window=1)
        try:
            threading.Thread(target=interrupt, daemon=True).start()
            wait(m)
        except KeyboardInterrupt:
            print(name, end=" ")
"""


@pytest.fixture(scope="module")
def stuck(socket):
    code = """
        import signal
        @rb.worker("stuck", inputs={"x": ("f32", (16,))}, outputs={"y": ("f32", (16,))}, wait_time=0, lease=600)
        def stuck(batch):
            time.sleep(600)
        stuck.run(wait=60)
    """
    program = "import time\nimport ringbatch as rb\n" + textwrap.dedent(code)
    p = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "RINGBATCH_SOCKET": socket})
    yield socket
    p.kill()
    p.wait()


def test_ctrl_c_interrupts_every_wait(stuck):  # the worker takes ten minutes
    assert python(CTRL_C, socket=stuck) == "call request submit room ainfer"


def test_the_command_torch_has_help_without_torch_and_uses_the_same_interpreter(tmp_path):
    (tmp_path / "python3").write_text("#!/bin/sh\necho another python >&2\nexit 9\n")
    (tmp_path / "python3").chmod(0o700)
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch here')\n")
    (tmp_path / "m.jit").touch()
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    p = subprocess.run([sys.executable, "-m", "ringbatch", "torch", "--help"], capture_output=True, text=True, env=env)
    assert p.returncode == 0 and "model.pt2" in p.stdout and "--channels-last" in p.stdout
    p = subprocess.run([sys.executable, "-m", "ringbatch", "torch", str(tmp_path / "m.jit"), "--input", "x:f32[1]"], capture_output=True,
        text=True, env=env)
    assert p.returncode == 1 and "no torch here" in p.stderr and "another python" not in p.stderr


def test_a_broker_whose_queue_is_full_is_there(tmp_path):
    at = str(tmp_path / "s")
    assert not supervisor.broker_runs(at)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(sockets.socket(sockets.AF_UNIX))
        listener.bind(at)
        listener.listen(1)
        with pytest.raises(BlockingIOError):
            while True:
                waiting = stack.enter_context(sockets.socket(sockets.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(at)
        assert supervisor.broker_runs(at)
    assert not supervisor.broker_runs(at)
