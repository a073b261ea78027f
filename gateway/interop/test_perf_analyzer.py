"""NVIDIA's load tool: it has to run to completion, however it asks."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from conftest import PERF, Doors

pytestmark = pytest.mark.skipif(not (PERF / "works").exists(), reason="perf_analyzer cannot be installed here (see test.sh)")

CASES = [
    [*door, *memory, *size, *load]
    for door in (["-i", "http"], ["-i", "grpc"])
    for memory in ([], ["--shared-memory", "system"])
    for size, load in ((["-b", "1"], ["--concurrency-range", "1:4:3"]), (["-b", "4"], ["--request-rate-range", "200:400:200"]))
] + [["-i", "grpc", "-b", "1", "--streaming", "--concurrency-range", "4"], ["-i", "grpc", "-b", "4", "--streaming", "--shared-memory", "system"]]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_perf_analyzer_runs_to_completion(doors: Doors, case: list[str]) -> None:
    url = doors.http if case[1] == "http" else doors.grpc
    # Whether a busy machine gives steady figures is not the question here.
    steady = ["--measurement-mode", "count_windows", "--measurement-request-count", "50", "--stability-percentage", "999"]
    out = subprocess.run(
        [PERF / "perf_analyzer", "-m", "affine", "-u", url, *steady, *case],
        env={**os.environ, "LD_LIBRARY_PATH": str(PERF)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    text = out.stdout + out.stderr
    assert out.returncode == 0, text
    assert float(re.search(r"Throughput: ([\d.]+) infer/sec", text)[1]) > 0  # type: ignore[index]
    if "--streaming" not in case:
        assert re.search(r"compute infer \d+ usec", text), text
