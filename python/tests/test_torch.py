# SPDX-License-Identifier: Apache-2.0
"""ringbatch.torch: answers equal the results of the module itself."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from typing import Optional

import numpy as np
import pytest
from conftest import broker_at, in_threads, program, until_stopped

import ringbatch as rb

torch = pytest.importorskip("torch")
rt = pytest.importorskip("ringbatch.torch")
from ringbatch.torch import loading  # noqa: E402
from ringbatch.torch.lanes import Engine  # noqa: E402
from ringbatch.worker.ring import RingBatch  # noqa: E402


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.Linear(8, 10)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


@pytest.fixture
def served(at):
    """A function that serves a module in a thread and returns the socket."""
    with broker_at(at), contextlib.ExitStack() as stack:

        def start(module, model, **options) -> str:
            stack.enter_context(until_stopped(rt.serve, module, model, socket=at, **options))
            return at

        yield start


def answer(socket: str, model: str, x) -> np.ndarray:
    """The numbers that a model answers."""
    with rb.connect(model, socket=socket, wait=60) as c:
        return np.array(c.infer(np.asarray(x, "float32"))).reshape(-1)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("graphs", [False, True, None])
@pytest.mark.parametrize("script", [False, True])
def test_answers_equal_the_results_of_the_module(served, device, graphs, script):
    if graphs is not None and device == "cpu":
        pytest.skip("no graphs there")
    torch.manual_seed(0)
    net = Net().eval()
    module = torch.jit.trace(net, torch.rand(2, 3, 8, 8)) if script else net
    socket = served(module, "net", inputs=["x:f32[3,8,8]"], device=device, max_batch_size=4, options=rt.Options(cuda_graphs=graphs))
    x = np.random.default_rng(1).standard_normal((40, 3, 8, 8)).astype("float32")
    with torch.no_grad():
        want = net.to(device)(torch.from_numpy(x).to(device)).cpu().numpy()
    got: dict[int, np.ndarray] = {}

    def ask(first: int) -> None:
        with rb.connect("net", socket=socket, wait=60) as c:
            for i in range(first, 40, 4):
                got[i] = np.array(c.infer(x[i]))

    with in_threads(*(functools.partial(ask, n) for n in range(4))):
        pass
    assert len(got) == 40
    for i, y in got.items():
        np.testing.assert_allclose(y.reshape(-1), want[i], rtol=1e-4, atol=1e-4)


def test_a_module_that_raises_fails_its_batch_and_goes_on(served):
    def moody(x):
        if (x < 0).any():
            raise ValueError("negative input")
        return x + 1

    socket = served(moody, "moody", inputs=["x:f32[2]"], outputs=["y:f32[2]"], device="cpu", max_batch_size=1)
    with rb.connect("moody", socket=socket, wait=60) as c:
        with pytest.raises(rb.Failed, match="ValueError: negative input"):
            c.infer(np.array([-1, 1], "float32"))
    np.testing.assert_array_equal(answer(socket, "moody", [1, 2]), [2, 3])


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_batch_that_is_interrupted_is_answered_only_when_the_device_is_done(at, monkeypatch, error):
    """Work that is still queued may write into the slots of the batch."""
    order = []
    monkeypatch.setattr(Engine, "check", lambda self: order.append("waited"))
    fail_all = RingBatch.fail_all
    monkeypatch.setattr(RingBatch, "fail_all", lambda self, e: order.append("answered") or fail_all(self, e))

    def module(x):
        if (x < 0).any():
            raise error
        return x

    ends = pytest.raises(AssertionError, match="KeyboardInterrupt") if error is KeyboardInterrupt else contextlib.nullcontext()
    with broker_at(at), ends, until_stopped(rt.serve, module, "m", inputs=["x:f32[2]"], device="cpu", max_batch_size=1, socket=at):
        with pytest.raises(rb.Failed, match=error.__name__):
            answer(at, "m", [-1, -1])
        assert order[:2] == ["waited", "answered"]


class Encoder(torch.nn.Module):
    """Attention over the places of the mask; without a mask over all."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.attention = torch.nn.Embedding(50, 16), torch.nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, tokens, mask: Optional[torch.Tensor] = None):
        x = self.table(tokens)
        y, _ = self.attention(x, x, x, key_padding_mask=None if mask is None else ~mask)
        states = x + y
        if mask is None:
            return states, states.mean(1)
        return states, (states * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True)


