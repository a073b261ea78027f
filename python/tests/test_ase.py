# SPDX-License-Identifier: Apache-2.0
"""The calculator for ASE, and the workers of examples/atoms."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from conftest import REPOSITORY, eventually, program, rb_wait

import ringbatch as rb

torch = pytest.importorskip("torch")
ase = pytest.importorskip("ase")
pytest.importorskip("matscipy")
from ase.build import bulk, molecule  # noqa: E402
from ase.calculators.fd import calculate_numerical_forces, calculate_numerical_stress  # noqa: E402
from ase.neighborlist import neighbor_list  # noqa: E402
from ase.optimize import BFGS  # noqa: E402

from ringbatch.ase import Calculator, neighbours  # noqa: E402

EXAMPLES = REPOSITORY / "examples" / "atoms"
sys.path.insert(0, str(EXAMPLES))
import compare  # noqa: E402
import tiny  # noqa: E402
from potential import alone  # noqa: E402

SERVE = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import ringbatch as rb, tiny
if __name__ == "__main__":
    rb.serve(tiny.worker64, processes=2)
"""
RELAX = """
import json, sys
from ase.build import molecule
from ase.optimize import BFGS
from ringbatch.ase import Calculator
atoms = molecule(sys.argv[1])
atoms.calc = Calculator("tiny64")
optimizer = BFGS(atoms, logfile=None)
optimizer.attach(lambda: print(json.dumps([atoms.get_potential_energy(), atoms.positions.tolist()]), flush=True))
optimizer.run(fmax=0.01, steps=60)
"""

TASK = """
import sys
from ase.build import molecule
from ringbatch.ase import Calculator
atoms = molecule("H2O")
atoms.calc = Calculator("tiny64", wait=200, retry=200)
for go in sys.argv[1:3]:
    print(atoms.get_potential_energy(), flush=True)
    open(go).read()
    atoms.positions += [[0, 0, 0.1], [0, 0, 0], [0, 0, 0]]
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The socket of a broker with two worker processes of the model tiny64."""
    folder = tmp_path_factory.mktemp("atoms")
    folder.chmod(0o700)
    at, script = str(folder / "b.sock"), folder / "serve.py"
    script.write_text(SERVE)
    with program({**os.environ, "RINGBATCH_SOCKET": at, "OMP_NUM_THREADS": "1"}, script):
        rb_wait(at, "tiny64")
        yield at


@pytest.fixture
def own():
    return Calculator(alone(tiny.load, torch.float64))


def relaxed(name, calculator):
    """The energies and positions of all steps."""
    atoms, steps = molecule(name), []
    atoms.calc = calculator
    optimizer = BFGS(atoms, logfile=None)
    optimizer.attach(lambda: steps.append([atoms.get_potential_energy(), atoms.positions.tolist()]))
    optimizer.run(fmax=0.01, steps=60)
    return steps


def workers(socket):
    return {w["pid"] for m in rb.stats(socket)["models"] for w in m["workers"]}


def test_processes_that_relax_molecules_take_the_steps_of_their_own_calculators_while_a_worker_is_killed(served, own):
    eventually(lambda: len(workers(served)) == 2)
    names = ("CH3CH2OH", "C6H6")
    started = [subprocess.Popen([sys.executable, "-c", RELAX, name], stdout=subprocess.PIPE, text=True, env={**os.environ, "RINGBATCH_SOCKET": served})
               for name in names]  # fmt: skip
    got = [[p.stdout.readline()] for p in started]
    os.kill(workers(served).pop(), signal.SIGKILL)
    for name, p, lines in zip(names, started, got):
        with p:
            lines += p.stdout
        assert p.returncode == 0
        steps, want = [json.loads(line) for line in lines], relaxed(name, own)
        assert len(steps) == len(want) > 5
        for (energy, positions), (own_energy, own_positions) in zip(steps, want):
            assert abs(energy - own_energy) < 1e-9 and np.allclose(positions, own_positions, rtol=0, atol=1e-9)


def test_structures_in_batches_have_the_answers_that_they_have_alone(served):
    assert max(compare.differences("tiny64", torch.float64, served).values()) < 1e-9


def test_a_wrong_structure_fails_alone(served):
    water = molecule("H2O")
    right = {"numbers": water.numbers.astype("int32"), "positions": water.positions, "cell": water.cell[:], **neighbours(water, tiny.CUTOFF)}
    wrong = {r"not know the atomic numbers \[2\]; it knows \[1, 6": {**right, "numbers": np.array([8, 2, 2], "int32")},
             "atoms that are not among the 3": {**right, "edges": np.full_like(right["edges"], 3)}}  # fmt: skip
    with rb.connect("tiny64", socket=served, window=60) as model:
        energy = model(**right)["energy"]
        asked = [(says, model.submit(**x), model.submit(**right)) for says, x in 5 * list(wrong.items())]
        for says, failed, answered in asked:
            assert answered.result(60)["energy"] == energy
            with pytest.raises(rb.Failed, match=says):
                failed.result(60)


def test_forces_and_stress_are_derivatives_of_the_energy(own):
    crystal = bulk("Cu", cubic=True)
    crystal.rattle(0.1)
    crystal.calc = own
    assert np.allclose(crystal.get_forces(), calculate_numerical_forces(crystal, 1e-5), atol=1e-6)
    assert np.allclose(crystal.get_stress(), calculate_numerical_stress(crystal, 1e-5), atol=1e-6)


