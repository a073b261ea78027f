# SPDX-License-Identifier: Apache-2.0
"""Actors that share one policy: TorchRL's inference server and ringbatch, with the same module, threads and observations.

    python3 bench/peers/actors.py [--clients 1 8 16 64] [--rounds 3] [--seconds 1.5] [--trials 10] [--device cpu] [--json FILE]

The set-up is that of TorchRL's bench_inference_server.py: processes with one request in
flight, observations of 4 KiB, an MLP 1024-128-128-4. On two cores the servers have one core
and the actors the other; on others nothing is pinned. Every answer is checked. The programs take turns.

Then: actors that are killed while they wait or write, new weights, and a kill every 0.2 s.
Without TorchRL in this interpreter the program installs it under build/peers first.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import mmap
import multiprocessing as mp
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import processes
import run
from peers import HERE, Peer

REQUIREMENTS = ["torch==2.15.0", "torchrl==0.14.1", "numpy"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    ARGUMENTS = arguments()
    if not importlib.util.find_spec("torchrl"):
        run.install(peer := Peer("torchrl", "TorchRL", REQUIREMENTS, [], "", lambda r: [], local=True), "+changes")
        python = str(run.venv_of(peer) / "bin" / "python")
        os.execv(python, [python, *sys.argv])
os.environ.update(processes.ONE_THREAD)  # before torch is loaded

import load  # noqa: E402
import numpy as np  # noqa: E402
import ringbatch as rb  # noqa: E402
import ringbatch.torch  # noqa: E402
import torch  # noqa: E402
from ringbatch.rl.torchrl import RingbatchPolicy  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from tensordict.nn import TensorDictModule  # noqa: E402
from torchrl.modules import MLP, inference_server  # noqa: E402

WIDTH, ACTIONS, STEADY, WINDOW_S, UPDATES, PATIENCE_S = 1024, 4, 8, 0.2, 20, 5.0
CORES = sorted(os.sched_getaffinity(0))
SERVERS, ACTORS = ({CORES[0]}, {CORES[1]}) if len(CORES) == 2 else (CORES, CORES)
FORK = mp.get_context("fork")  # starts quickly, since torch is loaded


def net():
    torch.manual_seed(0)
    return MLP(in_features=WIDTH, out_features=ACTIONS, num_cells=[128, 128])


def policy():
    return TensorDictModule(net(), in_keys=["observation"], out_keys=["action"])


class Theirs:
    """An actor of TorchRL's server. It begins a request with submit, and ends it with result."""

    def __init__(self, handle, x) -> None:
        self.handle, self.observation = handle, TensorDict({"observation": torch.from_numpy(x)})

    def submit(self):
        return self.handle.submit(self.observation)

    def result(self, future) -> float:
        self.answer = future.result()
        return self.answer["action"][0].item()

    def call(self) -> float:
        return self.result(self.submit())

    def version(self) -> int:
        return int(self.answer["policy_version"])


class Ours:
    """The same with NumPy arrays."""

    def __init__(self, model: str, x) -> None:
        self.model, self.x = rb.connect(model, window=1, wait=60), x

    def submit(self):
        request = self.model.request()
        request.inputs["observation"][...] = self.x
        request.commit()
        return request

    def result(self, request) -> None:
        request.wait()
        request.release()

    def call(self) -> float:
        answer, self.answered = self.model(self.x, version=True)
        return answer.item(0)

    def version(self) -> int:
        return self.answered


class OursTensorDict(Theirs):
    """A tensordict in and out, with the version, as TorchRL's clients have them."""

    def __init__(self, model: str, x) -> None:
        super().__init__(RingbatchPolicy(model, ["observation"], ["action"], version_key="policy_version", wait=60), x)

    def call(self) -> float:
        self.answer = self.handle(self.observation)
        return self.answer["action"][0].item()


@dataclass
class Started:
    """A server: its process, its actors by number, and a function that publishes weights and returns their version."""

    pid: int
    actor: Callable[[int, object], object]
    publish: Callable[[], int]


@contextlib.contextmanager
def running_on(cores):
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, ACTORS)


