# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of a transformer on packed texts. A batch of usual size needs less time than the launches of its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from ..torch.lanes import recorded_sizes

MOST_TEXTS = 128  # of a recorded batch

#: From the columns of tokens, the offsets of the texts, and a length that none exceeds, the hidden state of each token.
Body = Callable[[Mapping[str, torch.Tensor], torch.Tensor, int], torch.Tensor]


class Graphs:
    """The body, recorded for several numbers of tokens. A batch runs in the next larger graph, and nobody reads the rest."""

    def __init__(self, body: Body, names: Sequence[str], most_tokens: int, longest: int, device: torch.device) -> None:
        self.columns = {name: torch.zeros(1, most_tokens, dtype=torch.int64, device=device) for name in names}
        self.offsets = torch.zeros(MOST_TEXTS + 1, dtype=torch.int32, device=device)
        self.sizes = sorted({-(-most_tokens * part // 64) for part in recorded_sizes(64)})
        self.longest, pool = longest, torch.cuda.graph_pool_handle()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for n in reversed(self.sizes):  # the largest first: the others find room in its memory
                self.offsets.copy_(torch.arange(MOST_TEXTS + 1).mul(longest).clamp(max=n))
                part = {name: x[:, :n] for name, x in self.columns.items()}
                body(part, self.offsets, longest)  # allocations of the first run cannot be recorded
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=pool)
                try:
                    states = body(part, self.offsets, longest)
                finally:
                    graph.capture_end()
                self._graphs[n] = (graph, states)
        torch.cuda.current_stream(device).wait_stream(stream)

    def fit(self, sizes: Sequence[int]) -> bool:
        return len(sizes) <= MOST_TEXTS and sum(sizes) <= self.sizes[-1] and max(sizes) <= self.longest

    def run(self, columns: Mapping[str, np.ndarray], sizes: Sequence[int]) -> torch.Tensor:
        """The states of the tokens, until the next run."""
        ends = np.full(MOST_TEXTS + 1, sum(sizes), "int32")
        ends[: len(sizes) + 1] = np.cumsum([0, *sizes])
        self.offsets.copy_(torch.from_numpy(ends).pin_memory(), non_blocking=True)
        for name, x in columns.items():
            self.columns[name][0, : len(x)].copy_(torch.from_numpy(x).pin_memory(), non_blocking=True)
        graph, states = self._graphs[next(n for n in self.sizes if n >= ends[-1])]
        graph.replay()
        return states[: ends[-1]]
