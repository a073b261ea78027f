# SPDX-License-Identifier: Apache-2.0
"""Self-play: processes learn Connect Four from games against themselves.

    pip install open_spiel torch
    python examples/python/self_play.py               # minutes on 2 cores; Ctrl-C ends everything
    python examples/python/self_play.py --rounds 1 --games 8 --matches 4 --json result.json

Each actor searches with OpenSpiel. The model `net` answers the searches of all actors in batches. A finished game is a
request to the model `learn`, whose worker trains and publishes weights: `net` uses them from its next batch on.
After each round the actors play against a search with twice as many simulations and random rollouts.
"""

import argparse
import concurrent.futures
import json
import math
import multiprocessing as mp
import pathlib
import signal
import sys
import time

import numpy as np
import pyspiel
import ringbatch as rb
from open_spiel.python.algorithms import mcts
from ringbatch.rl.openspiel import Evaluator

GAME = pyspiel.load_game("connect_four")
BOARD = (3, 6, 7)  # the discs of player 0, those of player 1, empty cells
SIMULATIONS, ROLLOUTS = 32, 64  # for a move: of the net's search, and of its opponent's
KEPT = 40_000  # positions to learn from, with their mirror images


def seen_by_mover(boards):
    """The discs of the player to move and of the other one, and a sign: 1 if player 0 moves, -1 if player 1 does."""
    first, second = boards[:, 0].reshape(-1, 42), boards[:, 1].reshape(-1, 42)
    sign = np.where(first.sum(1) == second.sum(1), 1, -1).astype("float32")
    return np.where(sign[:, None] > 0, np.hstack([first, second]), np.hstack([second, first])), sign


@rb.worker("net", inputs={"board": ("float32", BOARD)}, outputs={"value": ("float32", ()), "prior": ("float32", (7,))}, live_weights=True)
def net(batch):
    w = batch.weights  # of one version, for the whole batch
    x, sign = seen_by_mover(batch.inputs["board"])
    for layer in (0, 2):
        x = np.maximum(x @ w[f"{layer}.weight"].T + w[f"{layer}.bias"], 0)
    y = x @ w["4.weight"].T + w["4.bias"]
    return {"value": sign * np.tanh(y[:, 7]), "prior": np.exp(y[:, :7] - y[:, :7].max(1, keepdims=True))}


@rb.worker("learn", inputs={"board": ("float32", ("<=42", *BOARD)), "visits": ("float32", ("<=42", 7)), "result": ("float32", ())},
           outputs={"version": ("int64", ())}, packed=["board", "visits"], run_once=True, max_batch_size=8, slots=256)  # fmt: skip
class Learn:
    def setup(self):
        import torch  # here: actors do without

        torch.manual_seed(0)
        self.torch, self.rng = torch, np.random.default_rng(0)
        layers = [torch.nn.Linear(84, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)]
        self.net = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.Adam(self.net.parameters(), 1e-3, weight_decay=1e-4)
        self.positions = [np.empty((0, n), "float32") for n in (84, 7, 1)]  # boards as the mover sees them, visits, results
        self.publisher = rb.publisher("net", self.net, wait=60)
        self.publisher.publish(self.net)

    def __call__(self, batch):  # the positions of several games, one after the other
        x, sign = seen_by_mover(batch.inputs["board"])
        visits, result = batch.inputs["visits"], sign * np.repeat(batch.inputs["result"], np.diff(batch.offsets))
        for sample in ((x, visits), (x.reshape(-1, 2, 6, 7)[..., ::-1].reshape(-1, 84), visits[:, ::-1])):  # and the mirror image
            new = (*sample, result[:, None])
            self.positions = [np.concatenate([old, more])[-KEPT:] for old, more in zip(self.positions, new)]
        for _ in range(4 * batch.rows):
            rows = self.rng.integers(len(self.positions[0]), size=128)
            x, visits, result = (self.torch.from_numpy(p[rows]) for p in self.positions)
            y = self.net(x)
            loss = self.torch.nn.functional.cross_entropy(y[:, :7], visits) + (y[:, 7:].tanh() - result).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return np.full(batch.rows, self.publisher.publish(self.net))