def attends_a_little(x):
    """A maskless mix over the places that stays within every tolerance."""
    return x + 1e-5 * x.mean(1, keepdim=True)


@pytest.mark.parametrize("script", [False, True])
@pytest.mark.parametrize("graphs", [False, None])
def test_a_module_that_padding_disturbs_a_little_gets_no_buckets(served, script, graphs, capfd):
    module = torch.jit.script(attends_a_little) if script else attends_a_little
    socket = served(module, "little", inputs=["x:f32[<=64]"], outputs=["y:f32[<=64]"], device="cpu", options=rt.Options(cuda_graphs=graphs))
    assert len(ask_at_once(socket, "little", [np.ones(3, "float32")])) == 1
    assert "the results of a row change with its padding" in capfd.readouterr().err


LENGTHS = [1, 3, 15, 16, 17, 31, 40, 64, 5, 33]


def ask_at_once(socket, model, rows):
    """From one client, all in flight: they share batches."""
    with rb.connect(model, socket=socket, wait=60) as c:
        return [r.result() for r in [c.submit(x) for x in rows]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("script", [False, True])
def test_lengths_that_vary_share_batches_and_come_back_as_if_alone(served, device, script, capfd):
    torch.manual_seed(0)
    net = Encoder().eval()
    module = torch.jit.script(net) if script else net
    socket = served(module, "enc", inputs=["tokens:i64[<=64]"], device=device, max_batch_size=8, options=rt.Options(mask="mask"))
    rows = [np.random.default_rng(n).integers(1, 50, n) for n in LENGTHS]
    answers = ask_at_once(socket, "enc", rows)
    assert "tokens:i64[<=64] -> y0:f32[<=64,16] y1:f32[16]" in (said := capfd.readouterr().out)
    assert "tokens.0 rounded up to 16, 32, 64" in said
    net = net.to("cpu")
    for t, y in zip(rows, answers):
        with torch.no_grad():
            states, pooled = net(torch.from_numpy(t)[None])
        np.testing.assert_allclose(np.array(y["y0"]).reshape(len(t), 16), states[0].numpy(), rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(np.array(y["y1"]).reshape(16), pooled[0].numpy(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_the_worker_pads_and_passes_the_true_lengths(served, device):
    """The varying size is not a row's first dimension, so that padding lies inside of rows."""

    def sums(x, n):
        return 2 * x, n.to(torch.int32), x.sum((1, 2))

    socket = served(
        sums, "sums", inputs=["x:f32[2,<=8]"], outputs=["y:f32[2,<=8]", "n:i32[]", "sum:f32[]"], device=device,
        max_batch_size=4, options=rt.Options(lengths="n", pad=3), buckets={"x.1": [4, 8]},
    )  # fmt: skip
    rows = [np.arange(2 * n, dtype="float32").reshape(2, n) for n in (1, 3, 4, 5, 8)]
    for x, y in zip(rows, ask_at_once(socket, "sums", rows)):
        n = x.shape[1]
        np.testing.assert_array_equal(np.array(y["y"]).reshape(2, n), 2 * x)
        assert int(np.array(y["n"]).reshape(())) == n
        assert float(np.array(y["sum"]).reshape(())) == x.sum() + 3 * 2 * ((4 if n <= 4 else 8) - n)


def test_true_sizes_come_back_also_after_the_broker_was_restarted(at):
    with until_stopped(rt.serve, lambda x: x * 2, "twice", socket=at, inputs=["x:f32[<=64]"], device="cpu", wait=60):
        for _ in range(2):
            with broker_at(at):
                np.testing.assert_array_equal(answer(at, "twice", range(5)), [0, 2, 4, 6, 8])


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


def test_outputs_may_be_declared_in_another_shape_of_as_many_numbers(served):
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


@pytest.mark.parametrize("buckets", [True, False])
def test_only_fixed_sizes_use_attention_that_builds_a_plan_for_each(served, buckets):
    torch.backends.cuda.enable_cudnn_sdp(True)
    socket = served(torch.nn.ReLU(), "m", inputs=["x:f32[<=8]"], device="cpu", options=rt.Options(pad_sizes=buckets))
    answer(socket, "m", [1] * 3)
    assert torch.backends.cuda.cudnn_sdp_enabled() is buckets
    torch.backends.cuda.enable_cudnn_sdp(True)


def test_where_inputs_vary_outputs_must_be_the_modules_also_without_the_check():
    with pytest.raises(rb.Invalid, match="dimension 0 is 8, not 4"):
        rt.serve(lambda x: x * 2, "m", inputs=["x:f32[<=8]"], outputs=["y:f32[<=4]"], device="cpu", options=rt.Options(check=False))


class Counting(torch.nn.Module):
    """Its results change from call to call, so nothing may be folded or recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return x + self.calls


@pytest.mark.parametrize("device", DEVICES)
def test_a_module_whose_results_change_is_neither_frozen_nor_recorded(served, device, capfd):
    socket = served(torch.jit.script(Counting()), "counting", inputs=["x:f32[1]"], outputs=["y:f32[1]"], device=device, max_batch_size=1)
    first, second = (answer(socket, "counting", [0])[0] for _ in range(2))
    assert second == first + 1
    said = capfd.readouterr().err
    assert "not frozen" in said
    assert device == "cpu" or "without CUDA graphs" in said


def test_a_file_that_is_not_torchscript_is_refused_in_one_line(tmp_path):
    (tmp_path / "m.jit").write_bytes(b"nonsense")
    p = subprocess.run([sys.executable, "-m", "ringbatch.torch", str(tmp_path / "m.jit"), "--input", "x:f32[1]"], capture_output=True,
        text=True, check=False)
    assert p.returncode == 1
    assert p.stderr.startswith("ringbatch torch: ")
    assert len(p.stderr.splitlines()) == 1


class Two(torch.nn.Module):
    """Two inputs, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x, z):
        h = torch.tanh(self.b(torch.nn.functional.gelu(self.a(x)))) + z
        return h.sum(1), h


def two() -> torch.nn.Module:
    torch.manual_seed(0)
    return Two().eval()


def ask_two(socket: str) -> None:
    rng = np.random.default_rng(2)
    x, z = (rng.standard_normal((5, 64)).astype("float32") for _ in range(2))
    with torch.no_grad():
        want = [y.numpy() for y in two()(torch.from_numpy(x), torch.from_numpy(z))]
    with rb.connect("two", socket=socket, wait=500) as c:  # a compiler may be at work
        got = c(x, z)
    np.testing.assert_allclose(got["y0"], want[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got["y1"], want[1], rtol=1e-4, atol=1e-4)


class Scores(torch.nn.Module):
    """Arguments in an order that a tokenizer does not have."""

    def forward(self, ids, mask, types):
        return (ids * 2 * mask + types * 100).float()


SCORES = ["ids:i64[3]", "types:i64[3]", "mask:i64[3]"]
IDS = tuple(torch.full((2, 3), n) for n in (7, 1, 4))


def exported_scores():
    batch = {0: torch.export.Dim("batch")}
    shapes = {"ids": batch, "mask": batch, "types": batch}
    return torch.export.export(Scores(), IDS[:2], {"types": IDS[2]}, dynamic_shapes=shapes).module()


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (Scores, {}),
        (lambda: torch.jit.script(Scores()), {}),
        (lambda: torch.jit.trace(Scores(), IDS), {}),
        (exported_scores, {}),
        (lambda: lambda *xs: Scores()(*xs), {"args": "ids,mask,types"}),
        (lambda: lambda a, b, c: Scores()(a, b, c), {"args": ["ids", "mask", "types"]}),
        (lambda: lambda **xs: Scores()(**xs), {}),
    ],
)
def test_inputs_are_passed_by_their_names(served, make, how):
    socket = served(make(), "scores", inputs=SCORES, device="cpu", max_batch_size=2, **how)
    with rb.connect("scores", socket=socket, wait=200) as c:
        y = c(ids=np.full(3, 7), mask=np.full(3, 1), types=np.full(3, 4))
    np.testing.assert_array_equal(np.array(y), np.full(3, 414))


@pytest.mark.parametrize(
    ("module", "how", "says"),
    [
        (lambda *xs: xs[0], {}, 'it takes arguments without names; the inputs are ids, types, mask: .* order, args="ids,types,mask"'),
        (lambda ids, kinds, mask: ids, {}, "it takes ids, kinds, mask; the inputs are ids, types, mask"),
        (lambda *xs: xs[0], {"args": ["ids", "mask"]}, "want each input once"),
        (torch.add, {}, "it takes arguments without names"),
    ],
)
def test_inputs_whose_place_is_not_known_are_refused(module, how, says):
    with pytest.raises(rb.Invalid, match=says):
        rt.serve(module, "m", inputs=SCORES, device="cpu", **how)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True])