def theirs(transport: str, device: str):
    @contextlib.contextmanager
    def start(actors: int):
        request = TensorDict({"observation": torch.zeros(WIDTH)})
        answer = TensorDict({"action": torch.zeros(ACTIONS), "policy_version": torch.zeros((), dtype=torch.long)})
        lean = {"copy_result": False} if transport == "ProcessSlot" else {}  # SharedMemory may write over such an answer
        context = FORK if device == "cpu" else mp.get_context("spawn")  # CUDA does not survive a fork
        made = getattr(inference_server, f"{transport}Transport")(request, answer, num_slots=actors, ctx=context, **lean)
        server = inference_server.ProcessInferenceServer(policy_factory=policy, transport=made, request_spec=request, max_batch_size=actors,
            static_batch_size=actors if "cuda" in device else None, policy_device=device, output_device="cpu", collect_stats=False,
            mp_context=context)  # fmt: skip
        handles, weights = server.clients(actors), TensorDict.from_module(policy()).data

        def publish() -> int:
            server.update_model_weights(weights)
            return server.policy_version

        with running_on(SERVERS):
            server.start()
        pid = server.health()["pid"]
        try:
            yield Started(pid, lambda i, x: Theirs(handles[i], x), publish)
        finally:
            os.kill(pid, signal.SIGKILL)  # it may wait for a dead client
            server.shutdown(timeout=1)

    return start


def ours(model: str, pid: int, publisher, kind=Ours):
    weights = net()

    @contextlib.contextmanager
    def start(actors: int):
        yield Started(pid, lambda i, x: kind(model, x), lambda: publisher.publish(weights))

    return start


def worker(device: str) -> None:
    torch.set_num_threads(1)

    @rb.worker("policy", inputs={"observation": ("float32", (WIDTH,))}, outputs={"action": ("float32", (ACTIONS,))}, max_batch_size=64)
    class Policy:
        def setup(self):
            self.net = net().to(device)
            ringbatch.torch.follow(self.net)

        def __call__(self, batch):
            with torch.no_grad():
                return self.net(torch.tensor(batch.inputs["observation"], device=device)).cpu().numpy()

    Policy.run(wait=60)


