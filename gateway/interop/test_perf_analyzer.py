# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's load tool: it has to run to completion, however it asks."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from conftest import PERF, Doors

pytestmark = pytest.mark.skipif(not (PERF / "works").exists(), reason="perf_analyzer cannot be installed here (see test.sh)")

DOORS = (["-i", "http"], ["-i", "grpc"])
MEMORY: tuple[list[str], list[str]] = ([], ["--shared-memory", "system"])


def loads(several: bool) -> list[list[str]]:
    """One load, or several one after the other, which takes as many times as long."""
    concurrency, rate = ("1:4:3", "200:400:200") if several else ("4", "200")
    return [["-b", "1", "--concurrency-range", concurrency], ["-b", "4", "--request-rate-range", rate]]


CASES = [[*door, *memory, *load] for door in DOORS for memory in MEMORY for load in loads((door == DOORS[0]) == (memory == MEMORY[0]))] + [
    ["-i", "grpc", "-b", "1", "--streaming", "--concurrency-range", "4"],
    ["-i", "grpc", "-b", "4", "--streaming", "--shared-memory", "system"],
]
# Whether a busy machine gives steady figures is not the question here.
STEADY = ["--measurement-mode", "count_windows", "--measurement-request-count", "50", "--stability-percentage", "999"]


@pytest.fixture(scope="session")
def runs(doors: Doors) -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """Each case, run beside the others: most of the time the tool waits. Those
    with shared memory run one after the other, since each unregisters all regions.
    """

    env = {**os.environ, "LD_LIBRARY_PATH": str(PERF)}  # not in those threads: pytest writes PYTEST_CURRENT_TEST into it meanwhile

    def run(case: list[str]) -> subprocess.CompletedProcess[str]:
        url = doors.http if case[1] == "http" else doors.grpc
        command = [str(PERF / "perf_analyzer"), "-m", "affine", "-u", url, *STEADY, *case]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)

    with ThreadPoolExecutor(2) as side_by_side, ThreadPoolExecutor(1) as in_turn:
        yield {" ".join(c): (in_turn if "--shared-memory" in c else side_by_side).submit(run, c) for c in CASES}


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_perf_analyzer_runs_to_completion(runs: dict[str, Future[subprocess.CompletedProcess[str]]], case: list[str]) -> None:
    out = runs[" ".join(case)].result()
    text = out.stdout + out.stderr
    assert out.returncode == 0, text
    assert float(re.search(r"Throughput: ([\d.]+) infer/sec", text)[1]) > 0  # type: ignore[index]
    if "--streaming" not in case:
        assert re.search(r"compute infer \d+ usec", text), text
