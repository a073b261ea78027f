# SPDX-License-Identifier: Apache-2.0
"""A recording has the requests of Python clients."""

from __future__ import annotations

import json

import pytest
from conftest import python


@pytest.mark.parametrize("way", ["", "1"])  # the extension, and ctypes
def test_a_recording_has_when_python_claimed_and_woke(echo, tmp_path, way):
    file = str(tmp_path / "trace.json")
    requests, seconds = 0, 0.3
    while not requests and seconds < 60:  # a busy machine needs longer
        python(
            f"""
            import subprocess
            with rb.connect("echo") as model:
                model(x)
                command = [rb.binary_path(), "trace", "echo", "--duration", "{seconds}", "--out", {file!r}]
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
    # The recording may begin after the claim of one request, and end before the wake of another.
    assert requests > 0 and names.count("claim") == names.count("fill") >= requests - 2, names
    assert names.count("wake") >= names.count("fill") - 1, names