@contextlib.contextmanager
def programs(device: str, folder: str):
    """All servers, by name. Those of ringbatch run all the time and wait without using the core."""
    os.environ.update(RINGBATCH_SOCKET=f"{folder}/b.sock", PYTHONPATH=os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    commands = {
        "broker": [rb.binary_path(), "broker", "--log-level", "error"],
        "policy": [sys.executable, __file__, "--worker", "--device", device],
        "policy_torch": [sys.executable, "-m", "ringbatch.torch", "actors:net", "--name", "policy_torch", "--input",
            f"observation:f32[{WIDTH}]", "--device", device, "--live-weights", "--max-batch-size=64"],
    }  # fmt: skip
    with running_on(SERVERS):
        pids = {name: processes.start(command, dict(os.environ), sys.stderr, sys.stderr).pid for name, command in commands.items()}
    with contextlib.ExitStack() as stack:
        published = {}
        for name in ("policy", "policy_torch"):
            published[name] = stack.enter_context(rb.publisher(name, net(), wait=60))
            published[name].publish(net())
        for name in published:
            rb.connect(name, wait=run.START_S).close()
        processes.same_priority()
        yield {
            "TorchRL, ProcessSlot": theirs("ProcessSlot", device),
            "TorchRL, SharedMemory": theirs("SharedMemory", device),
            "ringbatch, `@rb.worker`": ours("policy", pids["policy"], published["policy"]),
            "ringbatch, `ringbatch torch`": ours("policy_torch", pids["policy_torch"], published["policy_torch"]),
            "ringbatch, tensordicts": ours("policy", pids["policy"], published["policy"], OursTensorDict),
        }


# -- requests per second


def rate(start, actors: int, seconds: float) -> dict:
    local = net()

    def make(i: int, x):
        actor, right = started.actor(i, x), float(x.sum(dtype="float64"))
        want = local(torch.from_numpy(x))[0].item()
        return lambda: right if abs(actor.call() - want) < 1e-3 else -1.0

    with start(actors) as started:
        return load.measure(make, 4 * WIDTH, actors, seconds)


# -- actors beside others


def shared(*shape: int):
    memory = mmap.mmap(-1, 8 * int(np.prod(shape)))  # zero, and children have it, too
    return np.frombuffer(memory).reshape(shape)


def act(started: Started, i: int, counts, times=None, gaps=None, seen=None, before: int = 0) -> None:
    """Counts the answers of an actor. Of weights also the longest gap in each window, and when each version was seen first."""
    actor = started.actor(i, load.payload(i, 4 * WIDTH))
    last = time.monotonic()
    while True:
        actor.call()
        counts[i] += 1
        if times is not None:
            now, version = time.monotonic(), actor.version() - before
            window = int((now - times[0]) / WINDOW_S) if times[0] else -1
            if 0 <= window < gaps.shape[1]:
                gaps[i, window] = max(gaps[i, window], now - last)
            if 0 < version < seen.shape[1] and not seen[i, version]:
                seen[i, version] = now
            last = now


@contextlib.contextmanager
def acting(target, numbers, *arguments):
    """Processes of actors, which are killed at the end."""
    actors = [FORK.Process(target=target, args=(arguments[0], i, *arguments[1:]), daemon=True) for i in numbers]
    try:
        for p in actors:
            p.start()
        yield actors
    finally:
        for p in actors:
            p.kill()
            p.join()


def until(condition, patience: float = 60.0) -> bool:
    end = time.monotonic() + patience
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def state_of(p) -> str:
    return Path(f"/proc/{p.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def all_answered(counts, more: int = 5, patience: float = 60.0) -> bool:
    want = counts[:STEADY] + more
    return until(lambda: (counts[:STEADY] >= want).all(), patience)


def waits(started: Started, i: int, phase) -> None:
    actor = started.actor(i, load.payload(i, 4 * WIDTH))
    while True:
        future = actor.submit()
        phase[0] = 1
        actor.result(future)
        phase[0] = 0


def kill_while_it_waits(victim, server: int, phase) -> None:
    """Meanwhile the server stands still, so that the actor surely waits when it is killed."""
    killed = False
    while not killed:
        os.kill(server, signal.SIGSTOP)
        if until(lambda: phase[0] and state_of(victim) == "S", 0.2):  # if not, the server was stopped with a lock
            victim.kill()
            victim.join()
            killed = True
        os.kill(server, signal.SIGCONT)


def writes(started: Started, i: int, _: object) -> None:
    """Dies by a timer in the middle of a submit."""
    actor, took = started.actor(i, load.payload(i, 4 * WIDTH)), []
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for n in itertools.count():
        if n > 20:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, min(took)))
        begin = time.monotonic()
        future = actor.submit()
        signal.setitimer(signal.ITIMER_REAL, 0)
        took.append(time.monotonic() - begin)
        actor.result(future)


def goes_on(started: Started, target) -> bool:
    """Kills an actor, and says whether all others get answers after it."""
    counts, phase = shared(STEADY), shared(1)
    with acting(act, range(STEADY), started, counts):
        if not all_answered(counts):
            raise SystemExit("an actor got no answer before the first kill")
        with acting(target, [STEADY], started, phase) as [victim]:
            if target is waits:
                kill_while_it_waits(victim, started.pid, phase)
            victim.join(60)
        return all_answered(counts, patience=PATIENCE_S)


def trials(start, target, n: int) -> int:
    """In how many trials the server goes on; TorchRL's is started for each trial."""
    found = 0
    for _ in range(n):
        with start(STEADY + 1) as started:
            found += goes_on(started, target)
    return found


