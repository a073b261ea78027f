# SPDX-License-Identifier: Apache-2.0
"""Adapters for reinforcement learning, with the real packages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from conftest import REPOSITORY, broker_at, eventually, python, serving
from test_fork import CHILD

import ringbatch as rb

EXAMPLES = REPOSITORY / "examples/python"
example = pytest.mark.skipif(not EXAMPLES.exists(), reason="no examples here")


def test_missing_packages_are_named():
    said = python("""
        import importlib
        for module, missing in ("gymnasium", "gymnasium.vector"), ("torchrl", "torch"), ("openspiel", "open_spiel"):
            sys.modules[missing] = None
            try:
                importlib.import_module(f"ringbatch.rl.{module}")
            except ImportError as e:
                print(e)
    """)
    assert [line.partition("pip install ")[2].split(" (")[0] for line in said.splitlines()] == ["'gymnasium>=1.1'", "torchrl", "open_spiel"]


N, STEPS = 3, 4
OBSERVATION = {"episode": ("int64", ()), "age": ("float32", (1,))}
ANSWER = {"action": ("int64", ()), "count": ("float32", ())}
COUNT = {"count_before": ("float32", ())}


def policy(live_weights: bool) -> rb.Worker:
    """Its answer is the number of steps since its state was zero."""

    @rb.worker("policy", inputs=OBSERVATION, outputs=ANSWER, state=COUNT, live_weights=live_weights)
    def run(batch):
        count = batch.state["count_before"]
        batch.state["count_before"] = count + 1
        return {"action": np.ones(batch.rows, "int64"), "count": count}

    return run


def episodes(mode):
    """Environments that know the episode and its age. Lives differ: 3 steps, which end in a terminal state, or 5, whose time is up."""
    gym = pytest.importorskip("gymnasium")

    class Episodes(gym.Env):
        observation_space = gym.spaces.Dict(
            {"episode": gym.spaces.Box(0, 99, (), np.int64), "age": gym.spaces.Box(0, 99, (1,), np.float32)}
        )
        action_space = gym.spaces.Discrete(2)

        def __init__(self, life: int) -> None:
            self.life, self.episode = life, -1

        def look(self):
            return {"episode": np.int64(self.episode), "age": np.array([self.age], "float32")}

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.episode, self.age = self.episode + 1, 0
            return self.look(), {}

        def step(self, action):
            assert action == 1 and self.age < self.life
            self.age += 1
            over = self.age == self.life
            return self.look(), float(self.age), over and self.life == 3, over and self.life == 5, {}

    make = [lambda life=life: Episodes(life) for life in (3, 5, 3)]
    return gym.vector.SyncVectorEnv(make, autoreset_mode=mode, copy=False)  # each step writes into the same arrays


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_an_unroll_keeps_state_and_episodes_in_step(at, mode):
    pytest.importorskip("gymnasium")
    from gymnasium.vector import AutoresetMode

    from ringbatch.rl.gymnasium import Actor, unroll_specs

    with broker_at(at), serving(policy(True), at), rb.publisher("policy", {"w": np.zeros(1)}, socket=at, wait=60) as publisher:
        publisher.publish({"w": np.zeros(1)})
        with rb.connect("policy", socket=at, wait=60) as model:
            with Actor(episodes(AutoresetMode(mode)), model, STEPS, seed=1) as actor:
                unrolls = [actor.unroll()]
                version = publisher.publish({"w": np.ones(1)})
                unrolls += [u for _, u in zip(range(7), actor)]
                with pytest.raises(rb.Expired):  # a step that fails leaves the actor where it was
                    actor._sequence.step(**actor._observed, timeout=1e-9)
                with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
                    patch.setattr(actor.envs, "step", lambda _: 1 / 0)  # after the policy's answer
                    actor.unroll()
                unrolls.append(actor.unroll())
    specs = unroll_specs(OBSERVATION, ANSWER, STEPS, COUNT)
    for u in unrolls:
        assert {name: a.shape for name, a in u.items()} == {name: (N, *shape) for name, (_, shape) in specs.items()}
    for before, after in zip(unrolls, unrolls[1:]):  # no step is lost in between
        for name in OBSERVATION:
            np.testing.assert_array_equal(before[name][:, -1], after[name][:, 0])
    assert (unrolls[0]["version"] == 1).all() and (unrolls[1]["version"] == version).all()
    first = {name: np.concatenate([u[name][:, :1] for u in unrolls], axis=1) for name in ("fresh", "age")}
    before = np.stack([u["count_before"] for u in unrolls], axis=1)
    np.testing.assert_array_equal(before, np.where(first["fresh"], 0, first["age"][..., 0]))

    u = {name: np.concatenate([u[name][:, :STEPS] for u in unrolls], axis=1) for name in specs if name not in COUNT}
    age, done = u["age"][..., 0], u["terminated"] | u["truncated"]
    np.testing.assert_array_equal(u["count"], age)  # the state is as old as the episode
    np.testing.assert_array_equal(u["fresh"], age == 0)
    life = np.array([[3], [5], [3]])
    np.testing.assert_array_equal(u["valid"], age < life)
    if mode == "NextStep":
        assert (age == life).any()
    else:
        assert u["valid"].all()
    np.testing.assert_array_equal(done, age == life - 1)
    np.testing.assert_array_equal(u["truncated"], done & (life == 5))
    np.testing.assert_array_equal(u["reward"], np.where(u["valid"], age + 1, 0))
    np.testing.assert_array_equal(u["score"][u["valid"]], ((age + 1) * (age + 2) / 2)[u["valid"]])
    assert (np.diff(u["episode"], axis=1)[u["fresh"][:, 1:]] == 1).all()


def test_after_a_restart_of_the_broker_a_reset_begins_all_episodes(at):
    gym = pytest.importorskip("gymnasium")
    from ringbatch.rl.gymnasium import Actor

    with broker_at(at) as first, serving(policy(False), at), rb.connect("policy", socket=at, wait=60) as model:
        with Actor(episodes(gym.vector.AutoresetMode.NEXT_STEP), model, 2) as actor:
            assert actor.unroll()["count"][:, -1].tolist() == [1] * N
            first.kill()
            first.wait()
            with broker_at(at):
                eventually(lambda: rb.stats(at).get("models"))
                assert model(episode=0, age=np.zeros(1, "float32"), timeout=60)["count"] == 0
                with pytest.raises(rb.StateLost):
                    actor.unroll()
                actor.reset()
                u = actor.unroll()
                assert u["count"].tolist() == [[0, 1]] * N == u["age"][:, :-1, 0].tolist() and u["fresh"][:, 0].all()


def test_a_forked_child_resets_its_actor(at):
    pytest.importorskip("gymnasium")
    code = """
    import gymnasium as gym
    from test_rl import *
    from ringbatch.rl.gymnasium import Actor
    with rb.connect("policy", wait=60) as model:
        actor = Actor(episodes(gym.vector.AutoresetMode.NEXT_STEP), model, 2)
        actor.unroll()
        def child():
            actor.reset()
            return actor.unroll()["count"].tolist() == [[0, 1]] * N
        assert forked(child)
        assert actor.unroll()["count"][:, 0].tolist() == [2] * N
    """
    with broker_at(at), serving(policy(False), at):
        folders = filter(None, [os.path.dirname(__file__), os.environ.get("PYTHONPATH")])
        python(CHILD + code, socket=at, PYTHONPATH=os.pathsep.join(folders))


def test_observations_that_are_no_flat_dict_are_refused(at):
    gym = pytest.importorskip("gymnasium")
    from ringbatch.rl.gymnasium import Actor

    class Nested(gym.Env):
        observation_space = gym.spaces.Dict({"deep": gym.spaces.Dict({"x": gym.spaces.Box(0, 1)})})
        action_space = gym.spaces.Discrete(2)

    with broker_at(at), serving(policy(False), at), rb.connect("policy", socket=at, wait=60) as model:
        for envs in (gym.vector.SyncVectorEnv([Nested]), gym.make_vec("Blackjack-v1", 1)):
            with pytest.raises(rb.Invalid, match="Dict observations must be flat, Tuple observations are not supported"):
                Actor(envs, model, 2)


def test_a_policy_without_state_and_wrong_ones(at):
    gym = pytest.importorskip("gymnasium")
    from ringbatch.rl.gymnasium import Actor, unroll_specs

    @rb.worker("plain", inputs={"obs": ("float32", (4,))}, outputs={"action": ("int64", ())})
    def plain(batch):
        return (batch.inputs["obs"][:, 2] > 0).astype("int64")

    envs = gym.make_vec("CartPole-v1", 4)
    with broker_at(at), serving(plain, at), rb.connect("plain", socket=at, wait=60) as model:
        u = Actor(envs, model, 30, seed=3).unroll()
        assert (u["action"] == (u["obs"][:, :-1, 2] > 0)).all() and u["fresh"][:, 0].all() and u["terminated"].any()
        with pytest.raises(rb.Invalid, match="no output 'move'; it has action"):
            Actor(envs, model, 30, action="move")
        with pytest.raises(rb.Error, match="8 rows"):  # they would be several requests, with several versions
            Actor(gym.make_vec("CartPole-v1", 9), model, 30).unroll()
    with pytest.raises(rb.Invalid, match="are not named"):
        unroll_specs({"x": "f32[4]"}, {"reward": "f32[]"}, 5)
    with pytest.raises(rb.Invalid, match="fixed sizes"):
        unroll_specs({"x": "f32[<=4]"}, {"action": "i64[]"}, 5)


@example
def test_impala_learns_while_its_processes_are_killed(at, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("gymnasium")
    curve, env = tmp_path / "curve.json", {**os.environ, "RINGBATCH_SOCKET": at}
    command = ["timeout", "-s", "INT", "270", sys.executable, EXAMPLES / "impala.py", "--target", "80", "--kill", "2", "--curve", curve]
    said = subprocess.run(command, env=env, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert "SIGKILL to" in said.stdout
    learned = json.loads(curve.read_text())
    assert learned[0]["score"] < 40 < 80 <= learned[-1]["score"]


def impala(env, *more, **options):
    """Its output ends when none of its processes has the pipe any more."""
    pytest.importorskip("torch")
    pytest.importorskip("gymnasium")
    command = [sys.executable, EXAMPLES / "impala.py", "--target", "1e9", "--curve", "/dev/null", *more]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@example
def test_sigterm_ends_impala_with_all_its_processes(env):
    p = impala(env)
    assert any("score" in line for line in p.stderr)
    p.terminate()
    assert "Traceback" not in p.communicate()[1] and p.returncode == 130


BOOM = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Boom(CartPoleEnv):
    def step(self, action):
        raise ValueError("boom")

gymnasium.register("Boom-v0", Boom)
"""