def test_an_output_that_does_not_hold_a_result_fails_its_request_alone(served, device, packed):
    how = {"inputs": ["x:i64[<=4]"], "packed": ["x"]} if packed else {"inputs": ["x:i64[4]"]}
    dims = "<=4" if packed else "4"

    def module(x, offsets=None):
        return x, x, x.double().pow(10)

    outputs = [f"i:i32[{dims}]", f"f:f32[{dims}]", f"d:f32[{dims}]"]
    socket = served(module, "narrow", outputs=outputs, device=device, max_batch_size=4, **how)
    with rb.connect("narrow", socket=socket, wait=60, window=8) as c:
        for value, says in ((2**40 + 5, "'i': torch.int32 does not hold"), (2**24 + 1, "'f': torch.float32 does not"), (10**4, "'d': ")):
            good, bad = c.submit(np.full(4, 3)), c.submit(np.full(4, value))
            assert good.result(60)["i"].tolist() == [3] * 4 and good.result()["d"].tolist() == [3**10] * 4
            with pytest.raises(rb.Error, match=says):
                bad.result(60)


@pytest.mark.parametrize("packed", [False, True])
def test_an_output_that_is_not_declared_keeps_64_bits(served, packed):
    how = {"inputs": ["x:f32[<=4]"], "packed": ["x"]} if packed else {"inputs": ["x:f32[4]"]}
    socket = served(lambda x, offsets=None: (x.double() / 3, x.bfloat16()), "wide", device="cpu", max_batch_size=4, **how)
    with rb.connect("wide", socket=socket, wait=60) as c:
        y = c(np.ones(4, "float32"))
        assert y["y0"].dtype == "float64" and (y["y0"] == 1 / 3).all() and y["y1"].dtype == "float32"
    with pytest.raises(rb.Invalid, match=r"the module gives torch\.complex64 in output 'y': tensors have one of the types bool"):
        rt.serve(lambda x, offsets=None: torch.complex(x, x), "complex", device="cpu", max_batch_size=1, **how)


