# SPDX-License-Identifier: Apache-2.0
"""One policy for many simulators and a robot: observations with images and a prompt as text, chunks of actions out.

    python examples/robots/robots.py                 # 12 simulators and a robot, which goes first
    python examples/robots/robots.py --batch 1       # one observation at a time, as a policy server without batching
    python examples/robots/robots.py --door          # through door.py, by openpi-client (pip install openpi-client)

The policy is a network with random weights, of PyTorch if it is installed, and on the GPU if there is one. Each simulator is a
process that draws its world from two cameras and moves an arm. The robot is simulated, too: it sleeps while it moves. In the
last part of the run some simulators hang (SIGSTOP).
"""

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
import ringbatch as rb

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--simulators", type=int, default=12)
parser.add_argument("--hang", type=int, default=3, help="simulators that hang in the last part")
parser.add_argument("--seconds", type=float, default=10.0, help="of each part of the run")
parser.add_argument("--batch", type=int, default=4, help="most observations of a batch")
parser.add_argument("--width", type=int, default=1024, help="of the policy's layers")
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--door", action="store_true", help="clients speak openpi's protocol")
parser.add_argument("--json", action="store_true")
args = parser.parse_args()  # worker processes get the same arguments
if not 0 <= args.hang < args.simulators:
    parser.error("--hang must leave a simulator")
if args.door:
    from openpi_client.websocket_client_policy import WebsocketClientPolicy
SIDE, PATCH, CHUNK, ROBOT, SIMULATOR = 64, 8, 10, 0, 1  # pixels; actions of a chunk; levels
COLOURS = {"red": (200, 30, 30), "green": (30, 160, 30), "blue": (40, 40, 200)}
WARMUP, ALL, HUNG, END = range(4)  # the parts of a run

# -- the policy

IMAGE = ("uint8", (SIDE, SIDE, 3))

try:
    import torch

    place = lambda a: torch.from_numpy(a).to("cuda" if torch.cuda.is_available() else "cpu")
    back = lambda x: x.cpu().numpy()
except ModuleNotFoundError:
    place = back = np.asarray


@rb.worker("policy", inputs={"image": IMAGE, "wrist_image": IMAGE, "state": ("float32", (8,)), "prompt": "str[<=128]"},
           outputs={"actions": ("float32", (CHUNK, 7))}, max_batch_size=args.batch, priorities=2, default_priority=SIMULATOR,
           depth=1)  # no batch waits at the worker: the robot's is the next one  # fmt: skip
