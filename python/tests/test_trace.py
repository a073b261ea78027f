# SPDX-License-Identifier: Apache-2.0
"""What a recording knows of the requests of Python clients."""

from __future__ import annotations

import json

import pytest
from conftest import python


@pytest.mark.parametrize("way", ["", "1"])  # the extension, and ctypes
def test_a_recording_has_when_python_claimed_and_woke(echo, tmp_path, way):
    file = str(tmp_path / "trace.json")
    requests, seconds = 0, 0.3
    while not requests and seconds < 60:  # a machine that stands still for so long has none
        python(
            f"""
            import subprocess
            with rb.connect("echo") as model:
                model(x)
                command = [rb.binary_path(), "trace", "echo", "--seconds", "{seconds}", "--out", {file!r}]
                trace = subprocess.Popen(command, stdout=subprocess.DEVNULL)
                while trace.poll() is None:
                    model(x)
                    with model.request() as r:
                        r.inputs["x"][:] = x
                        r.run()
                assert trace.returncode == 0
            """,
            socket=echo,
            RINGBATCH_CTYPES=way,
        )
        with open(file) as f:
            names = [e["name"] for e in json.load(f)["traceEvents"] if e["ph"] == "b"]
        requests, seconds = names.count("queue"), 10 * seconds
    # One may have been claimed when the recording began, and one not be seen when it ended.
    assert requests > 0 and names.count("claim") == names.count("fill") >= requests - 2, names
    assert names.count("wake") >= names.count("fill") - 1, names


def test_the_slowest_requests_are_shown_with_where_their_time_went(echo):
    out = python(
        """
        import subprocess
        with rb.connect("echo") as model:
            said, seconds = "0 requests", 0.2
            while said.startswith("0 requests") and seconds < 60:  # in so long a machine that stands still has none
                trace = subprocess.Popen([rb.binary_path(), "trace", "echo", "--seconds", str(seconds)], stdout=subprocess.PIPE, text=True)
                while trace.poll() is None:
                    model(x)
                said, seconds = trace.stdout.read(), 10 * seconds
            print(said)
        """,
        socket=echo,
    )
    assert out.splitlines()[1].split()[3:9] == ["claim", "fill", "queue", "handover", "compute", "wake"], out
