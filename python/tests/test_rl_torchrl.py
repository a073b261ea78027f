# SPDX-License-Identifier: Apache-2.0
"""The policy for TorchRL, with its collectors."""

from __future__ import annotations

import copy
import functools
import os

import numpy as np
import pytest
from conftest import broker_at, eventually, python, serving
from test_fork import CHILD

import ringbatch as rb

torch = pytest.importorskip("torch")
torchrl = pytest.importorskip("torchrl")
from tensordict import TensorDict  # noqa: E402
from torchrl.collectors import Collector, MultiSyncCollector  # noqa: E402
from torchrl.data import Binary, Composite, Unbounded  # noqa: E402
from torchrl.envs import EnvBase, InitTracker, TransformedEnv  # noqa: E402

from ringbatch.rl.torchrl import RingbatchPolicy  # noqa: E402

OBS, MOVE, H = ("agent", "obs"), ("agent", "move"), ("agent", "h")
INPUT = {"obs": ("float32", (2,))}


@rb.worker("steps", inputs=INPUT, outputs={"move": ("int64", ()), "twice": ("float32", (2,))}, state={"n": ("int64", ())}, live_weights=True)
def steps(batch):
    """The move is the number of the step in its episode."""
    n = batch.state["n"] = batch.state["n"] + 1
    return {"move": n, "twice": 2 * batch.inputs["obs"]}


@rb.worker("counts", inputs=INPUT, outputs={"move": ("int64", ())}, state={"n": ("int64", ())})
def counts(batch):
    batch.state["n"] += 1
    return batch.state["n"]


@rb.worker("double", inputs=INPUT, outputs={"y": ("float32", (2,))}, max_batch_size=8)
def double(batch):
    return 2 * batch.inputs["obs"]


class Episodes(EnvBase):
    """Episodes of 3, 4, 5, … steps in the environments of a batch. The observation is the step, and the length."""

    def __init__(self, *shape: int) -> None:
        super().__init__(batch_size=shape)
        self.length = torch.arange(3, 3 + self.batch_size.numel()).reshape(shape)
        self.step_of = torch.zeros(shape, dtype=torch.long)
        self.observation_spec = Composite(agent=Composite(obs=Unbounded((*shape, 2)), shape=shape), shape=shape)
        self.action_spec = Composite(agent=Composite(move=Unbounded(shape, dtype=torch.long), shape=shape), shape=shape)
        self.reward_spec, self.done_spec = Unbounded((*shape, 1)), Binary(1, (*shape, 1), dtype=torch.bool)

    def _now(self) -> TensorDict:
        obs = torch.stack([self.step_of, self.length], -1).float()
        return TensorDict({OBS: obs, "done": (self.step_of == self.length)[..., None]}, self.batch_size)

    def _reset(self, tensordict):
        which = None if tensordict is None else tensordict.get("_reset", None)
        again = torch.ones_like(self.step_of, dtype=torch.bool) if which is None else which.reshape(self.step_of.shape)
        self.step_of = torch.where(again, 0, self.step_of)
        return self._now()

    def _step(self, tensordict):
        assert (tensordict[MOVE] == self.step_of + 1).all()  # the state was reset with the environment, and only then
        self.step_of = self.step_of + 1
        return self._now().set("reward", torch.ones(*self.batch_size, 1))

    def _set_seed(self, seed):
        pass


def tracked(*shape: int) -> TransformedEnv:
    return TransformedEnv(Episodes(*shape), InitTracker())


@pytest.fixture
def served(at):
    with broker_at(at), serving(steps, at), serving(double, at), rb.publisher("steps", {"w": np.zeros(1)}, socket=at, wait=60) as publisher:
        publisher.publish({"w": np.ones(1)})
        yield at, publisher


