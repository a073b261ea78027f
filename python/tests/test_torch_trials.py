# SPDX-License-Identifier: Apache-2.0
"""What ringbatch.torch tries before it serves a module, and refuses."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import answer, ask_at_once

import ringbatch as rb

torch = pytest.importorskip("torch")
rt = pytest.importorskip("ringbatch.torch")


def attends_a_little(x):
    """A maskless mix over the places that stays within every tolerance."""
    return x + 1e-5 * x.mean(1, keepdim=True)


@pytest.mark.parametrize("script", [False, True])
@pytest.mark.parametrize("graphs", [False, None])
def test_a_module_that_padding_disturbs_a_little_gets_no_buckets(served, script, graphs, capfd):
    module = torch.jit.script(attends_a_little) if script else attends_a_little
    socket = served(module, "little", inputs=["x:f32[<=64]"], outputs=["y:f32[<=64]"], device="cpu", options=rt.Options(cuda_graphs=graphs))
    assert len(ask_at_once(socket, "little", [np.ones(3, "float32")])) == 1
    assert """the results of a row change with its padding. If the model can ignore padding, pass it a mask (mask=NAME) or pass it the \
true sizes (lengths=NAME) or name the value that it ignores (pad=0); buckets={"x.0": [16,32,64]} pads""" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("inputs", "outputs", "says"),
    [
        (["x:f32[<=8]"], ["y:f32[8]"], r"declared as \[8\], and the module gives \[8\]: dimension 0 varies with the inputs; declare it "
            r"so, <=8"),
        (["x:f32[<=8]"], ["y:f32[<=8]", "z:f32[1]"], r"the module gives 1 output, \[8\], and 2 are declared"),
        (["x:f32[<=8]"], ["y:f32[<=8,1]"], "declare it with 1 dimensions, not 2"),
        (["x:f32[<=8]"], ["y:f32[<=4]"], "dimension 0 is 8, not 4"),
        (["x:f32[8]"], ["y:f32[10]"], r"output 'y' is declared as \[10\], and the module gives \[8\]: dimension 0 is 8, not 10"),
        (["x:f32[8]"], ["y:f32[8]", "z:f32[1]"], "the module gives 1 output"),
        (["x:f32[2,5]"], ["y:f32[5,2]"], r"declared as \[5,2\], and the module gives \[2, 5\]: dimension 0 is 2, not 5"),
        (["x:f32[2,5]"], ["y:f32[10]"], r"and the module gives \[2, 5\]: declare it with 2 dimensions, not 1"),
    ],
)
def test_outputs_are_declared_as_they_come(inputs, outputs, says):
    with pytest.raises(rb.Invalid, match=says):
        rt.serve(lambda x: x * 2, "m", inputs=inputs, outputs=outputs, device="cpu")


def learning_norm(x):
    """A batch norm in training mode, as a program that was exported so."""
    return torch.nn.functional.batch_norm(x[:, None], None, None, training=True)[:, 0]


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (learning_norm, "in a batch of 3 a row gives other results beside other rows"),
        (lambda x: x.softmax(0), r"in a batch of 3 a row gives other results beside other rows: .*\(max_batch_size=1\) or anything"),
        (lambda x: x.view(1, 2) + 1, r"the module takes one row, and fails with 3: .*\(max_batch_size=1\)"),
        (lambda x: {1: x}[len(x)], r"the module takes one row, and fails with 3: .*KeyError"),
        (lambda x: (None, [len(x)]), r"the model gives no tensor: y0 \(None\), y1.0 \(int\)"),
        (lambda x: x.sum(), r"1 rows went in, and a tensor of shape \[\] came out"),
        (lambda x: x.to_sparse(), r"not dense \(torch.sparse_coo\): .* with to_dense\(\)"),
        (lambda x: x[:1], r"3 rows went in, and a tensor of shape \[1, 2\] came out"),
    ],
)
@pytest.mark.parametrize("outputs", [None, ["y:f32[2]"]])
def test_a_module_that_mixes_rows_is_refused(module, says, outputs):
    with pytest.raises(rb.Invalid, match=says):
        rt.serve(module, "m", inputs=["x:f32[2]"], outputs=outputs, device="cpu")


def test_outputs_may_be_declared_without_their_sizes_of_1(served):
    socket = served(lambda x: x[:, None], "same", inputs=["x:f32[2]"], outputs=["y:f32[2]"], device="cpu")
    np.testing.assert_array_equal(answer(socket, "same", [1, 1]), [1, 1])


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OSError(12, "no memory"), torch.cuda.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: unspecified launch failure")],
)
def test_a_lack_of_memory_is_not_blamed_on_the_module(error):
    def module(x):
        if len(x) > 1:
            raise error
        return x

    with pytest.raises(type(error)) as e:
        rt.serve(module, "m", inputs=["x:f32[2]"], device="cpu")
    assert e.value is error


def repeated(x):
    """Each row as long as its first number says, padded to the longest of the batch."""
    lengths = 1 + (x[:, 0] * 60).long()
    return torch.where(torch.arange(int(lengths.max())) < lengths[:, None], x[:, :1], 0)


def test_rows_may_be_padded_to_the_longest_of_their_batch(served):
    socket = served(repeated, "padded", inputs=["x:f32[2]"], outputs=["y:f32[<=64]"], device="cpu")
    np.testing.assert_array_equal(answer(socket, "padded", [0.05] * 2), np.full(4, 0.05, "float32"))


@pytest.mark.parametrize(
    ("module", "inputs", "outputs"),
    [
        (lambda x: (x @ x.T).cumsum(0), ["x:f32[2]"], ["y:f32[1]"]),
        (lambda x: (x @ x.T).cumsum(0), ["x:f32[2]"], ["y:f32[<=64]"]),
        # The second size is the number of rows: the numbers of a row would lie between others.
        (lambda x: x[:, :1, None] + 100 * torch.arange(len(x)) + torch.zeros(1, 2, 1), ["x:f32[2]"], ["y:f32[<=8,1]"]),
        (lambda x: x[:, : x.shape[1] // len(x), None].expand(-1, -1, 3), ["x:f32[<=6]"], ["y:f32[<=6,<=8]"]),
        (lambda x: (x, x * 2) if len(x) == 1 else (x,), ["x:f32[2]"], ["y:f32[2]", "z:f32[2]"]),
        (lambda x: (x, x * 2) if len(x) > 1 else (x,), ["x:f32[2]"], ["y:f32[2]"]),
    ],
    ids=["one", "open", "fixed", "follows", "fewer", "more"],
)
def test_only_sizes_that_are_not_known_may_be_others_in_a_batch(module, inputs, outputs):
    says = "in a batch of 3 (the rows give other results than alone|a row gives other results)|gave y0.* in its first run"
    with pytest.raises(rb.Invalid, match=says):
        rt.serve(module, "m", inputs=inputs, outputs=outputs, device="cpu", max_batch_size=4)


@pytest.mark.parametrize("compile", ["off", "auto"])
def test_a_module_that_learns_its_sizes_from_the_first_row_is_served(served, compile, monkeypatch):
    from ringbatch.torch import compiling

    monkeypatch.setattr(compiling, "choose", lambda *a: None)  # without measuring
    socket = served(torch.nn.LazyLinear(2), "lazy", inputs=["x:f32[4]"], device="cpu", options=rt.Options(compile=compile))
    assert answer(socket, "lazy", [1] * 4).size == 2


def nearly(x):
    return x * (1 + 0.01 * (len(x) > 1))


class Nearly(torch.nn.Module):
    """Of a batch it gives 1 % more than of a row alone."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x):
        return nearly(x) * self.weight


