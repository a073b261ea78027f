# SPDX-License-Identifier: Apache-2.0
"""``torch.compile``, where its results agree and it pays: measured before serving.

What was compiled stays in a folder of the user's, and so does what was measured,
so that a restart is sooner done: $TORCHINDUCTOR_CACHE_DIR, or ringbatch/torch in the
user's cache folder. What lies there is run, so it must be nobody else's.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

import torch

from ..worker.code_cache import cache_folder
from .lanes import failure

Compute = Callable[[list[torch.Tensor]], list[torch.Tensor]]

MODES = ("off", "auto", "on")
WORTH = 1.03  # so many times as fast, to be taken
_ROUNDS, _ROUND_S = 5, 0.1
_PLAIN, _COMPILED = "as it is", "compiled"  # what was chosen
_PATIENCE_S = 300.0  # for another process that compiles
_SAY_S = 30.0  # how often a process that waits for it says so


class Stopped(Exception):
    """Waiting for another process that compiles, it was asked to stop."""


def choose(
    mode: str, plain: Compute, compiled: Callable[[], Compute], examples: list[list[torch.Tensor]], within: float, recorded: bool = False,
    of: object = None,
    read: Callable[[str], bool] = lambda folder: True, stopped: Callable[[], bool] = lambda: False,
) -> Compute | None:  # fmt: skip
    """The compiled code, or None: serve without.

    examples: inputs of a full batch, and of others that will come. recorded:
    they will run as CUDA graphs. of: what is compiled, as a text that is the same in another process; what
    an earlier start has measured of it is not measured again. read: whether compiled, once it was called for it, only reads
    what that folder has: its weights, which of does not tell, may be new. stopped: whether to wait no longer for another process.
    """
    try:
        folder = cache_folder()
        kept = Path(folder, f"ringbatch-{hashlib.sha256(f'{torch.__version__} {of}'.encode()).hexdigest()[:16]}")
        verdict, said = _verdict(kept) if of is not None and mode == "auto" else ("", "")
        if verdict == _PLAIN:
            print(f"serving the module as it is: compiling did not pay ({said}; measured at an earlier start, kept in {kept})", flush=True)
            return None
        with _one_compiles(folder, kept, read, stopped):
            began = time.monotonic()
            code = compiled()
            for xs in examples:
                if not differ_at_most(within, code(xs), plain(xs)):
                    raise ValueError(f"results differ by more than {within:g} of the largest number")
            took = time.monotonic() - began
    except Stopped:
        raise
    except Exception as e:  # of the compiler's, of a C++ compiler that is not there, …
        if mode == "on":
            raise
        print(f"serving the module as it is, not compiled: {failure(e)}", file=sys.stderr)
        return None
    if mode == "auto":
        if not verdict:
            before, after = _race(plain, code, examples[0], recorded)
            said = f"{len(examples[0][0])} rows take {1000 * before:.3g} ms, compiled {1000 * after:.3g} ms"
            verdict = _PLAIN if before < WORTH * after else _COMPILED
            with contextlib.suppress(OSError):  # a full disk: it will be measured again
                _keep(kept, verdict, said)
            if verdict == _PLAIN:
                print(f"serving the module as it is: compiling does not pay ({said})", flush=True)
                return None
        print(f"serving compiled code: {said}; results agree within {within:g} of the largest number", flush=True)
    print(f"{'read compiled code' if _all_was_kept() else 'compiled'} in {took:.1f} s, kept in {folder}", flush=True)
    return code


def _verdict(kept: Path) -> tuple[str, str]:
    """What an earlier start has chosen, and why; nothing if there was none."""
    try:
        verdict, _, said = kept.read_text(encoding="utf-8").partition("\n")
    except OSError:
        return "", ""
    return (verdict, said.strip()) if verdict in (_PLAIN, _COMPILED) else ("", "")


def _keep(kept: Path, verdict: str, said: str) -> None:
    """All of it or nothing: another process may read it just now."""
    new = kept.with_name(f"{kept.name}.{os.getpid()}")
    new.write_text(f"{verdict}\n{said}\n", encoding="utf-8")
    new.replace(kept)


@contextlib.contextmanager
def _one_compiles(folder: str, kept: Path, read: Callable[[str], bool], stopped: Callable[[], bool]) -> Iterator[None]:
    """Processes that start together compile once: the others wait, and read what the first has kept."""

    def there() -> bool:
        return kept.exists() and read(folder)

    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # the folder cannot be written, or has no locks: then nobody waits
            lock = held.enter_context(open(Path(folder, "ringbatch.lock"), "w"))
            if _wait_for_turn(lock, folder, there, stopped):
                held.callback(fcntl.flock, lock, fcntl.LOCK_UN)  # closing it is not enough: the compiler's processes have it open, too
        if there():
            _compile_in_this_process()
        yield
        with contextlib.suppress(OSError):
            kept.touch()


def _wait_for_turn(lock: IO[str], folder: str, there: Callable[[], bool], stopped: Callable[[], bool]) -> bool:
    """Until the code is there, or True: this process makes it, and has the lock. The kernel frees the lock of one that is killed."""
    began, said = time.monotonic(), -_SAY_S
    while not there() and (waited := time.monotonic() - began) < _PATIENCE_S:  # beyond that: one that hangs, compile beside it
        if stopped():
            raise Stopped
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if waited - said >= _SAY_S:
                said = waited
                print(f"another process compiles, in {folder}: waiting for it, {waited:.0f} of at most {_PATIENCE_S:.0f} s", flush=True)
            time.sleep(0.1)
    return False


def _compile_in_this_process() -> None:
    """There is hardly anything to compile: without helper processes, each of which would import torch first."""
    if os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1") == "1":
        import torch._inductor.config as inductor

        inductor.compile_threads = 1


def code_of(module: object) -> str:
    """A text that changes with the code of a module and of those in it, which their names and sizes do not tell."""
    parts = module.modules() if isinstance(module, torch.nn.Module) else [module]
    forwards = {getattr(type(p), "forward", p) for p in parts}
    codes = {getattr(f, "__code__", None) for f in forwards}
    return hashlib.sha256("\n".join(sorted(code_text(c) for c in codes if c)).encode()).hexdigest()


def code_text(code: types.CodeType) -> str:
    """Without what differs from process to process: addresses, the order of sets."""
    constants = [code_text(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts if not isinstance(c, frozenset)]
    return f"{code.co_name} {code.co_code.hex()} {code.co_names} {constants}"


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
    if found["fxgraph_cache_miss"] or found["fxgraph_cache_bypass"]:
        return False
    # Without that cache it neither hits nor misses; then what was traced was compiled.
    return bool(found["fxgraph_cache_hit"] or counters["aot_autograd"]["autograd_cache_hit"] or not counters["frames"]["total"])


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
