# SPDX-License-Identifier: Apache-2.0
"""The model of state.py: one step of a GRU with 64 units. The last number of its state, and of its answer, counts the steps."""

from __future__ import annotations

import numpy as np

UNITS, STATE, ANSWER = 64, 65, 9
rng = np.random.default_rng(0)
W, U, HEAD = (rng.normal(0, 0.1, shape).astype(np.float32) for shape in ((UNITS, 3 * UNITS), (UNITS, 3 * UNITS), (UNITS, ANSWER - 1)))


def step(x: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The answers of some rows, and their next state."""
    h, count = state[:, :UNITS], state[:, UNITS:] + 1
    a, b = x @ W, h @ U
    gates = 1 / (1 + np.exp(-(a[:, : 2 * UNITS] + b[:, : 2 * UNITS])))
    keep, reset = gates[:, :UNITS], gates[:, UNITS:]
    h = keep * h + (1 - keep) * np.tanh(a[:, 2 * UNITS :] + reset * b[:, 2 * UNITS :])
    return np.concatenate([h @ HEAD, count], axis=1), np.concatenate([h, count], axis=1)
