# SPDX-License-Identifier: Apache-2.0
"""An encoder of BERT's shape with random weights, for bench/python/models.py: `ringbatch torch encoder:make --mask mask`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

LAYERS, WIDTH, HEADS, WORDS, LONGEST = 12, 768, 12, 30_000, 512


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows, size, _ = x.shape
        q, k, v = self.qkv(x).view(rows, size, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.first(x + self.out(y.transpose(1, 2).reshape(rows, size, WIDTH)))
        return self.second(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """Tokens and their mask to the mean of the states in true places."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(tokens) + self.places.weight[: tokens.shape[1]])
        for layer in self.layers:
            x = layer(x, mask[:, None, None, :])
        here = mask[:, :, None].to(x.dtype)
        return (x * here).sum(1) / here.sum(1)


def make() -> Encoder:
    torch.manual_seed(0)
    return Encoder().eval()
