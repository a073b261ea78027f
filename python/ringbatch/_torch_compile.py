# SPDX-License-Identifier: Apache-2.0
"""``torch.compile``, where its results agree and it pays: measured before serving.

What was compiled stays in a folder of the user's, so that a restart takes
seconds: $TORCHINDUCTOR_CACHE_DIR, or ringbatch/torch in the user's cache
folder. What lies there is run, so it must be nobody else's.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from . import errors
from ._torch_lanes import failure

Compute = Callable[[list[torch.Tensor]], list[torch.Tensor]]

MODES = ("off", "auto", "on")
WORTH = 1.03  # so many times as fast, to be taken
_ROUNDS, _ROUND_S = 5, 0.1
_PATIENCE_S = 300.0  # for another process that compiles


def tolerance(dtype: torch.dtype | None) -> float:
    """How far results may differ, as a part of the largest number."""
    return 0.001 if dtype is None else 0.02  # float16 and bfloat16


def cache_folder() -> str:
    """The folder of compiled code; made if it is not there."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(given or os.path.join(base, "ringbatch", "torch"))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.geteuid() or about.st_mode & stat.S_IWOTH:
        raise errors.Invalid(f"{folder}: what lies here is run, and others may write it; name another folder in $TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return str(folder)


def choose(
    mode: str, plain: Compute, compiled: Callable[[], Compute], examples: list[list[torch.Tensor]], within: float, recorded: bool = False, of: object = None
) -> Compute | None:
    """The compiled code, or None: serve without.

    examples: inputs of a full batch, and of others that will come. recorded:
    they will run as CUDA graphs. of: what is compiled, as a text that is the same in another process.
    """
    try:
        folder = cache_folder()
        with _one_compiles(folder, of):
            began = time.monotonic()
            code = compiled()
            for xs in examples:
                if not differ_at_most(within, code(xs), plain(xs)):
                    raise ValueError(f"results differ by more than {within:g} of the largest number")
            took = time.monotonic() - began
    except Exception as e:  # of the compiler's, of a C++ compiler that is not there, …
        if mode == "on":
            raise
        print(f"serving the module as it is, not compiled: {failure(e)}", file=sys.stderr)
        return None
    if mode == "auto":
        before, after = _race(plain, code, examples[0], recorded)
        rows = len(examples[0][0])
        said = f"{rows} rows take {1000 * before:.3g} ms, compiled {1000 * after:.3g} ms"
        if before < WORTH * after:
            print(f"serving the module as it is: compiling does not pay ({said})", flush=True)
            return None
        print(f"serving compiled code: {said}; results agree within {within:g} of the largest number", flush=True)
    print(f"{'read compiled code' if _all_was_kept() else 'compiled'} in {took:.1f} s, kept in {folder}", flush=True)
    return code


@contextlib.contextmanager
def _one_compiles(folder: str, of: object) -> Iterator[None]:
    """Processes that start together compile once: the others wait, and read what the first has kept."""
    digest = hashlib.sha256(f"{torch.__version__} {of}".encode()).hexdigest()[:16]
    kept = Path(folder, f"ringbatch-{digest}")
    with open(Path(folder, "ringbatch.lock"), "w") as lock:
        patience = time.monotonic() + _PATIENCE_S
        while not kept.exists() and time.monotonic() < patience:  # beyond that: one that hangs, compile beside it
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.1)
        if kept.exists():
            _compile_in_this_process()
        yield
        kept.touch()


def _compile_in_this_process() -> None:
    """There is hardly anything to compile: without helper processes, each of which would import torch first."""
    if os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1") == "1":
        import torch._inductor.config as inductor

        inductor.compile_threads = 1


@contextlib.contextmanager
def constant_weights() -> Iterator[None]:
    """What is compiled in here takes weights for constants: batch norms go into the convolutions before them."""
    import torch._inductor.config as inductor

    with inductor.patch(freezing=True):  # type: ignore[attr-defined]
        yield


def _all_was_kept() -> bool:
    """Whether nothing had to be compiled in this process."""
    from torch._dynamo.utils import counters

    found = counters["inductor"]
    return found["fxgraph_cache_hit"] > 0 and not found["fxgraph_cache_miss"]


def differ_at_most(part: float, got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    """Of the largest number in each output."""

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
    """As a CUDA graph, if that works: launched one by one, kernels of a small batch take longer than they compute."""
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
