# SPDX-License-Identifier: Apache-2.0
"""A worker for any torch function of atoms: energies of packed structures, and their forces and virials by autograd.

    worker = potential("mine", load, dtype=torch.float64)

load(dtype, device) returns the function, the cutoff of its edges in Å, and the atomic numbers that it knows. It runs in
the worker.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import ringbatch as rb
import torch


class Structures(NamedTuple):
    """n structures, one after the other."""

    numbers: torch.Tensor  # (atoms)
    positions: torch.Tensor  # (atoms, 3)
    cell: torch.Tensor  # (n, 3, 3)
    edges: torch.Tensor  # (2, edges): from atom i to atom j of the whole batch
    shifts: torch.Tensor  # (edges, 3): in cells
    offsets: torch.Tensor  # (n + 1): the first atom of each
    of_atom: torch.Tensor  # (atoms): the number of its structure

    def vectors(self) -> torch.Tensor:
        """From atom i to the image of atom j, for each edge."""
        i, j = self.edges
        return self.positions[j] - self.positions[i] + torch.einsum("ek,ekx->ex", self.shifts, self.cell[self.of_atom[i]])

    def sums(self, of_atoms: torch.Tensor) -> torch.Tensor:
        """Adds up a number of each atom, for each structure."""
        return of_atoms.new_zeros(len(self.cell)).index_add(0, self.of_atom, of_atoms)


def evaluate(energies, s: Structures) -> dict[str, torch.Tensor]:
    """Energies, forces, and virials: minus the derivative by a strain of positions and cell."""
    if not len(s.numbers):  # a calculator asks for the cutoff
        return {"energy": s.cell.new_zeros(len(s.cell)), "forces": s.positions, "virial": torch.zeros_like(s.cell)}
    strain = torch.zeros_like(s.cell, requires_grad=True)
    positions = s.positions.requires_grad_()
    straight = (strain + strain.mT) / 2
    strained = s._replace(positions=positions + torch.einsum("ax,axy->ay", positions, straight[s.of_atom]), cell=s.cell + s.cell @ straight)
    energy = energies(strained)
    forces, virial = torch.autograd.grad(energy.sum(), (positions, strain), materialize_grads=True)
    return {"energy": energy.detach(), "forces": -forces, "virial": -virial}


def potential(model, load, *, dtype=torch.float32, device=None, max_atoms=1000, max_edges=60_000, max_batch_size=64, max_batch_cost=200_000,
              **settings):  # fmt: skip
    """The worker. A batch has up to max_batch_cost edges."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    atoms, edges = f"atoms<={max_atoms}", f"edges<={max_edges}"

    @rb.worker(
        model,
        inputs={"numbers": ("int32", (atoms,)), "positions": ("float64", (atoms, 3)), "cell": ("float64", (3, 3)),
                "edges": ("int32", (edges, 2)), "shifts": ("int32", (edges, 3))},
        outputs={"energy": ("float64", ()), "forces": ("float64", (atoms, 3)), "virial": ("float64", (3, 3)), "cutoff": ("float64", ())},
        packed=["numbers", "positions", "edges", "shifts"], cost="edges", max_batch_size=max_batch_size, max_batch_cost=max_batch_cost,
        **settings,
    )  # fmt: skip
    class Potential:
        def setup(self):
            self.energies, self.cutoff, self.known = load(dtype, device)

        def __call__(self, batch):
            given = checked(batch, self.known)
            y = evaluate(self.energies, packed(*given, dtype, device))
            return {**{name: x.double().cpu().numpy() for name, x in y.items()}, "cutoff": np.full(len(batch), self.cutoff)}

    return Potential


def checked(batch, known):
    """The inputs. A structure with an unknown element, or an edge to no atom, fails alone."""
    x, atoms, edges = batch.inputs, batch.offsets["atoms"], batch.offsets["edges"]
    numbers, ends, shifts = x["numbers"], x["edges"], x["shifts"]
    row, row_of_edge = np.repeat(np.arange(len(batch)), np.diff(atoms)), np.repeat(np.arange(len(batch)), np.diff(edges))
    strange = ~np.isin(numbers, known)
    for r in np.unique(row[strange]):
        elements = np.unique(numbers[atoms[r] : atoms[r + 1]][strange[atoms[r] : atoms[r + 1]]])
        batch.fail(batch.request_of(r), f"the potential does not know the atomic numbers {elements.tolist()}; it knows {sorted(known)}")
    outside = ((ends < 0) | (ends >= np.diff(atoms)[row_of_edge][:, None])).any(1)
    for r in np.unique(row_of_edge[outside]):
        batch.fail(batch.request_of(r), f"edges name atoms that are not among the {atoms[r + 1] - atoms[r]} of the structure")
    numbers, inside = np.where(strange, known[0], numbers), ~outside  # the failed ones compute anything
    ends = ends + atoms[:-1][row_of_edge][:, None]
    return numbers, x["positions"], x["cell"], ends[inside], shifts[inside], atoms


def packed(numbers, positions, cell, ends, shifts, offsets, dtype, device) -> Structures:
    """Tensors of arrays."""

    def real(x):
        return torch.from_numpy(np.array(x)).to(device, dtype)

    def whole(x):
        return torch.from_numpy(np.array(x, "int64")).to(device)

    of_atom = np.repeat(np.arange(len(cell)), np.diff(offsets))
    return Structures(whole(numbers), real(positions), real(cell), whole(ends.T), real(shifts), whole(offsets), whole(of_atom))


def alone(load, dtype=torch.float32, device="cpu"):
    """The same potential in this process: ringbatch.ase.Calculator(alone(load)) asks no broker."""
    energies, cutoff, _ = load(dtype, device)

    def ask(numbers, positions, cell, edges, shifts):
        y = evaluate(energies, packed(numbers, positions, cell[None], edges, shifts, [0, len(numbers)], dtype, device))
        forces = y["forces"].double().cpu().numpy()
        return {"energy": y["energy"].item(), "forces": forces, "virial": y["virial"][0].double().cpu().numpy(), "cutoff": cutoff}

    return ask
