# SPDX-License-Identifier: Apache-2.0
"""The processes that serve starts, restarts and ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from conftest import eventually, rb_wait
from test_serve import wait_for_nobody

import ringbatch as rb

PROLOGUE = """
import os, sys, time
import numpy as np
import ringbatch as rb
IO = {"inputs": {"x": ("float32", (1,))}, "outputs": {"y": ("float32", ())}}
"""


@contextlib.contextmanager
def script(tmp_path, code: str, *arguments: str, name: str = "app.py", flags: tuple = (), **kwargs):
    """Runs a script that serves until the block ends."""
    path, socket = tmp_path / name, str(tmp_path / "b.sock")
    path.write_text(PROLOGUE + textwrap.dedent(code))
    env = {**os.environ, "RINGBATCH_SOCKET": socket}
    p = subprocess.Popen([sys.executable, *(flags or [str(path)]), *arguments], env=env, cwd=tmp_path, text=True, **kwargs)
    try:
        yield p, socket
    finally:
        if p.poll() is None:
            p.terminate()
        p.communicate(timeout=120)


def ask(m, value: float, **kwargs) -> float:
    return float(m(np.full(1, value, "float32"), **kwargs))


# -1 waits for a file "go_on".
SLOW = """
    @rb.worker("slow", **IO, max_batch_size=1, wait_time=0)
    def run(batch):
        while batch.inputs["x"][0, 0] == -1 and not os.path.exists("go_on"):
            time.sleep(0.005)
        return batch.inputs["x"][:, 0]

    rb.serve(run, processes=%d)
    print("served", flush=True)
"""


@pytest.mark.parametrize(("how", "processes"), [(signal.SIGTERM, 1), (signal.SIGINT, 0)])
def test_a_server_that_ends_answers_accepted_requests_and_refuses_others_as_retryable(tmp_path, how, processes):
    with script(tmp_path, SLOW % processes, stdout=subprocess.PIPE) as (p, socket):
        with rb.connect("slow", socket=socket, wait=60, window=16) as m, rb.connect("slow", socket=socket, window=1) as late:
            accepted = [m.submit(np.full(1, i, "float32")) for i in range(-1, 10)]
            eventually(lambda: rb.stats(socket)["models"][0]["requests"] == 11)
            p.send_signal(how)
            with pytest.raises(rb.Draining):
                while True:
                    rb.connect("slow", socket=socket, window=1, wait=0).close()
            with pytest.raises(rb.Draining) as refused:  # at once, while others still wait for their answers
                while True:  # clients are refused a moment before requests are
                    with contextlib.suppress(rb.Expired):
                        ask(late, 0, timeout=0.5)
            assert refused.value.retryable and not any(f.done() for f in accepted)
            (tmp_path / "go_on").touch()
            assert [float(f.result(60)) for f in accepted] == list(range(-1, 10))
        assert p.communicate(timeout=120)[0] == "served\n" and p.returncode == 0
        wait_for_nobody(socket)


POISON = """
    @rb.worker("poison", **IO, max_batch_size=4, wait_time=0, max_attempts=%d)
    def run(batch):
        if (batch.inputs["x"] == 13).any():
            os._exit(7)
        return np.full(batch.rows, os.getpid(), "float32")

    rb.serve(run, processes=1)