def test_neighbours_are_those_of_ase():
    rng = np.random.default_rng(0)
    for n in (0, 1, 3, 9):
        for pbc in np.ndindex(2, 2, 2):
            cell = rng.normal(0, 1, (3, 3)) + 4 * np.eye(3)
            cell[np.logical_not(pbc) & rng.integers(0, 2, 3).astype(bool)] = 0
            atoms = ase.Atoms(n * ["H"], positions=rng.normal(0, 6, (n, 3)), cell=cell, pbc=pbc)
            found, (i, j, shifts) = neighbours(atoms, 4.0), neighbor_list("ijS", atoms, 4.0)
            assert sorted(np.c_[found["edges"], found["shifts"]].tolist()) == sorted(np.c_[i, j, shifts].astype(int).tolist())


def test_wrong_structures_get_errors_that_tell_why(served):
    calculator = Calculator("tiny64", socket=served, retry=False)
    assert pickle.loads(pickle.dumps(calculator))._named == "tiny64"
    far = ase.Atoms("H1001", positions=10.0 * np.arange(3003).reshape(-1, 3))
    broken = molecule("H2O")
    broken.positions[0] = np.nan
    for atoms, error, says in ((far, rb.Shape, r"1001 atoms with 0 edges do not fit the model.*0\.\.1000"), (ase.Atoms("He"), rb.Failed, "does not know the atomic numbers"),
                               (broken, rb.Invalid, "not finite"), (ase.Atoms("H", pbc=True), rb.Invalid, "without a cell vector"),
                               (ase.Atoms("H", cell=[[2, 0, 0], [4, 0, 0], [0, 0, 3]], pbc=True), rb.Invalid, "in one plane")):  # fmt: skip
        atoms.calc = calculator
        with pytest.raises(error, match=says):
            atoms.get_potential_energy()
    water = molecule("H2O")
    water.calc = calculator
    assert water.get_potential_energy() < 0


@pytest.mark.parametrize(("outputs", "says"), [(None, "forces and cutoff"), ({"energy": 1.0}, "forces and cutoff"),
    ({"energy": 1.0, "forces": 0, "cutoff": np.nan}, "cutoff nan")])  # fmt: skip
def test_a_model_without_forces_or_cutoff_is_refused(outputs, says):
    water = molecule("H2O")
    water.calc = Calculator(lambda **given: outputs)
    with pytest.raises(rb.Invalid, match=says):
        water.get_potential_energy()


def test_a_model_with_another_cutoff_gets_the_edges_anew():
    pairs = []

    def model(edges, **given):
        pairs.append(len(edges))
        return {"energy": 0.0, "forces": given["positions"], "cutoff": 4.0 if len(pairs) < 3 else 1.2}

    water = molecule("H2O")
    water.calc = Calculator(model)
    water.get_forces()
    water.positions += 1
    water.get_forces()
    assert pairs == [0, 6, 6, 4]


def test_beads_of_i_pi_share_a_worker(served, monkeypatch):
    pytest.importorskip("ipi")
    import beads

    monkeypatch.setenv("RINGBATCH_SOCKET", served)
    subprocess.run([rb.binary_path(), "set", "tiny64", "wait_time=20s"], check=True)
    whole, batches = beads.run(4, 20, "tiny64")
    assert whole >= 0.95 * batches


def test_tasks_of_an_array_share_a_potential_and_the_next_one_serves_when_the_first_ends(tmp_path, own):
    (tmp_path / "serve.py").write_text(SERVE)
    (tmp_path / "task.py").write_text(TASK)
    go = [tmp_path / f"go{k}" for k in range(4)]
    for path in go:
        os.mkfifo(path)
    given = {**os.environ, "SLURM_ARRAY_JOB_ID": f"test{os.getpid()}", "SERVE": f"{sys.executable} {tmp_path / 'serve.py'}"}

    @contextlib.contextmanager
    def task(k):
        command = ["bash", EXAMPLES / "array.sh", sys.executable, tmp_path / "task.py", *go[2 * k : 2 * k + 2]]
        with subprocess.Popen(command, env={**given, "SLURM_ARRAY_TASK_ID": str(k)}, stdout=subprocess.PIPE, text=True) as p:
            try:
                yield p
            finally:
                p.terminate()

    folder = f"/tmp/ringbatch-{os.getuid()}-{given['SLURM_ARRAY_JOB_ID']}"
    water, want = molecule("H2O"), []
    water.calc = own
    for _ in range(2):
        want.append(water.get_potential_energy())
        water.positions[0, 2] += 0.1
    try:
        with task(0) as first:
            assert float(first.stdout.readline()) == pytest.approx(want[0], abs=1e-9)
            with task(1) as second:
                assert float(second.stdout.readline()) == pytest.approx(want[0], abs=1e-9)
                was = workers(f"{folder}/b.sock")
                for path in go[:2]:
                    path.write_text("go")
                first.stdout.read()
                assert first.wait(60) == 0
                go[2].write_text("go")  # the broker went with the first task
                assert float(second.stdout.readline()) == pytest.approx(want[1], abs=1e-9)
                assert not was & workers(f"{folder}/b.sock")
                go[3].write_text("go")
                assert second.wait(60) == 0
        assert not os.path.exists(f"{folder}/b.sock")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
