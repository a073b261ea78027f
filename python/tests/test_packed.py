# SPDX-License-Identifier: Apache-2.0
"""ringbatch.torch with packed rows: texts of all lengths share a batch, and come back as if alone."""

from __future__ import annotations

import functools
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import REPOSITORY

import ringbatch as rb

torch = pytest.importorskip("torch")
rt = pytest.importorskip("ringbatch.torch")
from ringbatch.torch import packed  # noqa: E402
from ringbatch.worker.axes import Input, Output  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]
TOKENS = ["tokens:i64[<=40]"]


class Sums(torch.nn.Module):
    """Of each row its sum plus k, and the running sum of each token: on the device, also behind padding."""

    def forward(self, ids, k, cu):
        row = torch.bucketize(torch.arange(len(ids), dtype=torch.int32, device=ids.device), cu[1:], right=True)
        running = torch.cat([ids.new_zeros(1), ids.cumsum(0)])
        before = running[cu.long()]
        return (before.diff() + k).float(), (running[1:] - before[row])[:, None].expand(-1, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budget", [0, 100])
def test_rows_of_all_sizes_share_a_batch_and_come_back_in_their_own(served, device, budget):
    more = {"max_batch_cost": budget} if budget else {}
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 9, n) for n in (*rng.integers(0, 41, 60), 40, 40, 40, 1)]
    more.update(inputs=[*TOKENS, "k:i64[]"], packed=["tokens"], args=["tokens", "k", "offsets"], device=device)
    more.update(max_batch_size=16, wait_time=1)  # batches leave when they are full
    with rb.connect("m", socket=served(Sums(), "m", **more), wait=60, window=64) as m:
        got = [f.result() for f in [m.submit(text, np.int64(i)) for i, text in enumerate(texts)]]
        pair = m(np.array([[1, 2], [3, 4]]), np.array([5, 6]))  # two rows in one request
        batches = m.stats()["batches"]
    for i, (text, y) in enumerate(zip(texts, got)):
        assert y["y0"] == text.sum() + i
        np.testing.assert_array_equal(y["y1"], np.repeat(text.cumsum()[:, None], 2, axis=1))
    np.testing.assert_array_equal(pair["y0"], [8, 13])
    assert batches < len(texts) / 2  # without packing there is a batch for each size


def test_a_request_whose_inputs_differ_in_size_fails_alone(served):
    def both(tokens, types, offsets):
        return (tokens + types).float()

    socket = served(both, "m", inputs=[*TOKENS, "types:i64[<=40]"], packed=["tokens", "types"], device="cpu", max_batch_size=8)
    with rb.connect("m", socket=socket, wait=60) as m:
        futures = [m.submit(np.arange(n), np.arange(n + (n == 3))) for n in range(1, 7)]
        with pytest.raises(rb.Failed, match="Shape: .*all of tokens, types have the same size"):
            futures.pop(2).result()
        assert [len(f.result()) for f in futures] == [1, 2, 4, 5, 6]


@pytest.mark.parametrize(
    ("module", "more", "says"),
    [
        (lambda tokens, offsets: (tokens - tokens.float().mean()), {}, "a row gives other results beside other rows: does the module use"),
        (lambda tokens, offsets: torch.ones(len(offsets) - 1) / len(tokens), {}, "rows give other results than alone, by more than"),
        (lambda tokens, offsets: tokens[:2], {}, r"3 rows of 73 tokens went in, and a tensor of shape \[2\] came out"),
        (lambda tokens: tokens, {}, "the module has no argument 'offsets': it takes tokens"),
        (lambda tokens, offsets: tokens, {"outputs": ["y:i64[<=39]"]}, "dimension 0 is 40, not 39"),
        (lambda tokens, offsets: tokens, {"packed": ["words"]}, r"want a list of all inputs whose size varies, \['tokens'\]"),
        (lambda tokens, offsets: tokens, {"inputs": ["tokens:i64[4,<=40]"]}, "an input's first dimension varies"),
        (lambda tokens, offsets: tokens, {"options": rt.Options(mask="mask")}, "packed goes with none of"),
    ],
)
def test_a_module_that_cannot_be_packed_is_refused(module, more, says):
    with pytest.raises(rb.Invalid, match=says):
        rt.serve(module, "m", device="cpu", **{"inputs": TOKENS, "packed": ["tokens"], **more})


def test_graphs_are_recorded_at_parts_of_the_budget():
    inputs = [Input("tokens", "i64", (512,), (0,), ("<=512",))]
    make = functools.partial(packed.PackedEngine, lambda xs: xs[:1], inputs, device=torch.device("cpu"), lanes=1, graphs=None)
    sizes = make(max_rows=64, budget=8192, shapes=[Output((512,), (0,))]).sizes_to_record()
    assert sizes[0] == 128 and sizes[-1] == 8192 and all(b <= 2 * a for a, b in zip(sizes, sizes[1:]))
    assert make(max_rows=4, budget=0, shapes=[Output((512,), (0,))]).sizes_to_record()[-1] == 2048


def test_the_embeddings_of_the_example_are_those_of_each_text_alone():
    example = REPOSITORY / "examples" / "python" / "packed_encoder.py"
    command = [sys.executable, example, "--layers", "2", "--width", "64", "--texts", "40"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    assert float(re.search("at most (.*) from each alone", said)[1]) < 1e-2
