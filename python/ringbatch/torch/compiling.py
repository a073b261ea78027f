# SPDX-License-Identifier: Apache-2.0
"""``torch.compile``, if its results agree and it pays: measured before serving.

PyTorch keeps the compiled kernels in $TORCHINDUCTOR_CACHE_DIR, or ringbatch/torch in the
user's cache folder. Kernels in that folder are run, so no other user may write there.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from ..worker.trust import cache_folder
from .lanes import failure

Compute = Callable[[list[torch.Tensor]], list[torch.Tensor]]

MODES = ("off", "auto", "on")
WORTH = 1.03  # compiled code is served if it is this many times as fast
_ROUNDS, _ROUND_S = 5, 0.1


def choose(
    mode: str, plain: Compute, compiled: Callable[[], Compute], examples: list[list[torch.Tensor]], within: float, recorded: bool = False
) -> Compute | None:
    """The compiled code, or None: serve the plain module.

    examples: the inputs of a full batch, then of other batches. recorded: they will run as CUDA graphs.
    """
    try:
        folder = cache_folder()
        began = time.monotonic()
        code = compiled()
        for xs in examples:
            if not differ_at_most(within, code(xs), plain(xs)):
                raise ValueError(f"results differ by more than {within:g} of the largest number")
        took = time.monotonic() - began
    except Exception as e:  # the compiler fails in many ways, for example without a C++ compiler
        if mode == "on":
            raise
        print(f"serving the module as it is, not compiled: {failure(e)}", file=sys.stderr)
        return None
    if mode == "auto":
        before, after = _race(plain, code, examples[0], recorded)
        said = f"{len(examples[0][0])} rows take {1000 * before:.3g} ms, compiled {1000 * after:.3g} ms"
        if before < WORTH * after:
            print(f"serving the module as it is: compiling does not pay ({said})", flush=True)
            return None
        print(f"serving compiled code: {said}; results agree within {within:g} of the largest number", flush=True)
    print(f"{'read compiled code' if _all_was_kept() else 'compiled'} in {took:.1f} s, kept in {folder}", flush=True)
    return code


@contextlib.contextmanager
def constant_weights() -> Iterator[None]:
    """Compiles with weights as constants: batch norms go into the convolutions before them."""
    import torch._inductor.config as inductor

    with inductor.patch(freezing=True):  # type: ignore[attr-defined]
        yield


def _all_was_kept() -> bool:
    """Whether this process read all its code from the cache."""
    from torch._dynamo.utils import counters

    found = counters["inductor"]
    if found["fxgraph_cache_miss"] or found["fxgraph_cache_bypass"]:
        return False
    # If the cache is off it neither hits nor misses: then every traced frame was compiled.
    return bool(found["fxgraph_cache_hit"] or counters["aot_autograd"]["autograd_cache_hit"] or not counters["frames"]["total"])


def differ_at_most(part: float, got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    """Whether outputs differ by at most a part of their largest number."""

    def close(y: torch.Tensor, z: torch.Tensor) -> bool:
        most = z.abs().max().item() if z.numel() else 0.0
        return y.shape == z.shape and torch.allclose(y, z, rtol=0, atol=part * most, equal_nan=True)

    return len(got) == len(want) and all(close(y.double(), z.double()) for y, z in zip(got, want))


def _race(one: Compute, other: Compute, xs: list[torch.Tensor], recorded: bool) -> tuple[float, float]:
    """The best time of each, taken in turns."""
    best = [float("inf")] * 2
    runs = [_recorded(f, xs) if recorded else partial(f, xs) for f in (one, other)]
    for _ in range(_ROUNDS):
        for i, run in enumerate(runs):
            end = time.monotonic() + _ROUND_S
            while True:
                began = time.monotonic()
                run()
                if xs[0].is_cuda:
                    torch.cuda.synchronize(xs[0].device)
                now = time.monotonic()
                best[i] = min(best[i], now - began)
                if now > end:
                    break
    return best[0], best[1]


def _recorded(f: Compute, xs: list[torch.Tensor]) -> Callable[[], object]:
    """Runs f as a CUDA graph if that works: launching the kernels of a small batch takes longer than computing it."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            kept = f(xs)
    except RuntimeError:
        return partial(f, xs)

    def replay() -> list[torch.Tensor]:
        graph.replay()
        return kept

    return replay
