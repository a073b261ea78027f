# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's load tool runs to completion with every protocol, memory and load."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from conftest import PERF, Gateway

pytestmark = pytest.mark.skipif(not (PERF / "works").exists(), reason="perf_analyzer cannot be installed here (see test.sh)")

PROTOCOLS = (["-i", "http"], ["-i", "grpc"])
MEMORY: tuple[list[str], list[str]] = ([], ["--shared-memory", "system"])


def loads(several: bool) -> list[list[str]]:
    """One load, or several one after the other, which takes as many times as long."""
    concurrency, rate = ("1:4:3", "200:400:200") if several else ("4", "200")
    return [["-b", "1", "--concurrency-range", concurrency], ["-b", "4", "--request-rate-range", rate]]


CASES = [
    *([*p, *m, *load] for p in PROTOCOLS for m in MEMORY for load in loads((p == PROTOCOLS[0]) == (m == MEMORY[0]))),
    ["-i", "grpc", "-b", "1", "--streaming", "--concurrency-range", "4"],
    ["-i", "grpc", "-b", "4", "--streaming", "--shared-memory", "system"],
    *([*p, "--sequence-length", "10", "--concurrency-range", "4"] for p in PROTOCOLS),
    ["-i", "grpc", "--streaming", "--sequence-length", "10", "--request-rate-range", "200", "--num-of-sequences", "8"],
]
# The tool must accept unsteady figures of a busy machine.
STEADY = ["--measurement-mode", "count_windows", "--measurement-request-count", "50", "--stability-percentage", "999"]


@pytest.fixture(scope="session")
def runs(gateway: Gateway) -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """Runs the cases at once, since the tool mostly waits. Cases with shared memory run one after the other:
    each unregisters all regions.
    """

    env = {**os.environ, "LD_LIBRARY_PATH": str(PERF)}  # not in the threads: pytest writes to os.environ meanwhile

    def run(case: list[str]) -> subprocess.CompletedProcess[str]:
        url = gateway.http if case[1] == "http" else gateway.grpc
        model = "sum" if "--sequence-length" in case else "affine"
        command = [str(PERF / "perf_analyzer"), "-m", model, "-u", url, *STEADY, *case]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)

    with ThreadPoolExecutor(2) as side_by_side, ThreadPoolExecutor(1) as in_turn:
        yield {" ".join(c): (in_turn if "--shared-memory" in c else side_by_side).submit(run, c) for c in CASES}


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_perf_analyzer_runs_to_completion(runs: dict[str, Future[subprocess.CompletedProcess[str]]], case: list[str]) -> None:
    out = runs[" ".join(case)].result()
    text = out.stdout + out.stderr
    assert out.returncode == 0, text
    assert float(re.search(r"Throughput: ([\d.]+) infer/sec", text)[1]) > 0  # type: ignore[index]
    assert ("Sequence count" in text) == ("--sequence-length" in case), text
    if "--streaming" not in case:
        assert re.search(r"compute infer \d+ usec", text), text
