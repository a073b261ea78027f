# SPDX-License-Identifier: Apache-2.0
"""Energies of molecules and forces on their atoms, for graphs of all sizes in packed batches.

    python examples/python/forces.py          # a worker; starts a broker if none runs
    python examples/python/forces.py ask      # a client, meanwhile

The potential is Lennard-Jones. The client sends molecules of 1..60 atoms at once, and checks that the forces of each
add up to zero.
"""

from __future__ import annotations

import sys

import numpy as np
import ringbatch as rb

CUTOFF = 3.0


@rb.worker(
    "forces",
    inputs={"positions": ("float64", ("atoms<=200", 3)), "edges": ("int64", ("edges<=20000", 2))},
    outputs={"energy": ("float64", ()), "forces": ("float64", ("atoms<=200", 3))},
    packed=["positions", "edges"], cost="edges", max_batch_cost=40_000, max_batch_size=64,
)  # fmt: skip
def forces(batch):
    atoms, edges = batch.offsets["atoms"], batch.offsets["edges"]
    ends = batch.inputs["edges"] + np.repeat(atoms[:-1], np.diff(edges))[:, None]  # atoms of the whole batch
    x = batch.inputs["positions"]
    apart = x[ends[:, 0]] - x[ends[:, 1]]
    r2 = (apart**2).sum(1)
    pull = (24 * (2 * r2**-7 - r2**-4))[:, None] * apart
    on_atoms = np.zeros_like(x)
    np.add.at(on_atoms, ends[:, 0], pull)
    np.add.at(on_atoms, ends[:, 1], -pull)
    energy = np.zeros(len(batch))
    np.add.at(energy, np.repeat(np.arange(len(batch)), np.diff(edges)), 4 * (r2**-6 - r2**-3))
    return {"energy": energy, "forces": on_atoms}


def neighbours(x: np.ndarray) -> np.ndarray:
    """The pairs of atoms within the cutoff."""
    i, j = np.triu_indices(len(x), 1)
    near = ((x[i] - x[j]) ** 2).sum(1) < CUTOFF**2
    return np.stack([i[near], j[near]], 1)


def ask(socket: str | None = None) -> int:
    """Returns the number of batches."""
    rng = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(*[np.arange(4.0)] * 3), -1).reshape(-1, 3) * 1.1
    molecules = [grid[:n] + rng.normal(0, 0.03, (n, 3)) for n in rng.integers(1, 61, 100)]
    with rb.connect("forces", socket=socket, wait=60) as model:
        answers = [model.submit(positions=x, edges=neighbours(x)) for x in molecules]
        for x, answer in zip(molecules, answers):
            y = answer.result(60)
            assert y["forces"].shape == x.shape and np.abs(y["forces"].sum(0)).max() < 1e-6
        return model.stats()["batches"]


if __name__ == "__main__":
    if sys.argv[1:] == ["ask"]:
        print(f"100 molecules in {ask()} batches")
    else:
        rb.serve(forces)
