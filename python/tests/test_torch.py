# SPDX-License-Identifier: Apache-2.0
"""ringbatch.torch: served modules give what the module itself gives."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
import ringbatch as rb
from conftest import broker_at

torch = pytest.importorskip("torch")
rt = pytest.importorskip("ringbatch.torch")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.Linear(8, 10)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


@pytest.fixture
def served(tmp_path):
    """Serves a module in a thread; gives a function that starts it and returns the socket."""
    stops = []

    def start(module, model, **options) -> str:
        socket, stop = str(tmp_path / "s" / "b.sock"), threading.Event()
        broker = broker_at(socket)
        broker.__enter__()
        thread = threading.Thread(target=rt.serve, args=(module, model), kwargs=dict(socket=socket, stop=stop, **options))
        thread.start()
        stops.append((stop, thread, broker))
        return socket

    yield start
    for stop, thread, broker in stops:
        stop.set()
        thread.join(20)
        broker.__exit__(None, None, None)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("graphs", [False, True, None])
@pytest.mark.parametrize("script", [False, True])
def test_what_comes_back_is_what_the_module_computes(served, device, graphs, script):
    if graphs is not None and device == "cpu":
        pytest.skip("no graphs there")
    torch.manual_seed(0)
    net = Net().eval()
    module = torch.jit.trace(net, torch.rand(2, 3, 8, 8)) if script else net
    socket = served(module, "net", inputs=["x:f32[3,8,8]"], device=device, max_batch_size=4, cuda_graphs=graphs)
    x = np.random.default_rng(1).standard_normal((40, 3, 8, 8)).astype("float32")
    with torch.no_grad():
        want = net.to(device)(torch.from_numpy(x).to(device)).cpu().numpy()
    got: dict[int, np.ndarray] = {}

    def ask(first: int) -> None:
        with rb.connect("net", socket=socket, wait=20) as c:
            for i in range(first, 40, 4):
                got[i] = np.array(c.infer(x[i]))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(got) == 40
    for i, y in got.items():
        np.testing.assert_allclose(y.reshape(-1), want[i], rtol=1e-4, atol=1e-4)


def test_a_module_that_raises_fails_its_batch_and_goes_on(served):
    def moody(x):
        if (x < 0).any():
            raise ValueError("negative input")
        return x + 1

    socket = served(moody, "moody", inputs=["x:f32[2]"], outputs=["y:f32[2]"], device="cpu", max_batch_size=1)
    with rb.connect("moody", socket=socket, wait=20) as c:
        with pytest.raises(rb.Failed, match="ValueError: negative input"):
            c.infer(np.array([-1, 1], "float32"))
        np.testing.assert_array_equal(np.array(c.infer(np.array([1, 2], "float32"))).reshape(-1), [2, 3])


def test_variable_dimensions_come_back_with_their_size(served):
    socket = served(lambda x: x * 2, "twice", inputs=["x:f32[<=6]"], outputs=["y:f32[<=6]"], device="cpu")
    with rb.connect("twice", socket=socket, wait=20) as c:
        for n in (1, 4, 6):
            x = np.arange(n, dtype="float32")
            np.testing.assert_array_equal(np.array(c.infer(x)).reshape(-1), 2 * x)


class Counting(torch.nn.Module):
    """Its results change from call to call, so nothing may be folded or recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return x + self.calls


@pytest.mark.parametrize("device", DEVICES)
def test_a_module_whose_results_change_is_left_as_it_is(served, device, capfd):
    socket = served(torch.jit.script(Counting()), "counting", inputs=["x:f32[1]"], outputs=["y:f32[1]"], device=device, max_batch_size=1)
    with rb.connect("counting", socket=socket, wait=20) as c:
        first, second = (float(np.array(c.infer(np.zeros(1, "float32"))).reshape(-1)[0]) for _ in range(2))
    assert second == first + 1
    said = capfd.readouterr().err
    assert "not frozen" in said
    assert device == "cpu" or "without CUDA graphs" in said


def test_results_agree_up_to_rounding():
    one = torch.linspace(-1, 1, 8)
    assert rt.agree([one], [one + 0.001])
    assert not rt.agree([one], [one + 0.1])
    assert not rt.agree([one], [one[:4]])


def test_tensor_texts_are_read():
    assert rt.parse_spec("x:f16[3,<=224]") == ("x", torch.float16, (3, 224), (1,))
    for bad in ("x", "x:f32", "x:f33[1]", "x:f32[a]"):
        with pytest.raises(rb.Error):
            rt.parse_spec(bad)


def test_a_file_that_is_not_torchscript_is_refused_in_one_line(tmp_path):
    (tmp_path / "m.jit").write_bytes(b"nonsense")
    p = subprocess.run([sys.executable, "-m", "ringbatch.torch", str(tmp_path / "m.jit"), "--input", "x:f32[1]"], capture_output=True, text=True, check=False)
    assert p.returncode == 1
    assert p.stderr.startswith("ringbatch torch: ")
    assert len(p.stderr.splitlines()) == 1
