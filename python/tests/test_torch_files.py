# SPDX-License-Identifier: Apache-2.0
"""Modules in files, by their import path, exported and compiled."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import broker_at, program

import ringbatch as rb

torch = pytest.importorskip("torch")
rt = pytest.importorskip("ringbatch.torch")
from ringbatch.torch import loading  # noqa: E402


class Two(torch.nn.Module):
    """Two inputs, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x, z):
        h = torch.tanh(self.b(torch.nn.functional.gelu(self.a(x)))) + z
        return h.sum(1), h


def two() -> torch.nn.Module:
    torch.manual_seed(0)
    return Two().eval()


def ask_two(socket: str) -> None:
    rng = np.random.default_rng(2)
    x, z = (rng.standard_normal((5, 64)).astype("float32") for _ in range(2))
    with torch.no_grad():
        want = [y.numpy() for y in two()(torch.from_numpy(x), torch.from_numpy(z))]
    with rb.connect("two", socket=socket, wait=500) as c:  # a compiler may be at work
        got = c(x, z)
    np.testing.assert_allclose(got["y0"], want[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got["y1"], want[1], rtol=1e-4, atol=1e-4)


def test_a_state_dict_is_no_module(tmp_path):
    torch.save(Two().state_dict(), path := tmp_path / "weights.pt")
    path.chmod(0o600)
    for name in ("weights.pt", "weights.pt2"):
        with pytest.raises(rb.Invalid, match="written by torch.save and is a state_dict, .*: a.weight and"):
            loading.load(str(path.rename(tmp_path / name)), "cpu")
        path = tmp_path / name


def exported(path, dynamic: bool) -> str:
    batch = torch.export.Dim("batch")
    shapes = {"x": {0: batch}, "z": {0: batch}} if dynamic else None
    torch.export.save(torch.export.export(two(), (torch.rand(4, 64), torch.rand(4, 64)), dynamic_shapes=shapes), path)
    path.chmod(0o600)
    path.parent.chmod(0o700)
    return str(path)


def test_an_exported_program_is_served_by_several_processes_without_declared_inputs(tmp_path, at, env):
    flags = ["--processes", "2", "--device", "cpu", "--max-batch-size", "8"]
    with broker_at(at), program(env, "-m", "ringbatch.serve.torch_cli", exported(tmp_path / "two.pt2", True), *flags):
        ask_two(at)


def test_a_program_that_was_exported_for_one_batch_size_is_refused(tmp_path):
    with pytest.raises(rb.Invalid, match="exported for batches of 4 only.*dynamic_shapes"):
        loading.load(exported(tmp_path / "two.pt2", False), "cpu")


# Finds this file's modules by their import path.
HERE = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), os.path.dirname(__file__)])}


def test_a_module_by_its_import_path_is_served_compiled_and_a_restart_reads_the_kept_code(tmp_path, at):
    (cache := tmp_path / "cache").mkdir(mode=0o700)
    env = {**HERE, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    flags = ["--name", "two", "--input", "x:f32[64]", "--input", "z:f32[64]", "--compile", "on", "--device", "cpu", "--socket", at]
    said = []
    with broker_at(at):
        for uncached in ({}, {}, {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}):
            command = [sys.executable, "-m", "ringbatch.serve.torch_cli", "test_torch_files:two", *flags]
            p = subprocess.Popen(command, env={**env, **uncached}, stdout=subprocess.PIPE, text=True)
            try:
                ask_two(at)
            finally:
                p.terminate()
                said.append(p.communicate(timeout=120)[0])
    assert "\ncompiled in" in "\n" + said[0] and f"kept in {cache}" in said[0]
    assert "\nread compiled code in" in "\n" + said[1]
    assert "\ncompiled in" in "\n" + said[2]


def test_compiled_code_is_served_only_if_it_agrees_and_is_faster(capfd, monkeypatch, tmp_path):
    from ringbatch.torch import compiling as tc

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(tc, "_ROUND_S", 0.001)
    x = [torch.rand(64, 64)]

    def plain(xs):
        return [xs[0] @ xs[0]]

    def slow(xs):
        for _ in range(20):
            xs[0] @ xs[0]
        return plain(xs)

    def broken():
        raise RuntimeError("no C++ compiler\nand more")

    assert tc.choose("auto", plain, lambda: slow, [x], 0.001) is None and "does not pay" in capfd.readouterr().out
    assert tc.choose("auto", slow, lambda: plain, [x], 0.001) is plain and "serving compiled code" in capfd.readouterr().out
    assert tc.choose("on", plain, lambda: slow, [x], 0.001) is slow
    assert tc.choose("auto", plain, broken, [x], 0.001) is None
    assert capfd.readouterr().err == "serving the module as it is, not compiled: RuntimeError: no C++ compiler\n"
    assert tc.choose("auto", plain, lambda: lambda xs: [1.01 * plain(xs)[0]], [x], 0.001) is None
    assert "differ by more than 0.001" in capfd.readouterr().err
    with pytest.raises(RuntimeError):
        tc.choose("on", plain, broken, [x], 0.001)


def talkative() -> torch.nn.Module:
    print("a line of the module's own")
    return torch.nn.Linear(4, 3).eval()


def test_alone_the_command_answers_each_byte_although_the_module_prints():
    command = [sys.executable, "-m", "ringbatch.serve.torch_cli", "test_torch_files:talkative", "--input", "x:f32[4]", "--alone", "2", "--device",
        "cpu"]
    p = subprocess.run(command, env=HERE, input=b"???", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (p.returncode, p.stdout) == (0, b"...") and b"a line of the module's own" in p.stderr
