# SPDX-License-Identifier: Apache-2.0
"""``serve``: runs models, and ends them in good order.

::

    no broker runs      serve ── starts ──► broker ── starts, watches ──► workers
    one runs already    serve ── starts ──► supervisor ── starts, watches ──► workers ──► that broker

The supervisor of the second case is a broker without models. At the end a broker refuses
new requests, finishes accepted ones, and ends the workers last. When the other broker
goes, serve starts one in its place, unless that one had started serve.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Callable, NamedTuple

from .. import errors
from ..binding.library import cores
from ..worker.refusal import TOLD_AT, Refusal, Refusals
from ..worker.signals import StopEvent, ends, stop_on_signals, stopping
from . import targets
from .broker import DRAIN_S, START_S, ask_broker, broker_runs, hurry, socket_path, start_broker, wait_for_broker
from .gateway import gateway_table
from .targets import Reached, Served

log = logging.getLogger("ringbatch")

CHILD = "RINGBATCH_CHILD"  # set in worker processes
SUPERVISED = "RINGBATCH_SUPERVISED"  # the socket of the broker that started this process

_STOP_S = DRAIN_S + 15.0  # for the workers and the broker to end
_BATCH_S = 30  # for workers of another broker to finish a batch at the end
_FAILED_STARTS = 5  # of a worker that never attached: its script is broken
_LOOK_S = 0.1
_LOOK_FOR_BROKER_S = 1.0
_LOOK_AT_STARTS_S = 0.5


def serve(
    run: Served | Sequence[Served],
    *,
    processes: int | Sequence[int] = 1,
    spares: int = 0,
    socket: str | os.PathLike[str] | None = None,
    broker: bool = True,
    http: int | str | None = None,
    grpc: int | str | None = None,
) -> None:
    """Serves models until Ctrl-C or SIGTERM, then stops everything it started. Accepted
    requests are answered first; a second Ctrl-C ends at once.

    Once all workers have attached, serve says so on standard error, with the line that
    connects: ``double is ready: rb.connect("double")``.

    run: a function or class decorated with ``@ringbatch.worker``; a function
        without arguments that makes one; an import path, ``"package.module:name"``;
        or a list of these.
    processes: worker processes of each, or a list with a number for each; 0
        serves in this process, as does 1 if a broker has started it. Without $OMP_NUM_THREADS, each computes with its
        share of the cores.
    spares: more processes of each model, which have loaded it and wait: one takes the place of a worker that dies, at once.
    socket: the broker's; default $RINGBATCH_SOCKET or the user's runtime folder.
    broker: start a broker if none runs. It ends with serve.
    http, grpc: also serve the network: a port of this host, or an address. See
        docs/gateway.md; other hosts need TLS and tokens, and ``ringbatch gateway``.

    Worker processes import the module that defines the worker, or run the
    script again up to this call, with the same arguments. Only they instantiate
    classes and call factories. A worker that dies is started again.
    """
    served = [run] if isinstance(run, (str, targets.Worker)) or callable(run) else list(run)
    serve_all(served, processes, socket, broker, http, grpc, spares=spares)


def serve_all(
    served: Sequence[Served],
    processes: int | Sequence[int],
    socket: str | os.PathLike[str] | None,
    broker: bool,
    http: int | str | None,
    grpc: int | str | None,
    pipeline: tuple[str, str] | None = None,
    until: tuple[StopEvent, Callable[[], None]] | None = None,
    spares: int = 0,
) -> None:
    """pipeline: the name and declaration, if the workers are its stages. until: ends it, instead of signals; and is called when all
    models are ready, instead of a line on standard error."""
    if os.environ.get(CHILD):
        raise Reached(served)
    counts = [processes] * len(served) if isinstance(processes, int) else list(processes)
    if spares < 0 or (spares and 0 in counts):
        raise errors.Invalid(f"serve: spares={spares!r} of processes={processes!r}; spares replace worker processes")
    if not served or len(counts) != len(served) or any(n < 0 for n in counts):
        raise errors.Invalid(f"serve: {len(served)} models and processes={processes!r}; give one number, or one for each")
    for item in served:
        targets.check(item)
    at = socket_path(socket)
    if _supervised(at) and counts == [1] and not (spares or http or grpc or pipeline or until):
        return _serve_here(targets.worker_of(served[0]), at)
    child = [sys.executable, "-m", "ringbatch.serve.child", *(["stage", *pipeline] if pipeline else [])]
    commands = [[*child, *targets.describe(item, i), "--", *targets.ARGUMENTS] for i, item in enumerate(served) if counts[i]]
    counts_of = [n for n in counts if n]
    here = [targets.worker_of(item) for item, n in zip(served, counts) if n == 0]
    if pipeline:
        here = [worker.as_stage(*pipeline) for worker in here]
    gateway = gateway_table(at, http, grpc)
    with contextlib.nullcontext(until[0]) if until else stopping() as stop, in_threads(here, at, stop) as threads_attached:
        names = [pipeline[0]] if pipeline else [getattr(item, "model", None) for item in served]
        say_ready = ReadyLine(names, at, threads_attached, until and until[1])
        run_commands(commands, counts_of, at, stop, gateway, broker, say_ready, spares=spares)


class ReadyLine:
    """Says once that all models are ready, and how to call them."""

    def __init__(
        self, names: Sequence[str | None], at: str, threads_attached: Callable[[], bool], instead: Callable[[], None] | None = None
    ) -> None:
        """names: None for a factory or an import path, whose name only its worker process knows. instead: is called instead."""
        self._names, self._at, self._threads_attached, self._instead = names, at, threads_attached, instead
        self._said = False

    def __call__(self, joined: bool) -> None:
        """All worker processes have attached. joined: to a broker of another process."""
        if self._said or not self._threads_attached():
            return
        self._said = True
        if self._instead:
            return self._instead()
        names = [name for name in self._names if name]
        if len(names) < len(self._names):
            names = [m["name"] for m in ask_broker("models", self._at) or [] if m["workers"]]
        where = "" if self._at == socket_path(None) else f", socket={self._at!r}"
        broker = f" (joined the broker that already runs at {self._at})" if joined else ""
        for name in dict.fromkeys(names):
            print(f'{name} is ready: rb.connect("{name}"{where}){broker}', file=sys.stderr, flush=True)


class _Job(NamedTuple):
    """What is served."""

    commands: list[list[str]]  # of worker processes
    counts: list[int]
    socket: str
    gateway: str  # its part of the configuration
    say_ready: Callable[[bool], None]  # True: to a broker of another process
    refusals: Refusals
    idle: float  # after so many seconds without a client a broker of ours ends, and serve; 0: never
    spares: int  # for each command

    def config(self, joined: bool) -> str:
        """The configuration of the supervising broker."""
        tables = [self.gateway]
        for command, n in zip(self.commands, self.counts):
            tables.append(f"[[worker]]\ncommand = {_toml(command)}\ninstances = {n}\nspares = {self.spares:d}\n")
            if joined:
                tables.append(f'stop_time = "{_BATCH_S}s"\nenv = {{ RINGBATCH_SOCKET = {_toml(self.socket)} }}\n')
        return "".join(tables)

    def environment(self) -> dict[str, str]:
        """Of the worker processes."""
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        ours = {CHILD: "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "RINGBATCH_SOCKET": self.socket, TOLD_AT: self.refusals.path}
        # A share of the cores: more threads than cores slow all processes down.
        return {"OMP_NUM_THREADS": str(max(1, cores() // max(1, sum(self.counts)))), **os.environ, **ours}


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def run_commands(
    commands: list[list[str]], counts: list[int], at: str, stop: StopEvent, gateway: str, broker: bool,
    say_ready: Callable[[bool], None] = lambda joined: None, idle: float = 0, spares: int = 0,
) -> None:
    """Runs worker processes until stop is set."""
    broker = broker and not _supervised(at)
    with contextlib.closing(Refusals()) as refusals:
        job = _Job(commands, counts, at, gateway, say_ready, refusals, idle, spares)
        while not stop.is_set():
            if broker and not broker_runs(at):
                _supervise(job, at, stop, False, broker)
                continue
            with tempfile.TemporaryDirectory(prefix="ringbatch-") as folder:
                _supervise(job, os.path.join(folder, "b.sock"), stop, True, broker)


def _supervised(at: str) -> bool:
    """Whether the broker of this socket started this process, and will end it. If connecting to it fails, another
    broker takes over while this one finishes its accepted requests, with our workers."""
    its = os.environ.get(SUPERVISED)
    return bool(its) and os.path.abspath(str(its)) == at


# -- in this process


def _serve_here(worker: targets.Worker, socket: str) -> None:
    """Serves until a signal. The broker that started this process starts it again: a second process would load the model once more."""
    stop = StopEvent()
    restore = stop_on_signals(stop)
    try:
        worker._serve(socket, stop, START_S)
    finally:
        restore()


@contextlib.contextmanager
def in_threads(workers: Sequence[targets.Worker], socket: str, ending: StopEvent) -> Iterator[Callable[[], bool]]:
    """Runs workers in threads of this process; yields the function that says whether all have attached."""
    stop = threading.Event()  # not ending: they stop after the broker, which has accepted requests for them
    attached: set[int] = set()
    failures: list[BaseException] = []

    def run(i: int, worker: targets.Worker) -> None:
        try:
            worker._serve(socket, stop, START_S, lambda: attached.add(i))
        except BaseException as e:
            failures.append(e)
            ending.set()

    threads = [threading.Thread(target=run, args=w, name=f"ringbatch {w[1].model}", daemon=True) for w in enumerate(workers)]
    try:
        for thread in threads:
            thread.start()
        yield lambda: len(attached) == len(threads)
    finally:
        stop.set()
        ends(lambda: not any(t.is_alive() for t in threads), math.inf, ending)
    if failures:
        raise failures[0]


# -- the broker that supervises


def _supervise(job: _Job, at: str, stop: StopEvent, joined: bool, take_over: bool) -> None:
    """Serves until stop is set, the supervising broker ends, or, with take_over, the joined one has gone."""
    config = job.config(joined)
    flags = ["--idle", f"{job.idle:.9f}s"] if job.idle and not joined else []
    p = start_broker(config, at, job.environment(), *flags) if config or not joined else None  # None: it would have nothing to do
    attached: set[str] = set()  # the processes that have said so
    look_for = _LookFor(job.socket, take_over) if joined else None
    try:
        if p is not None and not wait_for_broker(p, at, stop):
            return  # another broker started first
        ready, look = not job.commands or (joined and job.refusals.over), time.monotonic()
        while not stop.wait(_LOOK_S):
            for told in job.refusals.take():
                _hear(told, attached)
            if not ready and time.monotonic() >= look:
                ready, look = _all_attached(at, attached), time.monotonic() + _LOOK_AT_STARTS_S
                if ready:
                    job.refusals.end()
            if ready:
                job.say_ready(joined)
            if p is not None and p.poll() == 0 and flags and not broker_runs(at):
                stop.set()
            elif p is not None and p.poll() is not None:
                log.warning("the broker ended with status %s, starting it again", p.returncode)
                stop.wait(_LOOK_S)
                return
            if look_for is not None and look_for.is_gone():
                return
    finally:
        # The broker refuses new requests, finishes accepted ones and ends the
        # gateway and the workers. Those in threads here see it go.
        if p is not None:
            p.terminate()
            if not ends(lambda: p.poll() is not None, _STOP_S, stop):
                hurry(p)


class _LookFor:
    """Looks now and then whether the broker of another process is there."""

    def __init__(self, socket: str, take_over: bool) -> None:
        self._socket, self._take_over, self._there, self._at = socket, take_over, True, 0.0

    def is_gone(self) -> bool:
        """Whether to start one in its place."""
        if time.monotonic() < self._at:
            return False
        self._at, was = time.monotonic() + _LOOK_FOR_BROKER_S, self._there
        self._there = broker_runs(self._socket)
        if was and not self._there:
            log.warning("the broker at %s is gone: %s one", self._socket, "starting" if self._take_over else "waiting for")
        elif self._there and not was:
            log.warning("there is a broker at %s again", self._socket)
        return self._take_over and not self._there


def _all_attached(at: str, attached: set[str]) -> bool:
    """Whether every worker has attached once; raises if one cannot."""
    told = ask_broker("stats", at)
    started = [s for s in (told or {}).get("processes") or [] if not s.get("client")]
    waiting = [s for s in started if not s["attached"] and s["name"] not in attached]
    for s in waiting:
        if s["failed_starts"] >= _FAILED_STARTS:
            raise errors.WorkerDied(f"{s['name']} ended {s['failed_starts']} times before it was ready ({s['last_end']}); see its "
                "messages above")
    return bool(started) and not waiting


def _hear(told: Refusal, attached: set[str]) -> None:
    """Raises the refusal of a process that has never attached. A process that has attached is started again."""
    if not told.text:
        attached.add(told.name)
    elif told.name not in attached:
        raise errors.Invalid(told.text)
    else:
        log.warning("%s, which has served, is started again: %s", told.name, told.text)