class Policy:
    def __call__(self, batch):
        return self.act(batch.inputs)

    def setup(self) -> None:
        rng, features = np.random.default_rng(1), 256
        make = lambda a, b, scale=1.0: (scale * a**-0.5) * rng.standard_normal((a, b), "float32")
        self.eye, self.body, self.words = make(PATCH * PATCH * 3, features), make(8, features), make(4096, features)
        self.first, self.last = place(make(4 * features, args.width)), place(make(args.width, CHUNK * 7))
        self.layers = [place(make(args.width, args.width, 0.1)) for _ in range(args.layers)]

    def act(self, inputs) -> np.ndarray:
        read = [np.mean([self.words[zlib.crc32(w.encode()) % 4096] for w in text.split() or [""]], axis=0) for text in inputs["prompt"]]
        x = np.concatenate([self.see(inputs["image"]), self.see(inputs["wrist_image"]), inputs["state"] @ self.body, read], 1, dtype="float32")
        x = place(x) @ self.first
        for _ in range(10):  # as a policy of flow matching takes its steps
            for layer in self.layers:
                x = x + (x @ layer).clip(0, None)
            x = x / (x * x).mean(1)[:, None] ** 0.5
        return back(x @ self.last).reshape(-1, CHUNK, 7)

    def see(self, images: np.ndarray) -> np.ndarray:
        patches = images.reshape(-1, SIDE // PATCH, PATCH, SIDE // PATCH, PATCH, 3).swapaxes(2, 3).reshape(len(images), -1, PATCH * PATCH * 3)
        return np.maximum((patches.astype("float32") / 255) @ self.eye, 0).mean(1)


# -- a world


class World:
    """A table with three blocks and an arm, seen from above and from the wrist."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.blocks = self.rng.uniform(8, SIDE - 8, (3, 2))
        self.at, self.speed = np.full(2, SIDE / 2), np.zeros(2)
        self.prompt = f"move to the {self.rng.choice(list(COLOURS))} block"

    def observe(self) -> dict:
        table = np.full((SIDE, SIDE, 3), 230, "uint8")
        for (y, x), colour in zip(self.blocks.astype(int), COLOURS.values()):
            table[max(0, y - 3) : y + 4, max(0, x - 3) : x + 4] = colour
        rows, columns = np.ogrid[:SIDE, :SIDE]
        table[(rows - self.at[0]) ** 2 + (columns - self.at[1]) ** 2 < 12] = 20
        near = [np.clip(np.arange(SIDE) // 4 + int(c) - SIDE // 8, 0, SIDE - 1) for c in self.at]
        state = np.concatenate([self.at / SIDE, self.speed, self.blocks.ravel()[:4] / SIDE])
        return {"image": table, "wrist_image": table[np.ix_(*near)], "state": state.astype("float32"), "prompt": self.prompt}

    def move(self, actions: np.ndarray) -> None:
        for action in actions:
            for _ in range(20):  # steps of the physics
                self.speed = 0.95 * self.speed + 0.01 * np.clip(action[:2], -1, 1) + self.rng.normal(0, 1e-3, 2)
                self.at = np.clip(self.at + self.speed, 0, SIDE - 1)


# -- the clients


def asker(level: int, ports: list):
    """A function from an observation to actions."""
    if not ports:
        model = rb.connect("policy", wait=60, window=1)
        return lambda seen: model(seen, priority=level, timeout=60)
    policy = WebsocketClientPolicy("127.0.0.1", ports[level])
    return lambda seen: policy.infer({name if name == "prompt" else f"observation/{name}": value for name, value in seen.items()})["actions"]


def client(number: int, ports: list, part, answers, pipe) -> None:
    """A simulator, or as number 0 the robot; sends its latencies by part, and the last observation with its actions."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends main(), and that its clients
    level = SIMULATOR if number else ROBOT
    world, ask, took = World(number), asker(level, ports), {WARMUP: [], ALL: [], HUNG: [], END: []}
    while part.value < END:
        seen, now, began = world.observe(), part.value, time.monotonic()
        actions = ask(seen)
        took[now].append(time.monotonic() - began)
        answers[number] += 1
        if level == ROBOT:
            time.sleep(0.1)  # simulated: a robot moves in real time
        else:
            world.move(actions)
    pipe.send((took, seen, actions))


@contextlib.contextmanager
def door():
    """The ports of door.py, by level; none without --door."""
    if not args.door:
        yield []
        return
    p = subprocess.Popen([sys.executable, Path(__file__).with_name("door.py"), "policy", "0:0", "0:1"], stdout=subprocess.PIPE, text=True)
    try:
        ports = re.findall(r"port (\d+)", p.stdout.readline() + p.stdout.readline())
        if len(ports) < 2:
            raise SystemExit("door.py did not start")
        yield [int(port) for port in ports]
    finally:
        p.terminate()
        p.wait()


def watch(part, number: int, seconds: float, clients: list, answers) -> dict:
    """Lets a part of the run pass, in which these clients get three answers or more."""
    before, began, had = rb.stats()["models"][0], time.monotonic(), answers[: len(clients)]
    part.value = number
    while time.monotonic() < began + seconds or min(np.subtract(answers[: len(clients)], had)) < 3:
        time.sleep(0.05)
        if not all(p.is_alive() for p in clients):
            raise SystemExit("a client ended")
    part.value = WARMUP
    after, took = rb.stats()["models"][0], time.monotonic() - began
    return {"seconds": took, "batches": after["batches"] - before["batches"], "rows": after["rows"] - before["rows"]}


def summary(seen: dict, robot: list, simulators: list) -> dict:
    ms = lambda times: {f"p{p}": round(1e3 * float(np.percentile(times, p)), 1) for p in (50, 95)}
    every = [t for times in simulators for t in times]
    waiting = (sum(every) + sum(robot)) / seen["seconds"]
    return {"chunks_per_s": round((len(every) + len(robot)) / seen["seconds"], 1), "robot_ms": ms(robot), "simulator_ms": ms(every),
        "mean_batch": round(seen["rows"] / seen["batches"], 2), "mean_in_flight": round(waiting, 1),
        "chunks_per_simulator_per_s": round(len(every) / len(simulators) / seen["seconds"], 2)}  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        os.environ["RINGBATCH_SOCKET"] = f"{folder}/b.sock"
        server = mp.Process(target=rb.serve, args=(Policy,), daemon=True)
        server.start()
        stack.callback(lambda: (server.terminate(), server.join()))
        rb.connect("policy", wait=60).close()
        ports, part, count = stack.enter_context(door()), mp.Value("i", WARMUP, lock=False), 1 + args.simulators
        answers, ends = mp.Array("i", count, lock=False), [mp.Pipe() for _ in range(count)]
        clients = [mp.Process(target=client, args=(i, ports, part, answers, ends[i][1]), daemon=True) for i in range(count)]
        for p in clients:
            p.start()
        well, hung = clients[: count - args.hang], clients[count - args.hang :]
        try:
            watch(part, WARMUP, 1.0, clients, answers)
            everyone = watch(part, ALL, args.seconds, clients, answers)
            for p in hung:
                os.kill(p.pid, signal.SIGSTOP)
            time.sleep(0.5)
            some = watch(part, HUNG, args.seconds, well, answers)
        finally:
            for p in hung:
                os.kill(p.pid, signal.SIGCONT)
        part.value = END
        ends = [ours.recv() for ours, _ in ends]
        for p in clients:
            p.join()
    policy, difference = Policy.function(), 0.0
    policy.setup()
    for _, seen, actions in ends:
        difference = max(difference, float(abs(policy.act({k: [v] if k == "prompt" else v[None] for k, v in seen.items()})[0] - actions).max()))
    (robot, *_), *others = ends
    up = [took for took, *_ in others]
    result = {"all": summary(everyone, robot[ALL], [took[ALL] for took in up]),
        f"{args.hang} hung": summary(some, robot[HUNG], [took[HUNG] for took in up[: len(up) - args.hang]]),
        "max_difference": difference}  # fmt: skip
    if args.json:
        print(json.dumps(result))
        return
    for name, r in result.items():
        print(f"{name:14}", *([f"{k} {v}" for k, v in r.items()] if isinstance(r, dict) else [f"{r:.1e}, from one row at a time"]), sep="  ")


if __name__ == "__main__":
    main()