def weights(start) -> dict:
    """Windows with and without an update take turns."""
    times, gaps, seen, counts = shared(1), shared(STEADY, 2 * UPDATES + 1), shared(STEADY, UPDATES + 1), shared(STEADY)
    with start(STEADY) as started:
        before, begun = started.publish(), []
        with acting(act, range(STEADY), started, counts, times, gaps, seen, before):
            all_answered(counts, 100)
            times[0] = time.monotonic()
            for k in range(UPDATES):
                time.sleep(max(0, times[0] + (2 * k + 1.1) * WINDOW_S - time.monotonic()))
                begun.append(time.monotonic())
                started.publish()
            until(lambda: seen[:, UPDATES].all())
    at_least = np.minimum.accumulate(np.where(seen, seen, np.inf)[:, ::-1], axis=1)[:, ::-1]  # an actor may skip a version
    everywhere = [max(at_least[:, k]) - begin for k, begin in enumerate(begun, 1)]
    longest = 1e3 * gaps.max(axis=0)[: 2 * UPDATES]
    return {"everywhere_ms": 1e3 * statistics.median(everywhere), "gap_ms": statistics.median(longest[1::2]),
        "gap_without_ms": statistics.median(longest[::2])}  # fmt: skip


def stopped(started: Started, i: int, counts) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # until it is its turn
    act(started, i, counts)


def kills(start, seconds: float) -> dict:
    """The answers of some actors beside another one, and beside others of which one is killed, and the next begins, every 0.2 s."""
    n = int(seconds / 0.2)
    counts = shared(STEADY + n + 1)
    with (start(STEADY + n + 1) as started, acting(act, range(STEADY), started, counts),
            acting(stopped, range(STEADY, STEADY + n + 1), started, counts) as others):  # fmt: skip
        until(lambda: all(state_of(p) == "T" for p in others))
        os.kill(others[0].pid, signal.SIGCONT)
        until(lambda: counts[STEADY])
        calm = answered(counts, lambda: time.sleep(seconds))

        def kill() -> None:
            for one, following in itertools.pairwise(others):
                one.kill()
                os.kill(following.pid, signal.SIGCONT)
                time.sleep(0.2)

        share = answered(counts, kill) / calm
        return {"share": share, "goes_on": all_answered(counts, patience=PATIENCE_S), "kills": n}


def middle(rounds: list[dict]) -> dict:
    """The round with the median share; of two the worse one."""
    return sorted(rounds, key=lambda r: r["share"])[(len(rounds) - 1) // 2]


def answered(counts, during) -> float:
    """Answers per second of the steady actors."""
    before, begin = counts[:STEADY].sum(), time.monotonic()
    during()
    return (counts[:STEADY].sum() - before) / (time.monotonic() - begin)


def main(a: argparse.Namespace) -> None:
    if a.worker:
        return worker(a.device)
    torch.set_num_threads(1)
    processes.adopt()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="rb") as folder, contextlib.ExitStack() as stack:
        stack.callback(processes.end_all)
        load_before = os.getloadavg()[0]
        found = measured(a, stack.enter_context(programs(a.device, folder)))
    if a.json:
        versions = {p: importlib.metadata.version(p) for p in ("torch", "torchrl", "tensordict")}
        about = {"versions": versions, "machine": run.machine(), "load_before": load_before, "device": a.device}
        Path(a.json).write_text(json.dumps({**about, **found}, indent=1))


def measured(a: argparse.Namespace, started: dict) -> dict:
    def say(name: str, what: str, figures: object) -> None:
        print(f"{name:<30} {what}: {json.dumps(figures, default=float)}", flush=True)

    rates: dict[str, dict[str, list[dict]]] = {name: {str(n): [] for n in a.clients} for name in started}
    for _, n, (name, start) in itertools.product(range(a.rounds), a.clients, started.items()):
        rates[name][str(n)].append(figures := rate(start, n, a.seconds))
        say(name, f"{n} actors", figures)
    found: dict = {"rates": rates, "faults": {}, "weights": {}, "kills": {}}
    for name, start in list(started.items())[:4]:
        found["weights"][name] = weights(start)
        say(name, "weights", found["weights"][name])
        found["faults"][name] = {"trials": a.trials, **{t.__name__: trials(start, t, a.trials) for t in (waits, writes)}}
        say(name, "goes on after a kill", found["faults"][name])
        found["kills"][name] = middle([kills(start, 2 * a.seconds) for _ in range(a.rounds)])
        say(name, "a kill every 0.2 s", found["kills"][name])
    return found


if __name__ == "__main__":
    main(ARGUMENTS)
