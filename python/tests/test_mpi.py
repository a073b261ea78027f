# SPDX-License-Identifier: Apache-2.0
"""examples/mpi by its own commands. Where there is no MPI, ranks are processes without neighbours."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import REPOSITORY, running

import ringbatch as rb

MPI = REPOSITORY / "examples" / "mpi"
pytestmark = pytest.mark.skipif(not MPI.exists(), reason="no examples here")


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    file = tmp_path_factory.mktemp("net") / "net.npz"
    subprocess.run([sys.executable, MPI / "surrogate.py", file], check=True)
    return file


def test_a_worker_computes_the_network_of_a_file(net, at):
    layers, x = np.load(net), np.random.default_rng(2).uniform(0, 5, (100, 2)).astype("float32")
    want = np.maximum(x @ layers["0.weight"].T + layers["0.bias"], 0) @ layers["2.weight"].T + layers["2.bias"]
    with running("broker", "--socket", at, "--log-level", "error"), running("worker", "mlp", "--weights", str(net), "--socket", at, "--wait", "1m"):
        with rb.connect("mlp", socket=at, wait=60) as model:
            assert abs(model(x) - want).max() < 1e-3
        other = net.with_name("other.npz")
        np.savez(other, **{**layers, "2.bias": np.zeros(2, "float32")})
        refused = subprocess.run([rb.binary_path(), "worker", "mlp", "--weights", other, "--socket", at], capture_output=True, text=True)
        assert refused.returncode and "version" in refused.stderr  # two programs cannot serve one model


@pytest.mark.skipif(not shutil.which("gfortran") or not shutil.which("make"), reason="no gfortran and make here")
def test_ranks_share_a_surrogate_and_their_job_leaves_nothing(net, tmp_path):
    prefix, start, bin = tmp_path / "prefix", tmp_path / "start", os.path.dirname(rb.binary_path())
    subprocess.run(["make", "-s", "-j2", "-C", REPOSITORY / "cbindings", "install", f"BUILD={tmp_path}/build", f"PREFIX={prefix}", "CFLAGS=-O1"], check=True)
    start.write_text('#!/bin/sh\nn=$2; shift 2; for i in $(seq $n); do "$@" & done; wait\n')
    start.chmod(0o700)
    cc, fortran, flags = ["cc"], ["gfortran"], ["-O1"]
    if shutil.which("mpirun") and shutil.which("mpicc") and shutil.which("mpifort"):
        cc, fortran, flags, start = ["mpicc"], ["mpifort"], ["-DUSE_MPI"], "mpirun"
    link = [f"-L{prefix}/lib", "-lringbatch", "-lm", f"-Wl,-rpath,{prefix}/lib"]
    strict = ["-Wall", "-Wextra", "-Werror", f"-I{prefix}/include"]
    subprocess.run([*cc, *strict, *flags, "-o", tmp_path / "c", MPI / "cells.c", *link], check=True)
    subprocess.run([*fortran, *flags, "-J", tmp_path, "-o", tmp_path / "f", prefix / "include" / "ringbatch.f90", MPI / "cells.F90", *link], check=True)
    (tmp_path / "tmp").mkdir()
    env = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}", "TMPDIR": str(tmp_path / "tmp"), "WEIGHTS": str(net), "MPIRUN": str(start),
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}  # fmt: skip

    def job(*command) -> subprocess.CompletedProcess:
        done = subprocess.run([MPI / "job.sh", *command], env=env, capture_output=True, text=True, timeout=250)
        assert not [name for name in os.listdir(tmp_path / "tmp") if name.startswith("rb.")], done.stderr
        assert not subprocess.run(["pgrep", "-f", f"{tmp_path}/tmp"], capture_output=True).stdout  # broker, workers
        return done

    assert re.search(r"ranks [18]  steps 20  mean error \d\.\de-0[34]", job(tmp_path / "c", "20").stdout)
    assert re.search(r"ranks [18]  steps 20  mean u +[1-3]\.\d+", job(tmp_path / "f", "20").stdout)
    if start == "mpirun":
        dies = tmp_path / "dies.sh"
        dies.write_text(f"#!/bin/sh\n[ $OMPI_COMM_WORLD_RANK = 3 ] && kill -9 $$\nexec {tmp_path}/c 1000000\n")
        dies.chmod(0o700)
        assert job(dies).returncode
