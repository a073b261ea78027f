# SPDX-License-Identifier: Apache-2.0
"""``Actor``: steps a Gymnasium vector environment with the answers of a model, and collects unrolls.

    envs = gymnasium.make_vec("CartPole-v1", num_envs=16)
    with rb.connect("policy", window=16) as policy, rb.connect("learn", window=16) as learn:
        for unroll in Actor(envs, policy, steps=20):
            learn(unroll)  # one request of 16 rows
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .. import errors
from ..binding.library import Process
from ..binding.tensors import Specs, declared
from ..client.model import Model

try:
    from gymnasium import spaces
    from gymnasium.vector import AutoresetMode, VectorEnv
except ImportError as e:
    raise ImportError("ringbatch.rl.gymnasium needs Gymnasium 1.1 or later: pip install 'gymnasium>=1.1'") from e

_OF_STEPS = {"reward": "float32", "score": "float32", "terminated": "bool", "truncated": "bool",
             "fresh": "bool", "valid": "bool", "version": "int64"}  # fmt: skip


def unroll_specs(inputs: Specs, outputs: Specs, steps: int, state: Specs = ()) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The arrays of an unroll of a policy, as the inputs of a model that learns: ``@rb.worker("learn", inputs=unroll_specs(...), ...)``.

    A row is one environment. The policy's inputs have steps + 1 entries: the last is the
    observation after the unroll. Its state is that before the first step. All others have one
    entry a step:

    - each output of the policy, and ``version``: of the live weights that answered;
    - ``reward``, ``terminated``, ``truncated``, and ``score``: the rewards of the episode so far;
    - ``fresh``: the step begins an episode; its state was zero;
    - ``valid``: False if the environment ignored the action, because it began its next episode.
    """
    sides = [("inputs", inputs, (steps + 1,)), ("outputs", outputs, (steps,)), ("state", state, ())]
    specs: dict[str, tuple[str, tuple[int, ...]]] = {name: (dtype, (steps,)) for name, dtype in _OF_STEPS.items()}
    for side, given, lead in sides:
        for t in declared(given):
            if t.variable or t.memory not in ("", "host") or t.name in specs:
                raise errors.Invalid(f"{t} in the {side} of a policy: its tensors have fixed sizes, lie on the host, and are not named "
                                     f"as one another or as {', '.join(_OF_STEPS)}")  # fmt: skip
            specs[t.name] = (t.kind, (*lead, *t.shape))
    return specs


class Actor:
    """Steps a vector environment. Iterating over it gives unrolls without end; use it as a context manager, or close it.

    A policy with state keeps one for each environment, and zeroes it where an episode begins. If a
    step raises, the actor stays before it: the next unroll goes on there. After StateLost call :meth:`reset`.

    With ``AutoresetMode.NEXT_STEP``, which is Gymnasium's default, the last observation of an episode is part
    of the unroll, so a learner can tell apart the end of an episode and the end of its time. The step after
    it is not valid. With SAME_STEP and DISABLED the first observation of the next episode takes its place.
    """

    def __init__(self, envs: VectorEnv, policy: Model, steps: int, *, action: str = "action", seed: int | None = None) -> None:
        """policy: a connection whose window has a row for each environment. action: the output that the environments get."""
        self.envs, self.policy, self.steps = envs, policy, steps
        self._action, self._mode = action, envs.metadata.get("autoreset_mode")
        if not isinstance(self._mode, AutoresetMode):
            raise errors.Invalid(f"the metadata of {envs} have no autoreset_mode; got {self._mode!r}")
        space = envs.single_observation_space
        parts = space.values() if isinstance(space, spaces.Dict) else [space]
        if any(isinstance(part, (spaces.Dict, spaces.Tuple)) for part in parts):
            raise errors.Invalid(f"Dict observations must be flat, Tuple observations are not supported: use a wrapper; got {space}")
        if action not in (names := [t.name for t in policy.outputs]):
            raise errors.Invalid(f"{policy.name} has no output {action!r}; it has {', '.join(names)}")
        inputs, outputs, state = ([str(t) for t in side] for side in (policy.inputs, policy.outputs, policy.state))
        self._arrays = declared(unroll_specs(inputs, outputs, steps, state))
        self._open()
        self.reset(seed)

    def _open(self) -> None:
        self._sequence = self.policy.sequence(rows=self.envs.num_envs) if self.policy.state else None
        self._process = Process.generation

    def reset(self, seed: int | None = None) -> None:
        """Begins an episode in each environment. A forked child calls it first: the state stayed in the parent."""
        if self._process != Process.generation:
            self._open()
        self._observe(self.envs.reset(seed=seed)[0])
        self._begin(np.ones(self.envs.num_envs, bool))
        self._ended = ~self._fresh  # environments whose next step only begins an episode
        self._score = np.zeros(self.envs.num_envs, np.float32)

    def unroll(self) -> dict[str, np.ndarray]:
        """The next steps of all environments, as unroll_specs describes them."""
        unroll = {t.name: np.empty((self.envs.num_envs, *t.shape), t.dtype) for t in self._arrays}
        for t in self.policy.state:
            unroll[t.name][...] = self._sequence.state(t.name)  # type: ignore[union-attr]
        for step in range(self.steps):
            # The observation is copied before the step: environments may reuse its array.
            _write(unroll, step, {**self._observed, "fresh": self._fresh, "valid": ~self._ended})
            _write(unroll, step, self._step())
        _write(unroll, self.steps, self._observed)
        return unroll

    def _step(self) -> dict[str, Any]:
        if self._sequence is None:
            return self._act(*self.policy(split=False, version=True, **self._observed))
        answer, version = self._sequence.step(version=True, **self._observed)
        try:
            return self._act(answer, version)
        except BaseException:
            self._sequence.undo()
            raise

    def _act(self, answer: Any, version: int) -> dict[str, Any]:
        found = {**(answer if isinstance(answer, dict) else {self._action: answer}), "version": version}
        observation, reward, terminated, truncated, _ = self.envs.step(found[self._action])
        done = terminated | truncated
        self._score = np.where(self._fresh, 0, self._score) + reward
        found.update(reward=reward, terminated=terminated, truncated=truncated, score=self._score)
        if self._mode is AutoresetMode.DISABLED and done.any():
            observation, _ = self.envs.reset(options={"reset_mask": done})
        later = self._mode is AutoresetMode.NEXT_STEP
        self._begin(self._ended if later else done)
        self._ended = done if later else np.zeros_like(done)
        self._observe(observation)
        return found

    def _begin(self, fresh: np.ndarray) -> None:
        self._fresh = fresh
        if self._sequence and fresh.any():
            self._sequence.reset(fresh)

    def _observe(self, observation: Any) -> None:
        self._observed = dict(observation) if isinstance(observation, Mapping) else {self.policy.inputs[0].name: observation}

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        while True:
            yield self.unroll()

    def close(self) -> None:
        """Ends the policy's sequence. The environments stay open."""
        if self._sequence:
            self._sequence.close()

    def __enter__(self) -> Actor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write(unroll: dict[str, np.ndarray], step: int, found: Mapping[str, Any]) -> None:
    for name, value in found.items():
        unroll[name][:, step] = value
