# SPDX-License-Identifier: Apache-2.0
"""A worker for MACE models (pip install mace-torch).

    python examples/atoms/mace_models.py FILE     # a file of torch.save(model), as mace's training makes it
    python examples/atoms/mace_models.py random   # a small model with random weights, for trials

Clients: ringbatch.ase.Calculator("mace"). A file of torch.save can run any code: load only files that you trust.
"""

from __future__ import annotations

import sys

import ringbatch as rb
import torch
from potential import potential


def random_model():
    import numpy as np
    from e3nn import o3
    from mace import modules

    torch.manual_seed(0)
    block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    return modules.ScaleShiftMACE(
        r_max=5.0, num_bessel=8, num_polynomial_cutoff=5, max_ell=2, interaction_cls=block, interaction_cls_first=block,
        num_interactions=2, num_elements=4, hidden_irreps=o3.Irreps("16x0e + 16x1o"), MLP_irreps=o3.Irreps("8x0e"),
        atomic_energies=np.zeros(4), avg_num_neighbors=8.0, atomic_numbers=[1, 6, 7, 8], correlation=2,
        gate=torch.nn.functional.silu, atomic_inter_scale=1.0, atomic_inter_shift=0.0,
    )  # fmt: skip


def load(dtype, device, source=None):
    import mace  # noqa: F401 - before e3nn, which loads its constants only so

    source = source or sys.argv[1]
    model = random_model() if source == "random" else torch.load(source, map_location=device, weights_only=False)
    model = model.to(device, dtype).eval().requires_grad_(False)
    numbers = model.atomic_numbers.tolist()
    index = torch.zeros(max(numbers) + 1, dtype=torch.int64, device=device)
    index[model.atomic_numbers] = torch.arange(len(numbers), device=device)

    def energies(s):
        shifts = torch.einsum("ek,ekx->ex", s.shifts, s.cell[s.of_atom[s.edges[0]]])
        kinds = torch.nn.functional.one_hot(index[s.numbers], len(numbers)).to(dtype)
        data = {"positions": s.positions, "cell": s.cell.reshape(-1, 3), "edge_index": s.edges, "shifts": shifts, "unit_shifts": s.shifts,
                "node_attrs": kinds, "batch": s.of_atom, "ptr": s.offsets}  # fmt: skip
        return model(data, compute_force=False)["energy"]

    return energies, float(model.r_max), numbers


worker = potential("mace", load)

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    rb.serve(worker)
