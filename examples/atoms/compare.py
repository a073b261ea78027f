# SPDX-License-Identifier: Apache-2.0
"""Processes that share one worker, beside processes with a copy of the potential each.

    python examples/atoms/tiny.py             # meanwhile
    python examples/atoms/compare.py [PROCESSES] [STEPS]

Prints the ratio of steps per second, in rounds that alternate, then how far rows alone and in batches differ.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time

import numpy as np
import ringbatch as rb
import tiny
import torch
from ase.build import bulk, molecule
from potential import alone
from ringbatch.ase import Calculator, neighbours

MOLECULE, ROUNDS = "isobutane", 3  # 14 atoms


def structures():
    """Molecules, periodic cells, one atom, and none."""
    water, copper = molecule("H2O"), bulk("Cu", cubic=True)
    found = [water, molecule("C6H6"), molecule(MOLECULE), copper, copper.repeat(2), water[:1], water[:0]]
    for seed, atoms in enumerate(found):
        atoms.rattle(0.05, seed=seed)
    return found


def differences(name: str, dtype, socket=None) -> dict[str, float]:
    """The largest differences between the structures alone and in batches."""
    own = alone(tiny.load, dtype)
    given = [{"numbers": a.numbers.astype("int32"), "positions": a.positions, "cell": a.cell[:], **neighbours(a, tiny.CUTOFF)}
             for a in structures()]  # fmt: skip
    worst = {"energy": 0.0, "forces": 0.0, "virial": 0.0}
    with rb.connect(name, socket=socket, window=32, wait=60) as model:
        before = model.stats()["batches"]
        answers = [model.submit(**x) for _ in range(8) for x in given]
        for x, answer in zip(8 * given, answers):
            y, z = answer.result(60), own(**x)
            worst = {k: max(v, float(np.abs(y[k] - z[k]).max(initial=0))) for k, v in worst.items()}
        print(f"{name}: {len(answers)} structures in {model.stats()['batches'] - before} batches;", "largest difference to the same alone:",
              ", ".join(f"{k} {v:.1e}" for k, v in worst.items()))  # fmt: skip
    return worst


def work(seed: int, count: int, ready, results) -> None:
    """Makes the same steps with the shared worker and with an own copy, in turns."""
    torch.set_num_threads(1)
    atoms, rng = molecule(MOLECULE), np.random.default_rng(seed)
    at, calculators = atoms.positions.copy(), [Calculator("tiny"), Calculator(alone(tiny.load))]
    for turn in range(-2, 2 * ROUNDS):
        atoms.calc = calculators[turn % 2]
        ready.wait()
        began = time.monotonic()
        for _ in range(count if turn >= 0 else 5):
            atoms.positions = at + rng.normal(0, 0.02, at.shape)
            atoms.get_forces()
        results.put((turn, began, time.monotonic()))


def ratios(processes: int, count: int) -> list[float]:
    """Seconds of own copies / of the shared worker, from the first start to the last end, for each round."""
    fork = multiprocessing.get_context("fork")  # torch is imported, and has not computed yet
    ready, results = fork.Barrier(processes), fork.Queue()
    for k in range(processes):
        fork.Process(target=work, args=(k, count, ready, results), daemon=True).start()
    times = [results.get(timeout=600) for _ in range(processes * (2 * ROUNDS + 2))]
    took = [max(end for t, _, end in times if t == turn) - min(began for t, began, _ in times if t == turn) for turn in range(2 * ROUNDS)]
    return [own / shared for shared, own in zip(took[::2], took[1::2])]


def main() -> None:
    processes, count = map(int, (sys.argv[1:] + ["8", "200"][len(sys.argv) - 1 :])[:2])
    rb.connect("tiny", wait=30).close()  # or says that nothing serves it
    found = ratios(processes, count)
    print(f"{processes} processes share a worker: {statistics.median(found):.2f} × the steps of {processes} own copies, "
          f"in {ROUNDS} rounds {min(found):.2f} to {max(found):.2f}", flush=True)  # fmt: skip
    differences("tiny", torch.float32)
    differences("tiny64", torch.float64)


if __name__ == "__main__":
    main()