def test_bfloat16_of_integers_comes_as_float32(served):
    table = torch.nn.Embedding(4, 2).bfloat16()
    socket = served(table, "table", device="cpu", inputs=["ids:i64[3]"])
    with rb.connect("table", socket=socket, wait=60) as c:
        y = c(np.array([1, 2, 3]))
    assert y.dtype == "float32" and np.array_equal(y, table.weight[1:].float().detach())


def test_a_state_dict_is_no_module(tmp_path):
    torch.save(Two().state_dict(), path := tmp_path / "weights.pt")
    path.chmod(0o600)
    for name in ("weights.pt", "weights.pt2"):
        with pytest.raises(rb.Invalid, match="written by torch.save and is a state_dict, .*: a.weight and"):
            loading.load(str(path.rename(tmp_path / name)), "cpu")
        path = tmp_path / name


def exported(path, dynamic: bool) -> str:
    batch = torch.export.Dim("batch")
    shapes = {"x": {0: batch}, "z": {0: batch}} if dynamic else None
    torch.export.save(torch.export.export(two(), (torch.rand(4, 64), torch.rand(4, 64)), dynamic_shapes=shapes), path)
    path.chmod(0o600)
    path.parent.chmod(0o700)
    return str(path)


def test_an_exported_program_is_served_by_several_processes_without_declared_inputs(tmp_path, at, env):
    flags = ["--processes", "2", "--device", "cpu", "--max-batch-size", "8"]
    with broker_at(at), program(env, "-m", "ringbatch.serve.torch_cli", exported(tmp_path / "two.pt2", True), *flags):
        ask_two(at)


def test_a_module_by_its_import_path_is_served_compiled_and_a_restart_reads_the_kept_code(tmp_path, at):
    (cache := tmp_path / "cache").mkdir(mode=0o700)
    env = {**HERE, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    flags = ["--name", "two", "--input", "x:f32[64]", "--input", "z:f32[64]", "--compile", "on", "--device", "cpu", "--socket", at]
    said = []
    with broker_at(at):
        for uncached in ({}, {}, {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}):
            command = [sys.executable, "-m", "ringbatch.serve.torch_cli", "test_torch:two", *flags]
            p = subprocess.Popen(command, env={**env, **uncached}, stdout=subprocess.PIPE, text=True)
            try:
                ask_two(at)
            finally:
                p.terminate()
                said.append(p.communicate(timeout=120)[0])
    assert "\ncompiled in" in "\n" + said[0] and f"kept in {cache}" in said[0]
    assert "\nread compiled code in" in "\n" + said[1]
    assert "\ncompiled in" in "\n" + said[2]


# Finds this file's modules by their import path.
HERE = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), os.path.dirname(__file__)])}