def test_how_far_rows_may_differ_can_be_said(served):
    with pytest.raises(rb.Invalid, match=r"by more than 0.001 of the largest: .*allow more \(tolerance=0.05\)"):
        rt.serve(nearly, "m", inputs=["x:f32[2]"], device="cpu")
    with pytest.raises(rb.Invalid, match=r"by more than 0.05 of the largest: .*=1\) or anything \(check=False\)"):
        rt.serve(lambda x: x.softmax(0), "m", inputs=["x:f32[2]"], device="cpu", options=rt.Options(tolerance=0.05))
    socket = served(nearly, "nearly", inputs=["x:f32[2]"], device="cpu", options=rt.Options(tolerance=0.02))
    np.testing.assert_array_equal(answer(socket, "nearly", [1, 1]), [1, 1])


def test_coarse_modules_may_differ_by_more(tmp_path):
    from ringbatch.torch import checks

    linear = torch.nn.Sequential(torch.nn.Linear(4, 4))
    scripted = torch.jit.script(linear)
    coarse = [Nearly(torch.float16), Nearly(torch.bfloat16), torch.nn.LazyLinear(2, dtype=torch.float16)]
    coarse += [torch.jit.freeze(torch.jit.script(torch.nn.Linear(4, 4, dtype=dtype).eval())) for dtype in (torch.float16, torch.bfloat16)]
    if torch.backends.quantized.engine != "none":
        quantized = torch.ao.quantization.quantize_dynamic(linear, {torch.nn.Linear})
        coarse += [quantized, torch.jit.script(quantized), torch.fx.symbolic_trace(quantized)]
    fine = [nearly, Nearly(torch.float32), linear, torch.nn.LazyLinear(2), scripted, torch.jit.freeze(scripted.eval()),
        torch.fx.symbolic_trace(linear)]
    assert [checks.tolerance(m, False) for m in (*coarse, *fine)] == [0.02] * len(coarse) + [0.001] * len(fine)
    assert checks.tolerance(nearly, True) == 0.02


@pytest.mark.skipif(torch.backends.quantized.engine == "none", reason="no quantized kernels here")
def test_a_quantized_module_whose_scale_is_of_the_whole_batch_is_served(served):
    module = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(4, 4)), {torch.nn.Linear})
    socket = served(module, "quantized", inputs=["x:f32[4]"], device="cpu")
    assert answer(socket, "quantized", [1] * 4).size == 4


def test_where_inputs_vary_outputs_must_be_the_modules_also_without_the_check():
    with pytest.raises(rb.Invalid, match="dimension 0 is 8, not 4"):
        rt.serve(lambda x: x * 2, "m", inputs=["x:f32[<=8]"], outputs=["y:f32[<=4]"], device="cpu", options=rt.Options(check=False))
