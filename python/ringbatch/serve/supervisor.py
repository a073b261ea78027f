# SPDX-License-Identifier: Apache-2.0
"""``serve``: runs models, and ends them in good order.

::

    no broker runs      serve ── starts ──► broker ── starts, watches ──► workers
    one runs already    serve ── starts, watches ──► workers ──► that broker

In the first case the broker supervises: at the end it refuses new requests,
finishes accepted ones, and ends the workers last. In the second case serve
starts a broker when the other one goes, unless that one had started serve.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple

from .. import errors
from ..binding.library import cores
from ..worker.refusal import TOLD_AT, Refusal, Refusals
from ..worker.signals import StopEvent, ends, stopping
from . import targets
from .broker import DRAIN_S, START_S, ask_broker, broker_runs, hurry, socket_path, start_broker, wait_for_broker, with_us
from .gateway import Door, gateway_door
from .targets import Reached, Served
from .watched import WatchedProcess

log = logging.getLogger("ringbatch")

CHILD = "RINGBATCH_CHILD"  # set in worker processes
PARENT = "RINGBATCH_PARENT"  # the process that they end with
SUPERVISED = "RINGBATCH_SUPERVISED"  # the socket of the broker that started this process

_STOP_S = DRAIN_S + 15.0  # for the workers and the broker to end
_FAILED_STARTS = 5  # of a worker that never attached: its script is broken
_LOOK_S = 0.1
_LOOK_FOR_BROKER_S = 1.0
_LOOK_AT_STARTS_S = 0.5


def serve(
    run: Served | Sequence[Served],
    *,
    processes: int | Sequence[int] = 1,
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
        serves in this process. Without $OMP_NUM_THREADS, each computes with its
        share of the cores.
    socket: the broker's; default $RINGBATCH_SOCKET or the user's runtime folder.
    broker: start a broker if none runs. It ends with serve.
    http, grpc: also serve the network: a port of this host, or an address. See
        docs/gateway.md; other hosts need TLS and tokens, and ``ringbatch gateway``.

    Worker processes import the module that defines the worker, or run the
    script again up to this call, with the same arguments. Only they instantiate
    classes and call factories. A worker that dies is started again.
    """
    served = [run] if isinstance(run, (str, targets.Worker)) or callable(run) else list(run)
    serve_all(served, processes, socket, broker, http, grpc)


def serve_all(
    served: Sequence[Served],
    processes: int | Sequence[int],
    socket: str | os.PathLike[str] | None,
    broker: bool,
    http: int | str | None,
    grpc: int | str | None,
    pipeline: tuple[str, str] | None = None,
) -> None:
    """pipeline: the name and declaration, if the workers are its stages."""
    if os.environ.get(CHILD):
        raise Reached(served)
    counts = [processes] * len(served) if isinstance(processes, int) else list(processes)
    if not served or len(counts) != len(served) or any(n < 0 for n in counts):
        raise errors.Invalid(f"serve: {len(served)} models and processes={processes!r}; give one number, or one for each")
    for item in served:
        targets.check(item)
    at = socket_path(socket)
    child = [sys.executable, "-m", "ringbatch.serve.child", *(["stage", *pipeline] if pipeline else [])]
    commands = [[*child, *targets.describe(item, i), "--", *targets.ARGUMENTS] for i, item in enumerate(served) if counts[i]]
    counts_of = [n for n in counts if n]
    here = [targets.worker_of(item) for item, n in zip(served, counts) if n == 0]
    if pipeline:
        here = [worker.as_stage(*pipeline) for worker in here]
    door = gateway_door(at, http, grpc)
    with stopping() as stop, in_threads(here, at, stop) as threads_attached:
        names = [pipeline[0]] if pipeline else [getattr(item, "model", None) for item in served]
        say_ready = ReadyLine(names, at, threads_attached)
        run_commands(commands, counts_of, at, stop, door, broker, say_ready=say_ready)