def talkative() -> torch.nn.Module:
    print("a line of the module's own")
    return torch.nn.Linear(4, 3).eval()


def test_alone_the_command_answers_each_byte_although_the_module_prints():
    command = [sys.executable, "-m", "ringbatch.serve.torch_cli", "test_torch:talkative", "--input", "x:f32[4]", "--alone", "2", "--device",
        "cpu"]
    p = subprocess.run(command, env=HERE, input=b"???", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (p.returncode, p.stdout) == (0, b"...") and b"a line of the module's own" in p.stderr


def test_compiled_code_is_served_only_if_it_agrees_and_is_faster(capfd, monkeypatch, tmp_path):
    from ringbatch.torch import compiling as tc

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(tc, "_ROUND_S", 0.001)
    x = [torch.rand(64, 64)]

    def plain(xs):
        return [xs[0] @ xs[0]]

    def slow(xs):
        for _ in range(20):
            xs[0] @ xs[0]
        return plain(xs)

    def broken():
        raise RuntimeError("no C++ compiler\nand more")

    assert tc.choose("auto", plain, lambda: slow, [x], 0.001) is None and "does not pay" in capfd.readouterr().out
    assert tc.choose("auto", slow, lambda: plain, [x], 0.001) is plain and "serving compiled code" in capfd.readouterr().out
    assert tc.choose("on", plain, lambda: slow, [x], 0.001) is slow
    assert tc.choose("auto", plain, broken, [x], 0.001) is None
    assert capfd.readouterr().err == "serving the module as it is, not compiled: RuntimeError: no C++ compiler\n"
    assert tc.choose("auto", plain, lambda: lambda xs: [1.01 * plain(xs)[0]], [x], 0.001) is None
    assert "differ by more than 0.001" in capfd.readouterr().err
    with pytest.raises(RuntimeError):
        tc.choose("on", plain, broken, [x], 0.001)


def test_a_program_that_was_exported_for_one_batch_size_is_refused(tmp_path):
    from ringbatch.torch import loading

    with pytest.raises(rb.Invalid, match="exported for batches of 4 only.*dynamic_shapes"):
        loading.load(exported(tmp_path / "two.pt2", False), "cpu")


def test_few_and_large_runs_are_copied_and_others_gathered():
    from ringbatch.torch.lanes import copied

    assert copied(1, 4) and copied(8, 32 * 4096)
    assert not copied(9, 32 * 4096) and not copied(32, 32 * 65536)
    assert copied(24, 32 * 301056) and copied(32, 32 * 602112)


def test_graphs_are_recorded_at_four_sizes_in_each_doubling():
    from ringbatch.torch.lanes import doublings, recorded_sizes

    assert recorded_sizes(32) == [1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32]
    assert [recorded_sizes(n) for n in (1, 2, 3)] == [[1], [1, 2], [1, 2, 3]]
    for most in range(1, 300):
        sizes = recorded_sizes(most)
        assert sizes[-1] == most and set(doublings(most)) <= set(sizes)
        assert all(b <= 1.25 * a for a, b in zip(sizes, sizes[1:]) if a >= 8)


def test_a_module_is_a_stage_of_a_pipeline(tmp_path, at):
    (config := tmp_path / "b.toml").write_text(
        '[[model]]\nname = "line"\ninputs = ["x:u8[4]"]\n'
        '[[model.stage]]\nname = "widen"\ninputs = ["x"]\noutputs = ["h:f32[4]"]\n[[model.stage]]\nname = "net"\ninputs = ["h"]\noutputs '
        '= ["y:f32[]"]\n'
    )
    specs = [("widen", lambda x: x.float() / 2, "x:u8[4]", "h:f32[4]"), ("net", lambda h: h.sum(1), "h:f32[4]", "y:f32[]")]
    with broker_at(at, "--config", str(config)), contextlib.ExitStack() as stack:
        for name, f, x, y in specs:
            stack.enter_context(until_stopped(rt.serve, f, f"line/{name}", inputs=[x], outputs=[y], device="cpu", socket=at))
        with rb.connect("line", socket=at, wait=60) as c:
            assert [float(c(np.array([n, 1, 2, 3], "uint8"))) for n in range(5)] == [3, 3.5, 4, 4.5, 5]
