# SPDX-License-Identifier: Apache-2.0
"""OpenSpiel: its Monte-Carlo tree search asks a model, which batches the searches of many processes.

    from open_spiel.python.algorithms import mcts
    from ringbatch.rl.openspiel import Evaluator

    bot = mcts.MCTSBot(game, 2.0, 50, Evaluator(rb.connect("net")), child_selection_fn=mcts.SearchNode.puct_value)

docs/tutorials/self-play.md is the manual.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import errors
from ..client.model import Model

try:
    from open_spiel.python.algorithms import mcts
except ImportError as e:
    raise ImportError("ringbatch.rl.openspiel needs OpenSpiel: pip install open_spiel") from e


class Evaluator(mcts.Evaluator):
    """Values and priors of states, from a model with one input and the outputs "value" and "prior".

    The input takes ``state.observation_tensor()``, in any shape. value: player 0's, for a game of two players whose
    returns have the sum 0; or one for each player. prior: a weight for each action of the game, not negative.
    Legal actions share them.

    The model is asked once for each state: up to ``remember`` answers are kept, until one has other live weights.
    """

    def __init__(self, model: Model, remember: int = 10_000) -> None:
        outputs = {t.name: t.shape for t in model.outputs}
        if len(model.inputs) != 1 or not {"value", "prior"} <= outputs.keys():
            raise errors.Invalid(f'an evaluator wants a model with one input and the outputs "value" and "prior", got {model!r}')
        self._model, self._input, self._remember = model, model.inputs[0], remember
        self._actions = math.prod(outputs["prior"])
        self._answers: dict[bytes, Any] = {}
        self.version = 0  # of the live weights that gave the answers that are kept

    def evaluate(self, state: Any) -> np.ndarray:
        """The expected returns of all players. Those of a chance node are the mean of its outcomes'."""
        if state.is_terminal():
            return np.array(state.returns())
        if state.is_chance_node():
            return sum(share * self.evaluate(state.child(outcome)) for outcome, share in state.chance_outcomes())
        value = self._ask(state)["value"]
        return value if value.size > 1 else np.array([value.item(), -value.item()])

    def prior(self, state: Any) -> list[tuple[int, float]]:
        """The probability of each legal action."""
        if state.is_chance_node():
            return state.chance_outcomes()
        actions = state.legal_actions()
        weights = self._ask(state)["prior"][actions]
        total = weights.sum()
        return list(zip(actions, (weights / total if total > 0 else np.full(len(actions), 1 / len(actions))).tolist()))

    def _ask(self, state: Any) -> Any:
        x = np.array(state.observation_tensor(), self._input.dtype)
        key = x.tobytes()
        if key not in self._answers:
            fits, game = (math.prod(self._input.shape), self._actions), (x.size, state.num_distinct_actions())
            if game != fits:
                raise errors.Shape(f"{self._model!r} is for {fits[0]} numbers and {fits[1]} actions, the game has {game[0]} and {game[1]}")
            answer, version = self._model(x.reshape(self._input.shape), version=True)
            if version != self.version or len(self._answers) >= self._remember:
                self._answers.clear()
            self.version = version
            self._answers[key] = answer
        return self._answers[key]
