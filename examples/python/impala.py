# SPDX-License-Identifier: Apache-2.0
"""IMPALA: actors ask the model "policy", and send unrolls as requests to the model "learn", whose worker trains and publishes.

    python examples/python/impala.py                          # CartPole-v1, until the mean of 100 episodes is 475
    python examples/python/impala.py --env catch:Catch-v0     # images and a conv net, until it is 0.9
    python examples/python/impala.py --kill 5                 # SIGKILL to an actor or a worker of the policy every 5 seconds
"""

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import random
import signal
import sys
import time

import gymnasium as gym
import ringbatch as rb
import ringbatch.torch
import torch
from ringbatch.rl.gymnasium import Actor, unroll_specs
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--env", default="CartPole-v1", help="a name that gymnasium.make takes; Box observations and Discrete actions")
parser.add_argument("--target", type=float, help="the mean of 100 episodes to end with; default: the environment's own threshold")
parser.add_argument("--kill", type=float, metavar="SECONDS", help="kill an actor or a worker of the policy so often")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--curve", default="impala.json", metavar="FILE")
args = parser.parse_args()  # worker processes get the same arguments
ACTORS, ENVS, STEPS, DISCOUNT, ENTROPY = 4, 16, 20, 0.99, 0.01
one = gym.make(args.env)
if not isinstance(one.observation_space, gym.spaces.Box) or not isinstance(one.action_space, gym.spaces.Discrete):
    parser.error(f"{args.env} has {one.observation_space} and {one.action_space}: want Box observations and Discrete actions")
goals = [x for x in (args.target, one.spec.reward_threshold) if x is not None] or parser.error(f"{args.env} needs a --target")
SHAPE, ACTIONS, TARGET = one.observation_space.shape, int(one.action_space.n), goals[0]
BRIGHTEST, MOST = 255 if len(SHAPE) == 3 else 1, max(1, goals[-1] / 10)  # the net sees pixels / BRIGHTEST, and rewards / MOST
OBSERVATION, ANSWER = {"obs": (one.observation_space.dtype.name, SHAPE)}, {"action": ("int64", ()), "logits": ("float32", (ACTIONS,))}


