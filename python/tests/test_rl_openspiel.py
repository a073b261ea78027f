# SPDX-License-Identifier: Apache-2.0
"""OpenSpiel's search asks a model; and the example of self-play."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from conftest import REPOSITORY, serving

import ringbatch as rb
from ringbatch import errors

pyspiel = pytest.importorskip("pyspiel")
mcts = pytest.importorskip("open_spiel.python.algorithms.mcts")
openspiel = pytest.importorskip("ringbatch.rl.openspiel")
asked = []


def net(model: str, values=(), **more):
    """A model of Tic-Tac-Toe that knows which cell it likes. values: the shape of its value."""

    @rb.worker(model, inputs={"cells": ("float32", (27,))}, outputs={"value": ("float32", values), "prior": ("float32", (9,))}, **more)
    def run(batch):
        asked.append(batch.rows)
        w = batch.weights["prior"] if more else np.arange(9, dtype="float32")
        return {"value": np.full((batch.rows, *values), 0.25, "float32"), "prior": np.tile(w, (batch.rows, 1))}

    return run


def test_a_state_is_asked_once_for_its_value_and_its_prior_over_legal_actions(socket):
    asked.clear()
    state = pyspiel.load_game("tic_tac_toe").new_initial_state()
    state.apply_action(8)
    with serving(net("ttt"), socket), rb.connect("ttt", socket=socket, wait=60) as model:
        evaluator = openspiel.Evaluator(model)
        assert evaluator.evaluate(state).tolist() == [0.25, -0.25]
        assert evaluator.prior(state) == [(a, pytest.approx(a / 28)) for a in range(8)]
        assert evaluator.evaluate(state.clone()).tolist() == [0.25, -0.25] and asked == [1]
        state.apply_action(0)
        evaluator.prior(state)
        assert asked == [1, 1]


def test_weights_of_zero_are_an_even_prior_and_a_model_may_give_a_value_for_each_player(socket):
    state = pyspiel.load_game("tic_tac_toe").new_initial_state()
    for action in (8, 7, 6, 5, 4, 3):
        state.apply_action(action)
    prior = {"prior": np.zeros(9, "float32")}
    with serving(net("zeros", (2,), live_weights=True), socket), rb.publisher("zeros", prior, socket=socket, wait=60) as publisher:
        publisher.publish(prior)
        with rb.connect("zeros", socket=socket, wait=60) as model:
            evaluator = openspiel.Evaluator(model)
            assert evaluator.prior(state) == [(a, 1 / 3) for a in range(3)] and evaluator.evaluate(state).tolist() == [0.25, 0.25]


def test_answers_are_forgotten_when_one_has_newer_weights(socket):
    def weights(likes):
        return {"prior": np.eye(9, dtype="float32")[likes]}

    first = pyspiel.load_game("tic_tac_toe").new_initial_state()
    second = first.child(4)
    with serving(net("live", live_weights=True), socket), rb.publisher("live", weights(0), socket=socket, wait=60) as publisher:
        publisher.publish(weights(1))
        with rb.connect("live", socket=socket, wait=60) as model:
            evaluator = openspiel.Evaluator(model)
            assert evaluator.prior(first)[1] == (1, 1.0) and evaluator.version == 1
            publisher.publish(weights(2))
            assert evaluator.prior(first)[1] == (1, 1.0)  # kept
            assert dict(evaluator.prior(second))[2] == 1 and evaluator.version == 2
            assert evaluator.prior(first)[2] == (2, 1.0)


def test_openspiels_search_with_the_evaluator_finds_a_win_and_sees_chance(socket):
    game = pyspiel.load_game("tic_tac_toe")
    state = game.new_initial_state()
    for action in (0, 3, 1, 4):
        state.apply_action(action)
    with serving(net("search"), socket), rb.connect("search", socket=socket, wait=60) as model:
        random = np.random.RandomState(0)
        bot = mcts.MCTSBot(game, 2.0, 50, openspiel.Evaluator(model), random_state=random, child_selection_fn=mcts.SearchNode.puct_value)
        assert bot.step(state) == 2
        dice = pyspiel.load_game("pig").new_initial_state()
        dice.apply_action(0)
        assert bot.evaluator.prior(dice) == dice.chance_outcomes()


def test_the_value_of_a_chance_node_is_the_mean_of_its_outcomes(socket):
    game = pyspiel.load_game("pig")
    shape = tuple(game.observation_tensor_shape())

    @rb.worker("pig", inputs={"x": ("float32", shape)}, outputs={"value": ("float32", ()), "prior": ("float32", (2,))})
    def pig(batch):
        value = batch.inputs["x"].reshape(batch.rows, -1) @ np.arange(np.prod(shape), dtype="float32")
        return {"value": value, "prior": np.ones((batch.rows, 2), "float32")}

    dice, over = game.new_initial_state(), pyspiel.load_game("pig(horizon=1)").new_initial_state()
    dice.apply_action(0)
    over.apply_action(0)
    assert dice.is_chance_node() and over.is_terminal()
    with serving(pig, socket), rb.connect("pig", socket=socket, wait=60) as model:
        evaluator = openspiel.Evaluator(model)
        values = [evaluator.evaluate(dice.child(face)) for face in range(6)]
        assert len({v[0] for v in values}) == 6 and evaluator.evaluate(dice) == pytest.approx(np.mean(values, axis=0))
        assert evaluator.evaluate(over).tolist() == [0, 0]
        bot = mcts.MCTSBot(game, 2.0, 50, evaluator, random_state=np.random.RandomState(0))
        assert bot.step(game.new_initial_state()) in (0, 1)


def test_a_model_that_does_not_fit_is_refused(socket, echo):
    with rb.connect("echo", socket=echo) as model, pytest.raises(errors.Invalid, match='outputs "value" and "prior", got .*echo'):
        openspiel.Evaluator(model)
    with serving(net("small"), socket), rb.connect("small", socket=socket, wait=60) as model:
        evaluator = openspiel.Evaluator(model)
        with pytest.raises(errors.Shape, match="small.* is for 27 numbers and 9 actions, the game has 126 and 7"):
            evaluator.evaluate(pyspiel.load_game("connect_four").new_initial_state())


SELF_PLAY = [sys.executable, str(REPOSITORY / "examples" / "python" / "self_play.py")]


def test_self_play_counts_its_games_and_matches(env, tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "result.json"
    small = ["--rounds", "1", "--games", "4", "--matches", "4", "--actors", "2", "--json", str(out)]
    subprocess.run([*SELF_PLAY, *small], env=env, check=True, timeout=280)
    results = json.loads(out.read_text())
    assert [(r["games"], r["matches"]) for r in results] == [(0, 4), (4, 4)] and all(r["low"] <= r["score"] <= r["high"] for r in results)
    assert results[1]["version"] > results[0]["version"] == 1


@pytest.mark.parametrize("when", ["worker process started", "0 games"])  # at the start, and after the first match
def test_ctrl_c_ends_self_play_with_all_its_processes(env, when):
    pytest.importorskip("torch")
    command = [*SELF_PLAY, "--matches", "4", "--actors", "2"]
    p = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    assert any(when in line for line in p.stdout)
    os.killpg(p.pid, signal.SIGINT)
    p.stdout.read()  # ends when no process has the pipe any more
    assert p.wait(60) == 130


def test_self_play_ends_if_the_server_does(env):
    pytest.importorskip("torch")
    env["RINGBATCH_BINARY"] = "/bin/false"
    p = subprocess.run([*SELF_PLAY, "--actors", "2"], env=env, capture_output=True, text=True, timeout=200)
    assert p.returncode == 1 and "the broker did not start" in p.stderr and p.stderr.endswith("the server has ended\n")
