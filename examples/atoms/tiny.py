# SPDX-License-Identifier: Apache-2.0
"""A message-passing potential with random weights over a repulsion, for trials without downloads.

    python examples/atoms/tiny.py             # workers in float32 and float64; starts a broker if none runs
    python examples/atoms/compare.py          # meanwhile; or ringbatch.ase.Calculator("tiny") in any ASE script
"""

from __future__ import annotations

import ringbatch as rb
import torch
from potential import potential
from torch import nn

CUTOFF, ELEMENTS, WIDTH, LAYERS = 4.5, [1, 6, 7, 8, 29], 64, 3


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.element = nn.Embedding(max(ELEMENTS) + 1, WIDTH)
        self.radial = nn.ModuleList(nn.Sequential(nn.Linear(8, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS))
        self.update = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS))
        self.energy = nn.Linear(WIDTH, 1)

    def forward(self, s):
        i, j = s.edges
        r = s.vectors().norm(dim=1)
        smooth = 0.5 * (torch.cos(r * (torch.pi / CUTOFF)) + 1)  # 0 at the cutoff
        waves = torch.sin(r[:, None] * torch.arange(1, 9, device=r.device) * (torch.pi / CUTOFF)) * smooth[:, None]
        h = self.element(s.numbers)
        for radial, update in zip(self.radial, self.update):
            h = h + 0.1 * update(torch.zeros_like(h).index_add(0, i, h[j] * radial(waves) * smooth[:, None]))
        pairs = 0.5 * smooth * ((1 - torch.exp(1.5 * (1.3 - r))) ** 2 - 1)  # Morse, half of each pair
        return s.sums(torch.tanh(self.energy(h))[:, 0].index_add(0, i, pairs))


def load(dtype, device):
    torch.manual_seed(0)
    return Tiny().to(device, dtype).requires_grad_(False), CUTOFF, ELEMENTS


worker, worker64 = potential("tiny", load), potential("tiny64", load, dtype=torch.float64)

if __name__ == "__main__":
    rb.serve([worker, worker64])