@example
@pytest.mark.parametrize("fails", ["an actor", "the server"])
def test_impala_ends_if_a_part_fails_for_good(env, tmp_path, fails):
    (tmp_path / "boom.py").write_text(BOOM)
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env.get("PYTHONPATH", "")])
    p = impala({**env, **({"RINGBATCH_BINARY": "/bin/false"} if fails == "the server" else {})}, "--env", "boom:Boom-v0")
    said = p.communicate()[1]
    assert p.returncode == 1 and "the server or an actor has failed" in said
    assert ("boom" if fails == "an actor" else "the broker did not start") in said


@example
@pytest.mark.timeout(900)  # it imports PyTorch twelve times
def test_two_runs_of_synchronous_ppo_learn_the_same_weights(env):
    pytest.importorskip("torch")
    pytest.importorskip("gymnasium")
    command = [sys.executable, EXAMPLES / "ppo.py", "--updates", "3", "--actors", "2"]
    runs = [subprocess.check_output(command, env=env, stderr=subprocess.DEVNULL, text=True) for _ in range(2)]
    assert runs[0] == runs[1] and runs[0].count("weights") == 3


@example
def test_ctrl_c_ends_the_recurrent_policy_without_tracebacks(env):
    command = [sys.executable, EXAMPLES / "recurrent_policy.py", "3", "1000000"]
    p = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert any("policy is ready" in line for line in p.stderr)
    os.killpg(p.pid, signal.SIGINT)
    assert "Traceback" not in p.communicate()[1] and p.returncode == 130