def start_actor():
    global evaluator, learn
    for s in (signal.SIGINT, signal.SIGTERM):
        signal.signal(s, signal.SIG_DFL)  # end at once, without a traceback
    evaluator, learn = Evaluator(rb.connect("net", wait=600)), rb.connect("learn", window=1, wait=600)


def search(random, noise=None):
    select = mcts.SearchNode.puct_value
    return mcts.MCTSBot(GAME, 1.5, SIMULATIONS, evaluator, random_state=random, child_selection_fn=select, dirichlet_noise=noise)


def play(number: int) -> int:
    """A game of the net against itself. Returns the version of the weights that learned it."""
    random = np.random.RandomState(number)
    bot, state, boards, visits = search(random, noise=(0.25, 1.0)), GAME.new_initial_state(), [], []
    while not state.is_terminal():
        root, share = bot.mcts_search(state), np.zeros(7, "float32")
        for child in root.children if root.outcome is None else [root.best_child()]:
            share[child.action] = child.explore_count
        boards.append(np.array(state.observation_tensor(), "float32").reshape(BOARD))
        visits.append(share / share.sum())
        state.apply_action(random.choice(7, p=visits[-1]) if len(visits) <= 10 else root.best_child().action)
    return int(learn(board=np.array(boards), visits=np.array(visits), result=np.float32(state.returns()[0])))


def match(number: int) -> float:
    """A game of the net against random rollouts, which begin every other game: 1 if the net wins, 0.5 for a draw."""
    random, state = np.random.RandomState(number), GAME.new_initial_state()
    bots = [search(random), mcts.MCTSBot(GAME, 1.4, ROLLOUTS, mcts.RandomRolloutEvaluator(1, random), random_state=random)]
    while not state.is_terminal():
        state.apply_action(bots[(state.current_player() + number) % 2].step(state))
    return (1 + state.returns()[number % 2]) / 2


def measured(games: int, seconds: float, version: int, points: list) -> dict:
    """The score of a match, with its 95 % confidence interval (Wilson)."""
    n, score = len(points), sum(points) / len(points)
    middle, half = (score + 1.92 / n) / (1 + 3.84 / n), 1.96 * math.sqrt(score * (1 - score) / n + 0.96 / n**2) / (1 + 3.84 / n)
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return {"games": games, "seconds": seconds, "version": version, "matches": n, "score": score, "low": low, "high": high}


def run(a: argparse.Namespace, server: mp.Process) -> list:
    """Plays all rounds; prints and returns the score after each."""
    results, seconds = [], 0.0  # seconds: of self-play, without matches
    actors = concurrent.futures.ProcessPoolExecutor(a.actors, initializer=start_actor)

    def each(game, numbers: range) -> list:
        """The results of games, in the order in which they end."""
        found, left = [], {actors.submit(game, n) for n in numbers}
        while left:
            done, left = concurrent.futures.wait(left, timeout=1)
            found += [g.result() for g in done]
            if not server.is_alive():
                sys.exit("the server has ended")
        return found

    for i in range(a.rounds + 1):
        began = time.monotonic()
        version = max(each(play, range((i - 1) * a.games, i * a.games)), default=1) if i else 1
        seconds += (time.monotonic() - began) * (i > 0)
        points = each(match, range(a.matches if i in (0, a.rounds) else max(1, a.matches // 4)))
        r = measured(i * a.games, seconds, version, points)
        print(f"{r['games']} games, {seconds:.0f} s: {r['score']:.0%} ({r['low']:.0%} to {r['high']:.0%}) of {len(points)}", flush=True)
        results.append(r)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description="Learns Connect Four by self-play.")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--games", type=int, default=100, help="of self-play, in a round")
    parser.add_argument("--matches", type=int, default=100, help="before the first round and after the last; a quarter between")
    parser.add_argument("--actors", type=int, default=32, help="processes that play")
    parser.add_argument("--json", help="write the results to this file")
    a = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends everything, as Ctrl-C does
    server = mp.Process(target=rb.serve, args=([net, Learn],), daemon=True)
    server.start()
    try:
        results = run(a, server)
    except KeyboardInterrupt:
        return 130
    finally:
        while children := mp.active_children():  # the server and the actors
            for p in children:
                p.terminate()  # the second time the server waits for nothing
                p.join(2)
    if a.json:
        pathlib.Path(a.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
