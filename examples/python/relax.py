# SPDX-License-Identifier: Apache-2.0
"""Relaxes clusters of atoms until their forces are small: a solver that goes round, and rows differ in their rounds.

    python examples/python/relax.py [clients] [clusters of each]

A cluster that has converged leaves its lane at once. The forces are those of Lennard-Jones; a machine-learned potential
has the same form. Each client compares one answer with its own relaxation.
"""

import multiprocessing as mp
import signal
import sys

import numpy as np
import ringbatch as rb

LANES, ATOMS, SMALL, MOST = 32, 7, 1e-3, 5000  # forces below SMALL; rounds at most


def forces(at: np.ndarray) -> "tuple[np.ndarray, np.ndarray]":
    """Energies and forces of clusters [..., atoms, 3]."""
    apart = at[..., :, None, :] - at[..., None, :, :]
    r2 = (apart**2).sum(-1) + np.eye(ATOMS) * 1e6
    r6 = 1 / r2**3
    return 2 * (r6**2 - r6).sum((-1, -2)), ((24 * (2 * r6**2 - r6) / r2)[..., None] * apart).sum(-2)


def move(at: np.ndarray, force: np.ndarray) -> np.ndarray:
    """A step along the forces, at most 0.1 for an atom."""
    return at + np.clip(0.003 * force, -0.1, 0.1)


@rb.worker("relax", inputs={"at": ("float64", (ATOMS, 3))},
           outputs={"at": ("float64", (ATOMS, 3)), "energy": ("float64", ()), "rounds": ("int32", ())}, lanes=LANES)  # fmt: skip
class Relaxation:
    def setup(self):
        self.at, self.rounds = np.zeros((LANES, ATOMS, 3)), np.zeros(LANES, "int32")

    def start(self, lanes, rows):
        self.at[lanes], self.rounds[lanes] = rows.inputs["at"], 0

    def step(self, lanes):
        energy, force = forces(self.at[lanes])
        converged = np.abs(force).max((1, 2)) < SMALL
        self.rounds[lanes] += 1
        outputs = {"at": self.at[lanes], "energy": energy, "rounds": self.rounds[lanes]}
        self.at[lanes] = move(self.at[lanes], force)
        lost = {int(n): f"not converged after {MOST} rounds" for n in lanes[~converged & (self.rounds[lanes] >= MOST)]}
        return outputs, converged, lost


def cluster(rng: np.random.Generator) -> np.ndarray:
    """Atoms near the places of a lattice."""
    places = np.stack(np.meshgrid(*[np.arange(2)] * 3), -1).reshape(-1, 3)[:ATOMS]
    return 1.2 * places + rng.normal(0, 0.1, (ATOMS, 3))


def client(number: int, clusters: int) -> "list[int]":
    """Relaxes clusters; returns the rounds that each took."""
    rng, rounds = np.random.default_rng(number), []
    with rb.connect("relax", wait=60) as model:
        for k in range(clusters):
            given = cluster(rng)
            answer = model(given, timeout=60)
            assert np.abs(forces(answer["at"])[1]).max() < SMALL
            rounds.append(int(answer["rounds"]))
            if k == 0:
                at, force = given, forces(given)[1]
                while np.abs(force).max() >= SMALL:
                    at = move(at, force)
                    force = forces(at)[1]
                np.testing.assert_allclose(answer["at"], at, atol=1e-6)
    return rounds


if __name__ == "__main__":
    clients, clusters = (int(a) for a in (sys.argv[1:] or (8, 10)))
    server = mp.Process(target=rb.serve, args=(Relaxation,), daemon=True)
    server.start()
    with mp.Pool(clients, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        rounds = sum(pool.starmap(client, [(i, clusters) for i in range(clients)]), [])
    server.terminate()
    server.join()
    print(f"{len(rounds)} clusters relaxed, each in {min(rounds)} to {max(rounds)} rounds")
