# SPDX-License-Identifier: Apache-2.0
"""Odd modules, served on the CPU: answers equal direct calls, or are refused."""

from __future__ import annotations

import numpy as np
import pytest

import ringbatch as rb

torch = pytest.importorskip("torch")
rt = pytest.importorskip("ringbatch.torch")


class Keeps(torch.nn.Module):
    """Gives the sum of its input of the call before, which it keeps."""

    last = None

    def forward(self, x):
        before, self.last = self.last, x
        return x * 0 + (0 if before is None else before.sum())


def doubled(x):
    return x.mul_(2)


MODULES = {
    "in place": (doubled, lambda x: 2 * x),
    "in place, then out": (lambda x: torch.cat([doubled(x).sum(1, keepdim=True), x[:, 1:]], 1), lambda x: np.concatenate(
        [2 * x.sum(1, keepdims=True), 2 * x[:, 1:]], 1)),
    "in place, and few work": (lambda x: torch.arange(8.0)[x.add_(1).long()], lambda x: x + 1),
    "its input": (torch.nn.Identity(), lambda x: x),
    "not contiguous": (lambda x: x.expand(len(x), 4).flip(1).t().contiguous().t(), lambda x: x[:, ::-1]),
    "negative view": (lambda x: torch.complex(x, x).conj().imag, lambda x: -x),
    "wider": (lambda x: x.double() / 3, lambda x: x.astype("float64") / 3),
    "integers": (lambda x: x.long(), lambda x: x.astype("int64")),
}


@pytest.mark.parametrize("name", MODULES)
def test_an_odd_module_answers_as_it_does_when_called(served, name):
    module, want = MODULES[name]
    x = np.arange(4, dtype="float32")
    with rb.connect("m", socket=served(module, "m", inputs=["x:f32[4]"], device="cpu", max_batch_size=4), wait=60) as m:
        for rows in (x, np.stack([x + 1, x + 2])):
            np.testing.assert_array_equal(np.array(m(rows)), want(rows.reshape(-1, 4)).reshape(rows.shape))


def test_an_input_that_a_module_keeps_does_not_change(served):
    unchecked = rt.Options(check=False)
    socket = served(Keeps(), "m", inputs=["x:f32[2]"], outputs=["y:f32[2]"], device="cpu", options=unchecked)
    with rb.connect("m", socket=socket, wait=60) as m:
        m(np.full(2, 1, "float32"))
        for n in range(2, 6):
            np.testing.assert_array_equal(np.array(m(np.full(2, n, "float32"))), [2 * n - 2] * 2)


@pytest.mark.parametrize(
    "module, outputs, says",
    [
        (lambda x: x[:, : int(x[0, 0])], ["y:f32[4]"], r"expected 1 rows of \[4\], and the module gave \[1, 2\]"),
        (lambda x: x[0, 0], ["y:f32[4]"], r"gave \[\]"),
        (lambda x: x.repeat(2, 1), ["y:f32[4]"], r"gave \[2, 4\]"),
        (lambda x: (x[:, :1].expand(-1, 2), x)[int(x[0, 0]) == 4], ["y:f32[<=9]"], None),
        (lambda x: x.view(-1, 2, 2), ["y:f32[4]"], r"gave \[1, 2, 2\]"),
        (lambda x: x, ["y:f32[4]", "z:f32[4]"], "gives 1 tensors, and 2 are declared"),
    ],
)
def test_rows_that_are_not_as_declared_fail_their_batch(served, module, outputs, says):
    socket = served(module, "m", inputs=["x:f32[4]"], outputs=outputs, device="cpu", options=rt.Options(check=False))
    with rb.connect("m", socket=socket, wait=60) as m:
        if says:
            with pytest.raises(rb.Error, match=says):
                m(np.full(4, 2, "float32"))
        else:
            np.testing.assert_array_equal(np.array(m(np.full(4, 2, "float32"))), [2, 2])
