# SPDX-License-Identifier: Apache-2.0
"""A worker for MACE models (pip install mace-torch).

    python examples/atoms/mace_models.py FILE            # a file of torch.save(model), as mace's training makes it; in float32
    python examples/atoms/mace_models.py FILE float64    # the model is then named mace64
    python examples/atoms/mace_models.py FILE float32 pt # the head pt of a model with several; default: the head named default
    python examples/atoms/mace_models.py random          # a small model with random weights, for trials

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

    source, *options = [source] if source else sys.argv[1:]
    model = random_model() if source == "random" else torch.load(source, map_location=device, weights_only=False)
    model = model.to(device, dtype).eval().requires_grad_(False)
    numbers = model.atomic_numbers.tolist()
    index = torch.zeros(max(numbers) + 1, dtype=torch.int64, device=device)
    index[model.atomic_numbers] = torch.arange(len(numbers), device=device)
    if hasattr(model, "joint_embedding"):
        raise rb.Invalid(f"the model wants {', '.join(model.embedding_specs)}: the calculator sends atoms and cell only")
    heads = [name.lower() for name in getattr(model, "heads", ["default"])]
    wanted = options[1].lower() if options[1:] else heads[0] if len(heads) == 1 else "default"
    if wanted not in heads:
        raise rb.Invalid(f"the model has no head {wanted!r}: name one of {', '.join(heads)}")
    head = heads.index(wanted)

    def energies(s):
        shifts = torch.einsum("ek,ekx->ex", s.shifts, s.cell[s.of_atom[s.edges[0]]])
        kinds = torch.nn.functional.one_hot(index[s.numbers], len(numbers)).to(dtype)
        data = {"positions": s.positions, "cell": s.cell.reshape(-1, 3), "edge_index": s.edges, "shifts": shifts, "unit_shifts": s.shifts,
                "node_attrs": kinds, "batch": s.of_atom, "ptr": s.offsets, "head": torch.full_like(s.offsets[1:], head)}  # fmt: skip
        return model(data, compute_force=False)["energy"]

    return energies, float(model.r_max), numbers


worker, worker64 = potential("mace", load), potential("mace64", load, dtype=torch.float64)

if __name__ == "__main__":
    served = {"float32": worker, "float64": worker64}.get((*sys.argv, "float32")[2]) if 2 <= len(sys.argv) <= 4 else None
    rb.serve(served or sys.exit(__doc__))