def policy_at(socket: str) -> RingbatchPolicy:
    more = {"version_key": ("agent", "version"), "state_keys": {"n": H}}
    return RingbatchPolicy("steps", [OBS], [MOVE, "twice"], **more, socket=socket, wait=60)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_a_collector_gets_answers_state_and_version_of_every_environment(served, shape):
    socket, publisher = served
    policy = policy_at(socket)
    environments = int(np.prod(shape))
    collector = Collector(tracked(*shape), policy, frames_per_batch=20 * environments, total_frames=40 * environments)
    for version, batch in enumerate(collector, 1):
        assert batch.shape == (*shape, 20) and batch["next", "done"].any()
        step = batch[OBS][..., 0]
        assert torch.equal(batch[MOVE], step.long() + 1)
        assert torch.equal(batch[H], step.long())
        assert torch.equal(batch["twice"], 2 * batch[OBS])
        assert (batch["agent", "version"] == version).all()
        assert publisher.publish({"w": np.ones(1)}) == version + 1
    collector.shutdown()
    policy.close()


def test_each_process_of_a_collector_connects_itself(served):
    socket, _ = served
    policy = policy_at(socket)
    make = functools.partial(tracked, 2)
    policy(make().reset())  # is connected here, too
    collector = MultiSyncCollector([make], policy, frames_per_batch=20, total_frames=40, cat_results="stack")
    assert [batch.numel() for batch in collector] == [20, 20]
    collector.shutdown()
    policy.close()


def test_a_forked_child_connects_again_and_begins_all_episodes(at):
    code = """
    from test_rl_torchrl import *
    policy = RingbatchPolicy("counts", [OBS], [MOVE], wait=60)
    envs = tracked(2)
    running = envs.step(policy(envs.reset()))["next"]
    def child():
        try:
            policy(running.clone())
            return False
        except rb.StateLost as e:
            assert "reset all environments" in str(e)
        return all((policy(envs.reset())[MOVE] == 1).all() for _ in range(2)) and (policy(running.clone())[MOVE] == 2).all()
    assert forked(child) and forked(child)
    assert (policy(running)[MOVE] == 2).all()
    """
    with broker_at(at), serving(counts, at):
        folders = filter(None, [os.path.dirname(__file__), os.environ.get("PYTHONPATH")])
        python(CHILD + code, socket=at, PYTHONPATH=os.pathsep.join(folders))


def test_after_a_restart_of_the_broker_a_new_collector_begins_all_episodes(at):
    with broker_at(at) as first, serving(counts, at):
        policy = RingbatchPolicy("counts", [OBS], [MOVE], state_keys={"n": H}, socket=at, wait=60)
        batches = iter(Collector(tracked(3), policy, frames_per_batch=6, total_frames=60))
        next(batches)
        first.kill()
        first.wait()
        with broker_at(at):
            eventually(lambda: rb.stats(at).get("models"))
            with rb.connect("counts", socket=at, wait=60) as other:
                other(np.zeros(2, "float32"))
            with pytest.raises(rb.StateLost):
                next(batches)
            [batch] = Collector(tracked(3), policy, frames_per_batch=6, total_frames=6)
            assert batch[H].tolist() == [[0, 1]] * 3 == batch[OBS][..., 0].tolist()
        policy.close()


def test_a_policy_without_state(served):
    policy = RingbatchPolicy("double", [OBS], ["y"], socket=served[0], wait=60)
    for shape in [(), (3,), (2, 2)]:
        x = torch.randn(*shape, 2, requires_grad=True)
        td = policy(TensorDict({OBS: x}, shape))
        assert torch.equal(td["y"], 2 * x) and policy.out_keys == ["y"]
    copied = copy.deepcopy(policy)
    policy.close()
    assert torch.equal(copied(TensorDict({OBS: torch.ones(100, 2)}, [100]))["y"], torch.full((100, 2), 2.0))
    copied.close()


def test_errors_name_the_missing_key(served):
    with pytest.raises(KeyError, match="InitTracker"):
        policy_at(served[0])(TensorDict({OBS: torch.ones(2)}))
    with pytest.raises(rb.Invalid, match="in_keys"):
        RingbatchPolicy("double", [OBS], ["y", "z"], socket=served[0])(TensorDict({OBS: torch.ones(2)}))
    versioned = RingbatchPolicy("double", [OBS], ["y"], version_key="version", socket=served[0])
    with pytest.raises(rb.Error, match="rows"):  # several requests could have several versions
        versioned(TensorDict({OBS: torch.ones(9, 2)}, [9]))
