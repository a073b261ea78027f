# SPDX-License-Identifier: Apache-2.0
"""Modules whose rows have their own number of results: in lists, or with an index."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import broker_at, program, until_stopped

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


class Indexed(torch.nn.Module):
    """The bright pixels of a batch, in the order of the labels and not of the rows."""

    def __init__(self, names: str = "boxes labels mean rows", index=lambda rows, labels: rows) -> None:
        super().__init__()
        self.names, self.index, self.sizes = names.split(), index, []

    def forward(self, image):
        self.sizes.append(len(image))
        rows, *at = (image[:, 0] > 0.9).nonzero().T
        at = torch.stack(at, 1)
        labels, order = at.sum(1).sort(stable=True)
        results = at[order].float(), labels, image.mean((1, 2, 3)), self.index(rows[order], labels)
        return dict(zip(self.names, results)) if self.names else results


@pytest.mark.parametrize(("names", "index"), [("boxes labels mean rows", "rows"), ("", "y3")])
def test_a_module_gives_an_index(socket, names, index, capfd):
    finder = Indexed(names)
    pictures = [np.random.default_rng(n).random((1, n, 8), "float32") * (n < 8) for n in (4, 4, 8, 4, 4, 8)]
    how = dict(inputs=IMAGE, outputs=OUTPUTS, index=index, device="cpu", socket=socket, max_batch_size=4, wait_time=60)
    name = f"by-{index}"
    with until_stopped(rt.serve, finder, name, **how), rb.connect(name, socket=socket, wait=60) as m, rb.connect(name, socket=socket):
        finder.sizes.clear()
        for x, f in zip(pictures, [m.submit(x) for x in [*pictures, *pictures[2:3] * 2]]):
            y, at = f.result(60), np.argwhere(x[0] > 0.9)
            assert {*map(tuple, y["boxes"])} == {*map(tuple, at)} and np.array_equal(y["labels"], sorted(at.sum(1)))
            assert np.isclose(y["mean"], x.mean())
        assert finder.sizes == [4, 4]
    assert f"; rows by {index}\n" in capfd.readouterr().out


@pytest.mark.parametrize("module", ["Finder --lists", "Indexed --index=rows"])
def test_the_command_serves_modules_with_lists_and_an_index(at, env, module):
    command = f"-m ringbatch.serve.torch_cli test_lists:{module} --name m --device cpu --socket {at} --input {IMAGE[0]}".split()
    with broker_at(at), program(env, *command, *(f"--output={spec}" for spec in OUTPUTS), cwd=Path(__file__).parent):
        with rb.connect("m", socket=at, wait=200) as m:
            assert m(np.eye(8, dtype="float32")[None])["labels"].tolist() == [*range(0, 16, 2)]


def test_an_exported_program_gives_an_index(socket):
    class Large(torch.nn.Module):
        def forward(self, x):
            rows, at = (x > 0.5).nonzero().T
            return at, rows

    program = torch.export.export(Large(), (torch.rand(2, 8),), dynamic_shapes={"x": {0: torch.export.Dim("batch")}}).module()
    how = dict(inputs=["x:f32[8]"], outputs=["at:i64[<=8]"], index="y1", device="cpu", socket=socket)
    with until_stopped(rt.serve, program, "large", **how), rb.connect("large", socket=socket, wait=60) as m:
        assert [y.tolist() for y in m(np.array([[0, 1] * 4, [0] * 8, [1] + [0] * 7], "float32"))] == [[1, 3, 5, 7], [], [0]]


@pytest.mark.parametrize(
    ("module", "more", "says"),
    [
        (Indexed(), {"outputs": None}, "^index wants all outputs declared"),
        (Indexed(), {"outputs": OUTPUTS[2:]}, "^index wants all outputs declared"),
        (Indexed(), {"mask": "m"}, r"mask is an option: options=ringbatch.torch.Options\(mask=...\)"),
        (Indexed(), {"lists": True}, "lists wants all outputs declared"),
        (Indexed(), {"buckets": "auto"}, "no buckets, and of the module's other flags only args, device, check=False and tolerance"),
        (Indexed(), {"ragged": True}, r"ragged rows have none in common: pack them \(packed\)"),
        (Indexed(), {"index": "row"}, "the model returns boxes, labels, mean, rows, and not the index 'row'"),
        (Indexed(""), {"index": "y3", "outputs": OUTPUTS[:2]}, "the module gives y0, y1, y2, and boxes, labels are declared"),
        (Indexed(index=lambda rows, labels: rows.float()), {}, "output 'boxes': the index is float32"),
        (Indexed(index=lambda rows, labels: rows + 1), {}, "output 'boxes': the index has row 3 in a batch of 3"),
        (Indexed(index=lambda rows, labels: rows[1:]), {}, "output 'boxes': the index has shape"),
        (Indexed(index=lambda rows, labels: rows * 0), {}, "a row gives other results in a batch of 3 than alone"),
        (Indexed(), {"outputs": [*OUTPUTS[:2], "mean:f32[<=20]"]}, "output 'mean': the index has shape"),
        (Indexed(), {"outputs": ["boxes:f32[2]", *OUTPUTS[1:]]}, r"3 rows went in, and a tensor of shape .* boxes:f32\[2\] has a row for"),
    ],
)
def test_a_module_without_a_right_index_is_refused(module, more, says):
    with pytest.raises(rb.Invalid, match=says):
        rt.serve(module, "never", **{"inputs": IMAGE, "outputs": OUTPUTS, "index": "rows", "device": "cpu", **more})