class ReadyLine:
    """Says once that all models are ready, and how to call them."""

    def __init__(self, names: Sequence[str | None], at: str, threads_attached: Callable[[], bool]) -> None:
        """names: None for a factory or an import path, whose name only its worker process knows."""
        self._names, self._at, self._threads_attached = names, at, threads_attached
        self._said = False

    def __call__(self, joined: bool) -> None:
        """All worker processes have attached. joined: to a broker of another process."""
        if self._said or not self._threads_attached():
            return
        self._said = True
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
    door: Door
    say_ready: Callable[[bool], None]  # True: to a broker of another process
    refusals: Refusals

    def environment(self) -> dict[str, str]:
        """Of the worker processes."""
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        ours = {CHILD: "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "RINGBATCH_SOCKET": self.socket, TOLD_AT: self.refusals.path}
        # A share of the cores: more threads than cores slow all processes down.
        return {"OMP_NUM_THREADS": str(max(1, cores() // max(1, sum(self.counts)))), **os.environ, **ours}


def run_commands(
    commands: list[list[str]], counts: list[int], at: str, stop: StopEvent, door: Door, broker: bool, programs: bool = False,
    say_ready: Callable[[bool], None] = lambda joined: None,
) -> None:
    """Runs worker processes until stop is set. programs: the commands are no serve.child, which ends with its parent by itself."""
    broker = broker and not _supervised(at)
    with contextlib.closing(Refusals()) as refusals:
        job = _Job(commands, counts, at, door, say_ready, refusals)
        bound = job._replace(commands=[with_us(*command) for command in commands]) if programs else job
        while not stop.is_set():
            if broker and not broker_runs(at):
                _host(job, stop)
            else:
                _guest(bound, stop, broker)
                refusals.end()  # the workers have served: later starts are no first starts


def _supervised(at: str) -> bool:
    """Whether the broker of this socket started this process, and will end it. If connecting to it fails, another
    broker takes over while this one finishes its accepted requests, with our workers."""
    its = os.environ.get(SUPERVISED)
    return bool(its) and os.path.abspath(str(its)) == at


# -- in this process


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


# -- our own broker, which starts the workers


def _host(job: _Job, stop: StopEvent) -> None:
    """Serves until stop is set or the broker ends."""
    workers = zip(job.commands, job.counts)
    config = "".join(f"[[worker]]\ncommand = {json.dumps(c, ensure_ascii=False)}\ninstances = {n}\n" for c, n in workers)
    p = start_broker(config, job.socket, job.environment())
    gateway: WatchedProcess | None = None
    try:
        if not wait_for_broker(p, job.socket, stop):
            return  # another broker started first
        gateway = job.door()
        ready, look = not job.commands, time.monotonic()
        told: list[Refusal] = []
        while not stop.wait(_LOOK_S):
            if gateway is not None:
                gateway.revive()
            told += job.refusals.take()
            if told and (started := _processes(job.socket)) is not None:  # None: ask again in the next round
                _judge(told, started)
                told = []
            if not ready and time.monotonic() >= look:
                ready, look = _all_attached(job.socket), time.monotonic() + _LOOK_AT_STARTS_S
                if ready:
                    job.refusals.end()
            if ready:
                job.say_ready(False)
            if p.poll() is not None:
                log.warning("the broker ended with status %s, starting it again", p.returncode)
                stop.wait(_LOOK_S)
                return
    finally:
        # The broker refuses new requests, finishes accepted ones and ends the
        # workers. Those in threads here see it go. The gateway drains meanwhile.
        p.terminate()
        if gateway is not None:
            gateway.stop(stop)
        if not ends(lambda: p.poll() is not None, _STOP_S, stop):
            hurry(p)


def _all_attached(socket: str) -> bool:
    """Whether every worker has attached once; raises if one cannot."""
    started = _processes(socket) or []
    for s in started:
        if s["failed_starts"] >= _FAILED_STARTS and not s["attached"]:
            raise errors.WorkerDied(f"{s['name']} ended {s['failed_starts']} times before it was ready ({s['last_end']}); see its "
                "messages above")
    return bool(started) and all(s["attached"] for s in started)


def _judge(told: list[Refusal], started: list[dict[str, Any]]) -> None:
    """Raises the first refusal of a process that has never attached. A process that has attached is started again."""
    attached = {s["name"] for s in started if s["attached"]}
    for refusal in told:
        if refusal.name not in attached:
            raise errors.Invalid(refusal.text)
        log.warning("%s, which has served, is started again: %s", refusal.name, refusal.text)


def _processes(socket: str) -> list[dict[str, Any]] | None:
    """None if there is no answer."""
    told = ask_broker("stats", socket)
    return None if told is None else told.get("processes") or []


# -- another process's broker


def _guest(job: _Job, stop: StopEvent, take_over: bool) -> None:
    """Serves until stop is set, or the broker is gone and take_over is set."""
    env, some = job.environment(), zip(job.commands, job.counts)
    guests = [WatchedProcess(f"worker {i}", command, env, None, job.refusals) for command, n in some for i in range(n)]
    gateway = job.door()
    if gateway is not None:
        guests.append(gateway)
    there, look = True, 0.0
    try:
        while not stop.wait(_LOOK_S):
            for guest in guests:
                guest.revive()
            if all(guest.has_attached() for guest in guests if guest is not gateway):
                job.say_ready(True)
            look += _LOOK_S
            if look < _LOOK_FOR_BROKER_S:
                continue
            look, was = 0.0, there
            there = broker_runs(job.socket)
            if was and not there:
                if take_over:
                    log.warning("the broker at %s is gone: starting one", job.socket)
                    return
                log.warning("the broker at %s is gone: waiting for one", job.socket)
            elif there and not was:
                log.warning("there is a broker at %s again", job.socket)
    finally:
        for guest in guests:
            guest.terminate()
        for guest in guests:
            guest.stop(stop)