"""


def test_poisonous_requests_right_after_the_start_do_not_end_the_service(tmp_path):
    with script(tmp_path, POISON % 2) as (p, socket), rb.connect("poison", socket=socket, wait=60) as m:
        for _ in range(3):
            with pytest.raises(rb.WorkerDied, match="2 workers died"):
                ask(m, 13, timeout=60)
            assert ask(m, 1, timeout=60) > 0
        process = rb.stats(socket)["processes"][0]
        assert process["restarts"] == 6 and process["failed_starts"] == 0 and p.poll() is None


# serve starts a failing worker five times or more, and a worker that raises rb.Invalid once.
@pytest.mark.parametrize(("error", "says"), [("RuntimeError", r"WorkerDied: .* ended \d+ times before it was ready .*"),
    ("rb.Invalid", "Invalid: no weights here")])
def test_a_worker_that_cannot_start_ends_serve_with_its_message(tmp_path, error, says):
    code = f"""
        if os.environ.get("RINGBATCH_CHILD"):
            raise {error}("no weights here")
        @rb.worker("broken", **IO)
        def run(batch):
            pass
        try:
            rb.serve(run)
        except rb.Error as e:
            print(f"{{type(e).__name__}}: {{e}}", flush=True)
    """
    with script(tmp_path, code, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as (p, socket):
        out, log = p.communicate(timeout=120)
        assert re.fullmatch(says, out.strip()) and "no weights here" in out + log
        wait_for_nobody(socket)


def test_a_second_serve_goes_on_when_the_first_and_its_broker_end(tmp_path):
    first = """
        @rb.worker("first", **IO, wait_time=0)
        def run(batch):
            return batch.inputs["x"][:, 0]
        rb.serve(run)
    """
    with contextlib.ExitStack() as both:
        a, socket = both.enter_context(script(tmp_path, first))
        rb_wait(socket, "first")
        b, _ = both.enter_context(script(tmp_path, first.replace("first", "second"), name="second.py", stderr=subprocess.PIPE))
        m = both.enter_context(rb.connect("second", socket=socket, wait=60))
        assert ask(m, 1) == 1
        a.terminate()
        assert a.wait(60) == 0

        def is_answered() -> bool:
            try:
                return ask(m, 2, timeout=60) == 2
            except rb.Error as e:
                assert e.retryable
                return False

        eventually(is_answered)
        b.terminate()
        assert f"the broker at {socket} is gone: starting one" in b.communicate(timeout=120)[1]


def test_a_guest_worker_that_dies_is_started_again(tmp_path):
    with script(tmp_path, SLOW % 1) as (_, socket):
        rb_wait(socket, "slow")
        guest = (POISON % 1).replace("processes=1", "processes=1, broker=False")
        with script(tmp_path, guest, name="guest.py"), rb.connect("poison", socket=socket, wait=60) as m:
            for _ in range(6):
                with pytest.raises(rb.WorkerDied):
                    ask(m, 13, timeout=60)
            assert ask(m, 1, timeout=60) > 0


LOADS = {
    "class": """
        @rb.worker("net", **IO, wait_time=0)
        class Net:
            def setup(self):
                load()
            def forward(self, batch):
                return batch.inputs["x"][:, 0] * 2
        rb.serve(Net, processes=2)
    """,
    "factory": """
        def make():
            load()
            @rb.worker("net", **IO, wait_time=0)
            def run(batch):
                return batch.inputs["x"][:, 0] * 2
            return run
        rb.serve(make, processes=2)
    """,
    "import path": """
        if "-" not in sys.argv:
            with open("weights.py", "w") as f:
                f.write(open(__file__).read().split("# --")[0])
                f.write('load()\\n@rb.worker("net", **IO, wait_time=0)\\ndef run(batch):\\n    return batch.inputs["x"][:, 0] * 2\\n')
        rb.serve("weights:run", processes=2)
    """,
}


@pytest.mark.parametrize("how", LOADS)
def test_only_workers_load_the_model(tmp_path, how):
    code = """
        def load():
            with open(os.environ["LOADED"], "a") as f:
                f.write(f"{os.getpid()} ")
        # --
    """
    os.environ["LOADED"] = str(tmp_path / "loaded")
    with script(tmp_path, textwrap.dedent(code) + textwrap.dedent(LOADS[how])) as (p, socket):
        with rb.connect("net", socket=socket, wait=60, window=16) as m:
            assert ask(m, 21) == 42
        eventually(lambda: len(rb.stats(socket)["models"][0]["workers"]) == 2)
        loaded = (tmp_path / "loaded").read_text().split()
        assert len(loaded) == 2 and str(p.pid) not in loaded


@pytest.mark.parametrize("flags, says", [(("-",), "standard input cannot be read twice"),
    (("-c",), "the command line cannot be read twice")])
def test_a_script_that_cannot_be_run_again_is_refused_with_the_remedy(tmp_path, flags, says):
    code = PROLOGUE + '@rb.worker("never", **IO)\ndef run(batch):\n    pass\nrb.serve(run)\n'
    command = [sys.executable, *flags] + ([code] if flags == ("-c",) else [])
    env = {**os.environ, "RINGBATCH_SOCKET": str(tmp_path / "b.sock")}
    p = subprocess.run(command, input=code if flags == ("-",) else None, capture_output=True, text=True, env=env, timeout=200)
    assert p.returncode != 0 and says in p.stderr and "write it to a file and run that" in p.stderr


def test_a_script_run_by_its_module_name_works(tmp_path):
    code = """
        def main():
            @rb.worker("mod", **IO, wait_time=0)
            def run(batch):
                return batch.inputs["x"][:, 0] + float(sys.argv[1])
            rb.serve(run)
        if __name__ == "__main__":
            main()
    """
    with script(tmp_path, code, "5", flags=("-m", "app")) as (_, socket), rb.connect("mod", socket=socket, wait=60) as m:
        assert ask(m, 1) == 6
