# SPDX-License-Identifier: Apache-2.0
"""The parts of bench/peers that need only NumPy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PEERS = Path(__file__).resolve().parents[2] / "bench" / "peers"
sys.path.insert(0, str(PEERS))


def results() -> dict:
    def rounds(*rates: float) -> dict:
        return {"wait_ms": 0, "rounds": [{"requests_per_s": r, "p50_ms": 0.5, "p99_ms": 2.0} for r in rates]}

    return {
        "date": "2026-01-01", "commit": "c", "machine": {"cpu": "p", "cores": 2, "memory_gib": 4, "python": "3"}, "load_before": 0,
        "load_after": 0,
        "rounds": 3, "seconds": 1, "sizes": [64], "clients": [1, 8],
        "peers": {
            "ringbatch": {"title": "ringbatch", "versions": {},
                "cells": {"64x1": rounds(1000, 3000, 2000), "64x8": rounds(9000, 9000, 9000)}},
            "slow": {"title": "slow & steady", "versions": {},
                "cells": {"64x1": rounds(100, 1000, 400), "64x8": rounds(12345, 12345, 12345)}},
        },
        "failed": {"gone": "cannot be installed: no such | thing"},
    }  # fmt: skip


def test_a_ratio_is_the_median_of_the_rounds_own_ratios():
    import report

    assert report.ratio(results(), "slow", "64x1") == 5  # the median of 10, 3 and 5
    assert report.ratio(results(), "slow", "64x8") == pytest.approx(0.73, abs=0.01)  # below 1 where ringbatch is slower
    assert report.ratio(results(), "gone", "64x1") is None


def test_the_table_names_failures_beside_the_measured_cells():
    import report

    r = results()
    lines = report.table(r).splitlines()
    assert lines[2] == "| ringbatch | **2,000**; 0.50 ms | **9,000**; 0.50 ms |"
    assert lines[3] == "| slow & steady | 400 (5.0 ×); 0.50 ms | 12,300 (0.7 ×); 0.50 ms |"
    assert lines[4] == "| gone | not measured: cannot be installed: no such / thing | |"
    assert {line.count("|") for line in lines} == {4}
    r["peers"]["slow"]["cells"]["64x8"] = {"wait_ms": 0, "rounds": [], "failed": "3 of 8 clients failed"}
    assert report.table(r).splitlines()[3] == "| slow & steady | 400 (5.0 ×); 0.50 ms | failed |"


@pytest.mark.parametrize("program", ["plain.py", "simpledbi.py"])
def test_our_versions_of_known_designs_answer_every_client_rightly(program):
    for seconds in ("0.1", "5"):  # a busy machine may give no answer in the shorter time
        flags = ["--clients", "3", "--bytes", "4096", "--seconds", seconds, "--wait_ms", "1"]
        found = json.loads(subprocess.check_output([sys.executable, PEERS / program, *flags], timeout=120, text=True))
        assert "error" not in found  # such as a wrong answer
        if found["requests_per_s"] > 0:
            return
    pytest.fail("no client got an answer")


def test_a_client_that_gets_a_wrong_sum_fails_the_measurement():
    code = "import load; load.tell(lambda: load.measure(lambda i, x: lambda: 1.5, 64, 2, 0.05))"
    out = subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(PEERS)}, timeout=120, text=True)
    assert "2 of 2 clients failed: ValueError: a wrong sum" in json.loads(out)["error"]


def test_end_all_ends_processes_and_their_children():
    code = """
import os, signal, subprocess, sys, time
import processes
from pathlib import Path
processes.adopt()
# A child that starts a session, ignores SIGTERM and outlives its parent.
stubborn = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork() and os._exit(0); os.setsid()"
stubborn += "; print(os.getpid(), flush=True); time.sleep(60)"
p = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, text=True)
pid = int(p.stdout.readline())
processes.end_all(grace=0.2)
print(Path(f"/proc/{pid}").exists())
"""
    out = subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(PEERS)}, timeout=200, text=True)
    assert out == "False\n"
