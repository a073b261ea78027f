# SPDX-License-Identifier: Apache-2.0
"""Learns what the Brusselator's reaction does in a time step, and writes the network for `ringbatch worker mlp --weights`.

    python examples/mpi/surrogate.py net.npz

One hidden layer of random directions with a ReLU, and an output layer of least squares: no framework is needed. The state dict of
torch's nn.Sequential(Linear, ReLU, Linear …) does as well: np.savez(file, **{name: t.numpy() for name, t in net.state_dict().items()}).
"""

import sys

import numpy as np

HIDDEN, STEP = 512, 0.05  # of time, as in cells.c and cells.F90


def rates(x):
    u, v = x.T
    return np.stack([1 + u * u * v - 4 * u, 3 * u - u * u * v], 1)


def change(x, parts=50):
    """Of (u, v) in a time step, by Runge and Kutta's method."""
    h, now = STEP / parts, x
    for _ in range(parts):
        a = rates(now)
        b = rates(now + h / 2 * a)
        c = rates(now + h / 2 * b)
        now = now + h / 6 * (a + 2 * b + 2 * c + rates(now + h * c))
    return now - x


if __name__ == "__main__":
    rng = np.random.default_rng(1)
    x, through = rng.uniform(0, 5.5, (20000, 2)), rng.uniform(0, 5.5, (HIDDEN, 2))
    direction = rng.normal(size=(HIDDEN, 2))
    bias = -(direction * through).sum(1)
    hidden = np.c_[np.maximum(x @ direction.T + bias, 0), np.ones(len(x))]
    out = np.linalg.lstsq(hidden, change(x), rcond=1e-8)[0]
    layers = {"0.weight": direction, "0.bias": bias, "2.weight": np.ascontiguousarray(out[:-1].T), "2.bias": out[-1]}
    np.savez(sys.argv[1], **{name: a.astype("float32") for name, a in layers.items()})
    print(f"mean error {abs(hidden @ out - change(x)).mean():.1e}, mean change {abs(change(x)).mean():.1e}")
