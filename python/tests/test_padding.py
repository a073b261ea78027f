# SPDX-License-Identifier: Apache-2.0
"""The trials whether padding or other rows change the result of a row, compared bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

import ringbatch as rb
from ringbatch.worker import trials
from ringbatch.worker.axes import Input, pad_values

X = Input("x", "f32", (64,), (0,), ("<=64",))
TOKENS, MASK = X._replace(name="tokens", kind="i64"), X._replace(name="mask", kind="i64")
LITTLE = 1e-5  # far below any tolerance


class Model:
    """A function of arrays; true is the size of each row."""

    def __init__(self, function):
        self.function = function

    def run(self, rows, true):
        sizes = np.array([[rows[0].shape[1]]] * len(rows[0]) if true is None else true)
        return [self.function(*(x.astype("float32") for x in rows), np.arange(rows[0].shape[1]) < sizes)]


def chance(x):
    """Differs at each call, like a kernel that adds in no fixed order."""
    return np.float32(1e-6) * np.random.default_rng(chance.calls.pop()).standard_normal(x.shape, "float32")


chance.calls = list(range(1000))


def pads(function, inputs=(X,), pad=None):
    """Whether the model gets buckets."""
    types = [np.dtype("float32" if i.kind == "f32" else "int64") for i in inputs]
    axes, _, note = trials.settle(Model(function), inputs, types, {}, True, pad_values(pad, inputs), trials.HALF_TOLERANCE)
    assert bool(axes.axes[0].buckets) == (not note)
    return not note


def test_a_model_gets_buckets_only_if_no_filling_of_the_padding_changes_a_bit():
    assert pads(lambda x, here: 2 * x)
    assert pads(lambda x, here: x + (x * here).sum(1, keepdims=True))
    assert not pads(lambda x, here: x + LITTLE * x.sum(1, keepdims=True))
    assert not pads(lambda x, here: x + LITTLE * x[:, -1:])  # only the last place


def test_the_mask_that_clients_send_is_zero_in_padding():
    both = TOKENS, MASK
    assert pads(lambda tokens, mask, here: tokens + (tokens * mask).sum(1, keepdims=True), both)
    assert not pads(lambda tokens, mask, here: tokens + LITTLE * tokens.sum(1, keepdims=True), both)
    assert not pads(lambda mask, here: mask + LITTLE * mask.sum(1, keepdims=True), [MASK])  # not the mask of another input


def test_a_model_that_knows_padding_by_a_value_says_so():
    def knows_zero(tokens, here):
        return tokens + ((tokens != 0) * np.arange(tokens.shape[1])).sum(1, keepdims=True)

    assert not pads(knows_zero, [TOKENS])
    assert pads(knows_zero, [TOKENS], pad=0)
    assert not pads(knows_zero, [TOKENS], pad=1)


def test_chance_is_allowed_for_and_no_more():
    assert pads(lambda x, here: x + chance(x))
    assert not pads(lambda x, here: x + chance(x) + np.float32(1e-3) * x.sum(1, keepdims=True))
    assert pads(lambda x, here: np.where(here, x, np.nan))
    assert not pads(lambda x, here: np.where(x[:, -1:] == 0, x, np.nan))


def test_results_that_are_no_numbers_prove_nothing():
    assert not pads(lambda x, here: x + np.nan * x.sum(1, keepdims=True))


def check(function, **options):
    xs = trials.example([X], [(8,)], [np.dtype("float32")], 3)
    trials.refuse_mixed_rows(Model(lambda x, here: function(x)), xs, trials.HALF_TOLERANCE, **options)


def test_a_row_does_not_change_with_its_neighbours_by_a_bit():
    check(lambda x: 2 * x)
    check(lambda x: x + chance(x))
    check(lambda x: x * (1 + LITTLE * len(x)))  # rounding may differ with the shape
    for mixes in (lambda x: x + LITTLE * x.mean(0), lambda x: x + LITTLE * x[-1:], lambda x: np.where(x.sum(0) > 1, x, np.nan)):
        with pytest.raises(rb.Invalid, match="in a batch of 3 a row gives other results beside other rows"):
            check(mixes)
    check(lambda x: x + LITTLE * x.mean(0), exact=False)  # --tolerance was given, or the model is quantized