def nets() -> nn.ModuleDict:
    made = nn.ModuleDict()
    for name, outputs in ("policy", ACTIONS), ("value", 1):
        eyes = [nn.LazyConv2d(16, 4, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten()] if len(SHAPE) == 3 else []
        made[name] = nn.Sequential(*eyes, nn.LazyLinear(64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
        made[name](torch.zeros(1, *SHAPE))  # lazy layers take their sizes
    return made


@rb.worker("policy", inputs=OBSERVATION, outputs=ANSWER, max_batch_size=ACTORS * ENVS)
class Policy:
    def setup(self) -> None:
        self.nets = nets()
        ringbatch.torch.follow(self.nets)  # each version of the learner is copied into them

    @torch.inference_mode()
    def __call__(self, batch):
        logits = self.nets["policy"](torch.tensor(batch.inputs["obs"]) / BRIGHTEST)  # one version for the whole batch
        return {"action": torch.multinomial(logits.softmax(1), 1)[:, 0], "logits": logits}


@rb.worker("learn", inputs=unroll_specs(OBSERVATION, ANSWER, STEPS), outputs={"reached": ("bool", ())}, max_batch_size=ACTORS * ENVS,
    run_once=True)  # a batch that fails after the step is not learned again
class Learn:
    def setup(self) -> None:
        torch.manual_seed(args.seed)
        self.nets = nets()
        self.optimizer = torch.optim.Adam(self.nets.parameters(), lr=5e-4)
        self.publisher = rb.publisher("policy", self.nets, wait=60)
        self.publisher.publish(self.nets)
        self.begun, self.steps, self.scores, self.curve = time.time(), 0, [], []

    def __call__(self, batch):
        u = {name: torch.tensor(batch.inputs[name]) for name in batch.inputs}  # (unrolls, STEPS, ...)
        obs = u["obs"].flatten(0, 1) / BRIGHTEST
        logits, values = (self.nets[name](obs).unflatten(0, (batch.rows, STEPS + 1)) for name in ("policy", "value"))
        now, then = (torch.distributions.Categorical(logits=x) for x in (logits[:, :-1], u["logits"]))
        chosen, values = now.log_prob(u["action"]), values[..., 0]
        targets, advantages = vtrace(u, (chosen - then.log_prob(u["action"])).detach().exp(), values.detach())
        loss = 0.5 * (targets - values[:, :-1]) ** 2 - advantages * chosen - ENTROPY * now.entropy()
        self.optimizer.zero_grad()
        loss[u["valid"]].mean().backward()
        nn.utils.clip_grad_norm_(self.nets.parameters(), 1.0)
        self.optimizer.step()
        return torch.full((batch.rows,), self.report(u, self.publisher.publish(self.nets)))

    def report(self, u: dict[str, torch.Tensor], version: int) -> bool:
        self.steps += int(u["valid"].sum())
        self.scores = (self.scores + u["score"][u["terminated"] | u["truncated"]].tolist())[-100:]
        score, seconds = sum(self.scores) / max(1, len(self.scores)), round(time.time() - self.begun, 1)
        reached = len(self.scores) == 100 and score >= TARGET
        if reached or not self.curve or seconds > self.curve[-1]["seconds"] + 2:
            self.curve.append({"seconds": seconds, "steps": self.steps, "version": version, "score": score})
            print(f"{seconds:6.1f} s  {self.steps:9,} steps  version {version:6}  score {score:.2f}", flush=True)
            with open(args.curve, "w") as f:
                json.dump(self.curve, f)
        return reached


def vtrace(u: dict[str, torch.Tensor], ratios: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets of the values, and advantages: Espeholt et al., 2018."""
    ratios, discounts, rewards = ratios.clamp(max=1) * u["valid"], DISCOUNT * ~u["terminated"], u["reward"] / MOST
    errors, sums = ratios * (rewards + discounts * values[:, 1:] - values[:, :-1]), [torch.zeros(len(values))]
    for t in reversed(range(STEPS)):
        sums.append(errors[:, t] + discounts[:, t] * ratios[:, t] * sums[-1])
    targets = values + torch.stack(sums[::-1], 1)
    return targets[:, :-1], ratios * (rewards + discounts * targets[:, 1:] - values[:, :-1])


def act(number: int) -> None:
    policy, learn = (rb.connect(name, wait=120, window=2 * ENVS, retry=True) for name in ("policy", "learn"))
    sent = None
    for unroll in Actor(gym.make_vec(args.env, ENVS), policy, STEPS, seed=args.seed + ENVS * number):
        if sent and sent.result().any():  # two unrolls are under way at most
            return
        sent = learn.submit(**unroll)


def main() -> None:
    mp.set_start_method("fork")
    for s in (signal.SIGINT, signal.SIGTERM):
        signal.signal(s, lambda *_: sys.exit(130))  # of actors, too
    server = mp.Process(target=rb.serve, args=([Policy, Learn],), kwargs={"processes": [2, 1]}, daemon=True)
    server.start()
    actors, chance = {}, random.Random(args.seed)
    try:
        while 0 not in (ends := {a.exitcode for a in actors.values()}):
            if 1 in ends or not server.is_alive():
                sys.exit("the server or an actor has failed: see above")
            for i in range(ACTORS):
                if i not in actors or actors[i].exitcode:  # it was killed
                    actors[i] = mp.Process(target=act, args=(i,))
                    actors[i].start()
            time.sleep(args.kill or 1)
            if args.kill:
                with contextlib.suppress(rb.NoBroker, ProcessLookupError):  # not there yet, or no more
                    workers = [w["pid"] for m in rb.stats(timeout=60)["models"] if m["name"] == "policy" for w in m["workers"]]
                    victim = chance.choice([*workers, *(a.pid for a in actors.values() if a.is_alive())])
                    print("SIGKILL to", "a worker" if victim in workers else "an actor", flush=True)
                    os.kill(victim, signal.SIGKILL)
    finally:
        while children := mp.active_children():
            for p in children:
                p.terminate()  # the second time the server waits for nothing
                p.join(2)


if __name__ == "__main__":
    main()
