# SPDX-License-Identifier: Apache-2.0
"""Modules that take and return lists: each row has its own number of results."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import until_stopped

import ringbatch as rb

torch = pytest.importorskip("torch")
rt = pytest.importorskip("ringbatch.torch")

OUTPUTS = ["boxes:f32[found<=20,2]", "labels:i64[found<=20]", "mean:f32[]"]
IMAGE = ["image:f32[1,<=8,<=8]"]


class Finder(torch.nn.Module):
    """The bright pixels of each picture."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.mixes, self.sizes = mixes, []

    def forward(self, images, targets=None):
        self.sizes.append(len(images))
        more = 0.01 * len(images) if self.mixes else 0.0
        at = [(x[0] > 0.9).nonzero() for x in images]
        return [{"boxes": p.float() + more, "labels": p.sum(1), "mean": x.mean(), "loss": None} for p, x in zip(at, images)]


@pytest.mark.parametrize("inputs", [IMAGE, ["image:f32[1,8,8]"]])
def test_each_row_has_its_own_number_of_results(socket, inputs):
    finder, name = Finder(), f"finder-{len(inputs[0])}"
    rng = np.random.default_rng(0)
    sizes = [(8, 8), (1, 1), (3, 7), (8, 2), (5, 5), (8, 8)] if inputs is IMAGE else [(8, 8)] * 6
    pictures = [rng.random((1, *size), "float32") for size in sizes]
    how = dict(inputs=inputs, outputs=OUTPUTS, lists=True, device="cpu", socket=socket, max_batch_size=6, wait_time=60)
    with until_stopped(rt.serve, finder, name, **how), rb.connect(name, socket=socket, wait=60) as m, rb.connect(name, socket=socket):
        finder.sizes.clear()
        answers = [f.result(60) for f in [m.submit(x) for x in pictures]]
        assert finder.sizes == [6]
        for x, y in zip(pictures, answers):
            at = np.argwhere(x[0] > 0.9)
            assert np.array_equal(y["boxes"], at) and np.array_equal(y["labels"], at.sum(1)) and np.isclose(y["mean"], x.mean())
        bright = m.submit(np.ones((1, 8, 8), "float32"))
        others = [m.submit(x) for x in pictures[:5]]
        with pytest.raises(rb.Failed, match="output '(boxes|labels)': expected a row of"):
            bright.result(60)
        assert all(f.result(60) for f in others)


@pytest.mark.parametrize(
    ("module", "more", "says"),
    [
        (Finder(), {"outputs": None}, "--lists wants all outputs declared"),
        (Finder(), {"packed": ["image"]}, "--lists wants all outputs declared"),
        (Finder(), {"outputs": ["masks:f32[<=20]"]}, "gives boxes, labels, mean by name, and masks are declared"),
        (Finder(mixes=True), {}, "a row gives other results in a batch of 3 than alone"),
        (lambda image: image[0], {}, "3 rows went in, and a Tensor came out: .* a list with a result for each row"),
        (lambda image: image[:1], {}, "3 rows went in, and a list of 1 came out"),
    ],
)
def test_what_gives_no_lists_is_refused(module, more, says):
    with pytest.raises(rb.Invalid, match=says.replace("--lists", "(--)?lists")):
        rt.serve(module, "never", **{"inputs": IMAGE, "outputs": OUTPUTS, "lists": True, "device": "cpu", **more})
