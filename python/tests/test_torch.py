# SPDX-License-Identifier: Apache-2.0
"""ringbatch.torch: answers equal the results of the module itself."""

from __future__ import annotations

import contextlib
import functools
from typing import Optional

import numpy as np
import pytest
from conftest import answer, ask_at_once, broker_at, in_threads, until_stopped

import ringbatch as rb

torch = pytest.importorskip("torch")
rt = pytest.importorskip("ringbatch.torch")
from ringbatch.torch.lanes import Engine  # noqa: E402
from ringbatch.worker.ring import RingBatch  # noqa: E402


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.Linear(8, 10)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))



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



LENGTHS = [1, 3, 15, 16, 17, 31, 40, 64, 5, 33]


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


@pytest.mark.parametrize("error", [AssertionError, KeyError, None])
def test_a_module_may_want_lengths_that_fill_the_tensor(served, error):
    class Speech(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = torch.nn.GRU(4, 3, batch_first=True)

        def forward(self, x, lengths):
            if error and lengths.max() != x.shape[1]:
                raise error
            packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return torch.nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)

    net = Speech().eval()
    socket = served(net, "speech", inputs=["x:f32[<=32,4]"], device="cpu", max_batch_size=4, options=rt.Options(lengths="lengths"))
    rows = [np.random.default_rng(n).random((n, 4), "float32") for n in (1, 5, 9, 16, 32, 3)]
    for x, y in zip(rows, ask_at_once(socket, "speech", rows)):
        want, _ = net(torch.from_numpy(x)[None], torch.tensor([len(x)]))
        np.testing.assert_allclose(y["y0"], want[0].detach(), atol=1e-6)
        assert y["y1"] == len(x)


def test_true_sizes_come_back_also_after_the_broker_was_restarted(at):
    with until_stopped(rt.serve, lambda x: x * 2, "twice", socket=at, inputs=["x:f32[<=64]"], device="cpu", wait=60):
        for _ in range(2):
            with broker_at(at):
                np.testing.assert_array_equal(answer(at, "twice", range(5)), [0, 2, 4, 6, 8])


@pytest.mark.parametrize("buckets", [True, False])
def test_only_fixed_sizes_use_attention_that_builds_a_plan_for_each(served, buckets):
    torch.backends.cuda.enable_cudnn_sdp(True)
    socket = served(torch.nn.ReLU(), "m", inputs=["x:f32[<=8]"], device="cpu", options=rt.Options(pad_sizes=buckets))
    answer(socket, "m", [1] * 3)
    assert torch.backends.cuda.cudnn_sdp_enabled() is buckets
    torch.backends.cuda.enable_cudnn_sdp(True)


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


class Scores(torch.nn.Module):
    """Arguments in an order that a tokenizer does not have."""

    def forward(self, ids, mask, types):
        return (ids * 2 * mask + types * 100).float()



SCORES = ["ids:i64[3]", "types:i64[3]", "mask:i64[3]"]



IDS = tuple(torch.full((2, 3), n) for n in (7, 1, 4))


class Drops(torch.nn.Module):
    def forward(self, ids, mask=None, **dropped):
        return ids


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
        (lambda: torch.nn.DataParallel(Scores()), {}),
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
        (lambda ids, mask=None, **dropped: ids, {}, "it takes ids, mask; the inputs are ids, types, mask"),
        (torch.nn.DataParallel(Drops()), {}, "it takes ids, mask; the inputs are ids, types, mask"),
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
    with pytest.raises(rb.Invalid, match=r"the module gives torch\.complex64 in output 'y': tensors have one .*outputs=\[NAME\]"):
        rt.serve(lambda x, offsets=None: torch.complex(x, x), "complex", device="cpu", max_batch_size=1, **how)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_small_floats_of_integers_come_as_float32(served, dtype):
    table = torch.nn.Embedding(4, 2).to(dtype).requires_grad_(False)
    socket = served(lambda ids: table.weight.float()[ids].to(dtype), "table", device="cpu", inputs=["ids:i64[3]"])
    with rb.connect("table", socket=socket, wait=60) as c:
        y = c(np.array([1, 2, 3]))
    assert y.dtype == "float32" and np.array_equal(y, table.weight[1:].float().detach())


def test_float8_comes_as_the_floats_of_the_input(served):
    socket = served(lambda x, offsets=None: x.to(torch.float8_e4m3fn), "eighth", device="cpu", inputs=["x:f32[3]"])
    with rb.connect("eighth", socket=socket, wait=60) as c:
        assert c(np.array([0.3, 1, 448], "float32")).tolist() == [0.3125, 1, 448]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("size", ["3", "<=3"])
def test_float8_that_is_declared_is_kept(served, dtype, size):
    name = str(dtype)[6:]
    float8 = np.dtype(getattr(pytest.importorskip("ml_dtypes"), name))
    socket = served(lambda x: (x, x.float(), torch.where(x.float() == 3, 1e6, x.float())), name, device="cpu",
        inputs=[f"x:{name}[{size}]"], outputs=[f"same:{name}[{size}]", f"wide:f32[{size}]", f"cast:{name}[{size}]"])  # fmt: skip
    x = torch.tensor([0.3, -448, float("nan")]).to(dtype)
    with rb.connect(name, socket=socket, wait=60) as c:
        for given in (x, x.view(torch.uint8).numpy().view(float8), [x, x]):
            y = c(given)
            y = {k: v.reshape(-1, 3)[-1] for k, v in y.items()}
            assert y["same"].dtype == y["cast"].dtype == float8 and y["same"].tobytes() == y["cast"].tobytes() == bytes(x.view(torch.uint8))
            assert np.array_equal(y["wide"], x.float(), equal_nan=True)
        with pytest.raises(rb.Failed, match=f"{name} does not hold a value of the torch.float32"):
            c(torch.tensor([3.0, 1, 2]).to(dtype))  # torch would make it the largest number, or infinity
        with pytest.raises(rb.DType, match="expected float8"):
            c(torch.ones(3))


def test_graphs_are_recorded_at_four_sizes_in_each_doubling():
    from ringbatch.torch.lanes import doublings, recorded_sizes

    assert recorded_sizes(32) == [1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32]
    assert [recorded_sizes(n) for n in (1, 2, 3)] == [[1], [1, 2], [1, 2, 3]]
    for most in range(1, 300):
        sizes = recorded_sizes(most)
        assert sizes[-1] == most and set(doublings(most)) <= set(sizes)
        assert all(b <= 1.25 * a for a, b in zip(sizes, sizes[1:]) if a >= 8)
