# SPDX-License-Identifier: Apache-2.0
"""Synchronous PPO: a batch of the learner is one unroll of every actor. Two runs with one seed give the same weights, bit for bit.

    python examples/python/ppo.py                     # CartPole-v1, 120 updates
    python examples/python/ppo.py --updates 5 --actors 2
"""

import argparse
import multiprocessing as mp
import sys
import zlib

import gymnasium as gym
import numpy as np
import ringbatch as rb
import ringbatch.torch
import torch
from ringbatch.rl.gymnasium import Actor, unroll_specs
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--updates", type=int, default=120)
parser.add_argument("--actors", type=int, default=4)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()  # worker processes get the same arguments
ENVS, STEPS, DISCOUNT, TRACE, EPOCHS, CLIP = 8, 64, 0.99, 0.95, 10, 0.2
ROWS, SIZE, ACTIONS = args.actors * ENVS, 4, 2
OBSERVATION = {"obs": ("float32", (SIZE,)), "noise": ("float32", (ACTIONS,))}
ANSWER = {"action": ("int64", ()), "logits": ("float32", (ACTIONS,))}


class Noise(gym.Wrapper):
    """Adds the chance of the next action to an observation: the seed of the environment decides it, and no batch."""

    def __init__(self, env):
        super().__init__(env)
        noise = gym.spaces.Box(-np.inf, np.inf, (ACTIONS,), np.float32)
        self.observation_space = gym.spaces.Dict({"obs": env.observation_space, "noise": noise})

    def reset(self, **options):
        obs, info = self.env.reset(**options)
        return self.noisy(obs), info

    def step(self, action):
        obs, *rest = self.env.step(action)
        return self.noisy(obs), *rest

    def noisy(self, obs):
        return {"obs": obs, "noise": self.np_random.gumbel(size=ACTIONS).astype("float32")}


def nets() -> nn.ModuleDict:
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    return nn.ModuleDict({name: nn.Sequential(nn.Linear(SIZE, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, n))
        for name, n in (("policy", ACTIONS), ("value", 1))})  # fmt: skip


@rb.worker("policy", inputs=OBSERVATION, outputs=ANSWER, max_batch_size=ROWS, pad_to=ROWS)  # one shape for every batch
class Policy:
    def setup(self) -> None:
        self.nets = nets()
        ringbatch.torch.follow(self.nets)

    @torch.inference_mode()
    def __call__(self, batch):
        logits = self.nets["policy"](torch.tensor(batch.inputs["obs"]))
        return {"action": (logits + torch.tensor(batch.inputs["noise"])).argmax(1), "logits": logits}  # noise of zeros is greedy


@rb.worker("learn", inputs=unroll_specs(OBSERVATION, ANSWER, STEPS), outputs={"score": ("float32", ()), "weights": ("int64", ())},
    max_batch_size=ROWS, wait_time=60, run_once=True)  # the barrier: a batch leaves when all connected actors are in it, or after a minute
class Learn:
    def setup(self) -> None:
        self.nets, self.scores = nets(), []
        self.optimizer = torch.optim.Adam(self.nets.parameters(), lr=1e-3)
        self.publisher = rb.publisher("policy", self.nets, wait=60)
        self.publisher.publish(self.nets)

    def __call__(self, batch):
        order = batch.inputs["noise"][:, 0, 0].argsort()  # rows are in the order of their arrival: sums would differ in the last bit
        u = {name: torch.tensor(batch.inputs[name][order]) for name in batch.inputs}
        with torch.no_grad():
            values = self.nets["value"](u["obs"])[..., 0]
        errors = u["reward"] + DISCOUNT * ~u["terminated"] * values[:, 1:] - values[:, :-1]
        sums, goes_on = [torch.zeros(batch.rows)], ~(u["terminated"] | u["truncated"])
        for t in reversed(range(STEPS)):
            sums.append(errors[:, t] + DISCOUNT * TRACE * goes_on[:, t] * sums[-1])
        gains, valid = torch.stack(sums[:0:-1], 1), u["valid"]
        before = torch.distributions.Categorical(logits=u["logits"]).log_prob(u["action"])
        scaled = (gains - gains[valid].mean()) / (gains[valid].std() + 1e-8)
        for _ in range(EPOCHS):
            now = torch.distributions.Categorical(logits=self.nets["policy"](u["obs"][:, :-1]))
            ratio = (now.log_prob(u["action"]) - before).exp()
            surrogate = torch.minimum(ratio * scaled, ratio.clamp(1 - CLIP, 1 + CLIP) * scaled)
            missed = self.nets["value"](u["obs"][:, :-1])[..., 0] - (gains + values[:, :-1])
            self.optimizer.zero_grad()
            (0.5 * missed**2 - surrogate - 0.01 * now.entropy())[valid].mean().backward()
            nn.utils.clip_grad_norm_(self.nets.parameters(), 0.5)
            self.optimizer.step()
        self.scores = (self.scores + u["score"][u["terminated"] | u["truncated"]].tolist())[-100:]
        self.publisher.publish(self.nets)
        crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in self.nets.parameters()))
        return {"score": np.full(batch.rows, np.mean(self.scores or [0]), "float32"), "weights": np.full(batch.rows, crc)}


def act(number: int, connected) -> None:
    with rb.connect("policy", wait=300, window=ENVS) as policy, rb.connect("learn", wait=300, window=ENVS) as learn:
        connected.wait(300)  # a batch waits for no actor that is not connected yet
        envs = gym.make_vec("CartPole-v1", ENVS, "sync", wrappers=[Noise])
        for update, unroll in zip(range(args.updates), Actor(envs, policy, STEPS, seed=args.seed + ENVS * number)):
            answer = learn(unroll, split=False)  # the next unroll is of the new version
            if number == 0:
                print(f"update {update + 1:4}  score {answer['score'][0]:6.1f}  weights {answer['weights'][0]:08x}", flush=True)


def main() -> None:
    server = mp.Process(target=rb.serve, args=([Policy, Learn],), kwargs={"processes": [2, 1]}, daemon=True)
    connected = mp.Barrier(args.actors)
    actors = [mp.Process(target=act, args=(i, connected)) for i in range(args.actors)]
    for p in (server, *actors):
        p.start()
    for p in actors:
        p.join()
    server.terminate()
    server.join()
    sys.exit(max(abs(p.exitcode) for p in actors))


if __name__ == "__main__":
    mp.set_start_method("fork")
    main()
