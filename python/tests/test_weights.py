# SPDX-License-Identifier: Apache-2.0
"""Live weights. Publishers and workers that die at any moment: chaos --only weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import FOUR, broker_at, eventually, serving

import ringbatch as rb
from ringbatch import errors

TENSORS = {"w": np.zeros(200_000, "float32"), "deep.b": np.zeros((), "int64")}
SIDES = {"inputs": {"x": "u8[1]"}, "outputs": {"least": "f32[]", "most": "f32[]"}}

WORKER = f"""
import numpy as np, ringbatch as rb
@rb.worker("m", live_weights=True, **{SIDES!r})
def run(batch):
    w, b = batch.weights["w"], batch.weights["deep.b"]
    assert not w.flags.writeable and batch.version > 0
    batch.outputs["least"][...] = min(w.min(), b)
    batch.outputs["most"][...] = max(w.max(), b)
run.run(wait=60)
"""


def fill(n: int) -> dict[str, np.ndarray]:
    return {"w": np.full(200_000, n, "float32"), "deep.b": np.array(n)}


@contextlib.contextmanager
def working(at: str, code: str = WORKER):
    p = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "RINGBATCH_SOCKET": at})
    try:
        yield
    finally:
        p.kill()
        p.wait()


def test_a_publisher_and_its_errors(at):
    @rb.worker("m", live_weights=True, **SIDES)
    def run(batch):
        return {"least": np.full(len(batch), batch.weights["deep.b"]), "most": np.full(len(batch), batch.version)}

    def answers(model) -> tuple:
        y, version = model(np.zeros(1, "uint8"), version=True)
        return version, int(y["least"]), int(y["most"])

    with broker_at(at), serving(run, at), rb.publisher("m", TENSORS, socket=at, wait=60) as p:  # the worker waits for the first version
        with pytest.raises(errors.Busy, match="publishes the weights of"):
            rb.publisher("m", TENSORS, socket=at, wait=0)
        for wrong, error in (
            ({"w": TENSORS["w"]}, errors.Invalid),
            ({**TENSORS, "w": np.zeros(3, "float32")}, errors.Shape),
            ({**TENSORS, "w": np.zeros(200_000)}, errors.DType),
            (3, errors.Invalid),
        ):
            with pytest.raises(error):
                p.publish(wrong)
        assert p.publish(fill(5)) == p.version == 1
        with rb.connect("m", socket=at, retry=60) as model:
            assert answers(model) == (1, 5, 1)
            for n in range(6, 40):
                v = p.publish(fill(n))
                assert answers(model) == (v, n, v)
            future = model.submit(np.zeros(1, "uint8"))
            assert future.result()["most"] == future.version == v
            with model.request() as req:
                assert req.run().version == v
            assert asyncio.run(model.ainfer(np.zeros(1, "uint8"), version=True))[1] == v


def test_weights_outlive_a_broker(at):
    @rb.worker("m", live_weights=True, **SIDES)
    def run(batch):
        return {"least": np.full(len(batch), batch.weights["deep.b"]), "most": np.full(len(batch), batch.version)}

    x = np.zeros(1, "uint8")
    with contextlib.ExitStack() as stack:
        with broker_at(at):
            stack.enter_context(serving(run, at))
            p = stack.enter_context(rb.publisher("m", TENSORS, socket=at, wait=60))
            p.publish(fill(1))
            v = p.publish(fill(2))
            model = stack.enter_context(rb.connect("m", socket=at, retry=60))
            assert model(x)["most"] == v
        stack.enter_context(broker_at(at))
        for _ in range(50):
            y, version = model(x, version=True)
            assert (y["least"], version) == (2, v)
        stack.enter_context(serving(run, at))  # a worker that comes now gets it, too
        assert p.publish(fill(3)) == v + 1
        eventually(lambda: model(x)["least"] == 3 and model(x, version=True)[1] == v + 1)


def test_wrong_workers_are_refused():
    with pytest.raises(rb.Invalid, match="want True, or the torch.nn.Module"):
        rb.worker("m", live_weights="wait", **FOUR)(lambda batch: None)

    async def run(batch): ...

    with pytest.raises(rb.Invalid, match="coroutine"):
        rb.worker("m", live_weights=True, **FOUR)(run)


def test_a_worker_does_not_go_on_with_old_weights_beside_a_publisher_of_others(at):
    with working(at):
        with broker_at(at), rb.publisher("m", TENSORS, socket=at, wait=60) as p:
            p.publish(fill(1))
            with rb.connect("m", socket=at, wait=60) as model:
                assert model(np.zeros(1, "uint8"))["least"] == 1
        with broker_at(at), rb.connect("m", socket=at, wait=60) as model, rb.publisher(
            "m", {"w": np.zeros(3)}, socket=at, wait=60
        ) as other:
            other.publish({"w": np.ones(3)})
            with pytest.raises(rb.Failed, match="other tensors now"):
                while True:  # the worker attaches to the weights again, in the midst of its batches
                    model(np.zeros(1, "uint8"), timeout=60)


def test_a_closed_publisher_leaves_its_place_at_once(at, tmp_path):
    (tmp_path / "b.toml").write_text('[[model]]\nname = "m"\ninputs = ["x:u8[1]"]\noutputs = ["y:u8[1]"]\n')
    with broker_at(at, "--config", str(tmp_path / "b.toml")):  # the model is declared
        for order in (1, -1) * 20:
            with rb.publisher("m", dict(list(fill(0).items())[::order]), socket=at) as p:
                version = p.publish(fill(0))
        assert version == 40


def test_rows_of_several_requests_have_the_oldest_version(at):
    several = WORKER.replace("live_weights=True", "live_weights=True, max_batch_size=4")
    with working(at, several), broker_at(at), rb.publisher("m", TENSORS, socket=at, wait=60) as p:
        p.publish(fill(1))
        with rb.connect("m", socket=at, wait=60, window=64) as model:
            for n in range(2, 30):
                p.publish(fill(n))
                future = model.submit(np.zeros((40, 1), "uint8"))
                p.publish(fill(n))
                y = future.result()["least"]
                assert future.version == 2 * n - 2 or (y[0] == y[-1] and future.version == 2 * n - 1)
            rows = np.zeros((40, 1), "uint8")
            assert model(rows, version=True)[1] == asyncio.run(model.ainfer(rows, version=True))[1] == p.version


def test_a_publisher_without_a_worker_that_follows_says_so(at, caplog):
    @rb.worker("policy", **SIDES)
    def run(batch):
        return {"least": np.zeros(len(batch)), "most": np.zeros(len(batch))}

    with broker_at(at), serving(run, at), rb.connect("policy", socket=at, wait=60):
        with pytest.raises(errors.UnknownModel, match="'?polcy'?.*did you mean"):
            rb.publisher("polcy", TENSORS, socket=at, wait=0.3)
        assert "waiting 0.3 s for a worker that follows" in caplog.text
        with pytest.raises(errors.NoWorker, match="follow no weights"):
            rb.publisher("policy", TENSORS, socket=at, wait=0)


def test_a_learner_runs_a_batch_once(at):
    """It raises after its step: the batch may not be learned again."""

    class Learn:
        def setup(self) -> None:
            publishers.append(rb.publisher("m", TENSORS, socket=at, wait=60))
            publishers[-1].publish(fill(1))

        def __call__(self, batch):
            learned.extend(batch.inputs["x"][:, 0].tolist())
            raise ValueError("after the step")

    with broker_at(at), working(at):
        for options in ({}, {"run_once": False}):
            learned: list[int] = []
            publishers: list[rb.Publisher] = []
            learn = rb.worker("learn", inputs={"x": "u8[1]"}, outputs={"y": "u8[1]"}, max_batch_size=4, wait_time="1s", **options)(Learn)
            with serving(learn, at), rb.connect("learn", socket=at, wait=60) as model:
                for round in range(50):
                    futures = [model.submit(np.array([4 * round + i], "uint8")) for i in range(4)]
                    assert all(isinstance(f.exception(60), rb.Failed) for f in futures)
                    if options and len(set(learned)) < len(learned):
                        break  # requests of a batch that fails run again
                else:
                    assert not options and sorted(learned) == list(range(200))
            publishers[0].close()


def test_a_file_is_published(at, tmp_path):
    def load(file: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "ringbatch", "weights", "load", "m", str(tmp_path / file), "--socket", at, "--wait", "60"]
        return subprocess.run(command, capture_output=True, text=True, timeout=100)

    def safetensors(header: object, data: bytes) -> bytes:
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data

    w, b = fill(7)["w"], fill(7)["deep.b"]
    np.savez(tmp_path / "good.npz", **fill(6))
    header = {
        "__metadata__": {"any": "text"}, "deep.b": {"dtype": "I64", "shape": [], "data_offsets": [0, 8]},
        "w": {"dtype": "F32", "shape": [len(w)], "data_offsets": [8, 8 + w.nbytes]},
    }  # fmt: skip
    (tmp_path / "good.safetensors").write_bytes(safetensors(header, b.tobytes() + w.tobytes()))
    (tmp_path / "long.safetensors").write_bytes(safetensors(header, b.tobytes() + w.tobytes() + b"more"))
    (tmp_path / "short.safetensors").write_bytes(safetensors(header, b.tobytes()))
    header["w"]["data_offsets"] = [4, 4 + w.nbytes]
    (tmp_path / "overlap.safetensors").write_bytes(safetensors(header, b.tobytes() + w.tobytes()))
    (tmp_path / "text.safetensors").write_text("no tensors here")
    os.mkfifo(tmp_path / "pipe")
    with broker_at(at), working(at):
        for version, file in enumerate(("good.npz", "good.safetensors"), 1):
            assert load(file).stdout == f"m has version {version}\n"
            with rb.connect("m", socket=at, wait=60) as model:
                assert model(np.zeros(1, "uint8"))["least"] == 5 + version
        for bad in ("long.safetensors", "short.safetensors", "overlap.safetensors", "text.safetensors", "pipe", "absent.npz"):
            r = load(bad)
            assert (r.returncode, r.stdout) == (1, "") and bad in r.stderr and "Traceback" not in r.stderr, r


# -- PyTorch


def test_a_module_is_followed_in_place_and_wrong_versions_are_withdrawn(at):
    torch = pytest.importorskip("torch")
    rt = pytest.importorskip("ringbatch.torch")
    learner, seen = torch.nn.Linear(4, 4), set()
    with pytest.raises(rb.Invalid, match="setup"):
        rt.follow(learner)

    @rb.worker("m", **FOUR)
    class Run:
        def setup(self) -> None:
            self.net = torch.nn.Linear(4, 4)
            rt.follow(self.net, check_finite=True)

        def __call__(self, batch):
            seen.add(self.net.weight.data_ptr())
            with torch.no_grad():
                return self.net(torch.tensor(batch.inputs["x"]))

    x = np.arange(4, dtype="float32")

    def agrees(model, version: int) -> None:
        y, answered = model(x, version=True)
        np.testing.assert_allclose(y, learner(torch.from_numpy(x)).detach(), rtol=1e-5, atol=1e-5)
        assert answered == version

    with broker_at(at):
        with serving(Run, at), rb.publisher("m", learner, socket=at, wait=60) as p, contextlib.ExitStack() as stack:
            p.publish(learner)
            model = stack.enter_context(rb.connect("m", socket=at, retry=60, wait=60))
            agrees(model, 1)
            for _ in range(10):
                with torch.no_grad():
                    learner.weight.normal_()
                agrees(model, p.publish(learner.state_dict()))
            bad = {**learner.state_dict(), "bias": torch.full((4,), float("nan"))}
            assert p.withdrawn is None and p.publish(bad) == 12
            agrees(model, 11)  # the version before
            assert p.withdrawn.version == 12 and p.withdrawn.reason.startswith("Invalid: 'bias' has a NaN")
            agrees(model, p.publish(learner))
            good = {name: t.clone() for name, t in learner.state_dict().items()}
            last = p.publish(bad)
            p.publish(bad)  # before a worker has seen the one before
            agrees(model, last - 1)
            agrees(model, p.publish(good))
            assert len(seen) == 1
        other = torch.nn.Linear(5, 4)
        with serving(Run, at), rb.publisher("m", other, socket=at, wait=60) as q, contextlib.ExitStack() as stack:
            q.publish(other)
            model = stack.enter_context(rb.connect("m", socket=at, retry=60, wait=60))
            with pytest.raises(rb.Failed, match=r"the module has \[4, 4\], the version \[4, 5\]"):
                model(x)


def test_ringbatch_torch_follows(at, tmp_path):
    torch = pytest.importorskip("torch")
    (tmp_path / "nets.py").write_text("import torch\ndef net(): return torch.nn.Linear(4, 2).bfloat16()\n")
    command = [sys.executable, "-m", "ringbatch.serve.torch_cli", "nets:net", "--input", "x:f32[4]", "--name", "m", "--live-weights"]
    net = torch.nn.Linear(4, 2)
    with broker_at(at):
        served = subprocess.Popen([*command, "--bfloat16", "--device", "cpu", "--socket", at], cwd=tmp_path)
        try:
            with rb.publisher("m", net.bfloat16(), socket=at, wait=60) as p, contextlib.ExitStack() as stack:
                p.publish(net)
                model = stack.enter_context(rb.connect("m", socket=at, wait=60))
                for _ in range(5):
                    with torch.no_grad():
                        net.weight.normal_()
                    v = p.publish(net)
                    want = net(torch.ones(4, dtype=torch.bfloat16)).float().detach()
                    y, version = model(np.ones(4, "float32"), version=True)
                    np.testing.assert_allclose(y, want, rtol=0.05, atol=0.05)
                    assert version == v
        finally:
            served.terminate()
            assert served.wait(60) == 0


# -- in device memory


@pytest.fixture
def gpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return torch


@pytest.mark.parametrize("memory", ["device", None])
def test_versions_go_from_gpu_to_gpu(at, gpu, memory):
    rt, learner = pytest.importorskip("ringbatch.torch"), gpu.nn.Sequential(gpu.nn.Linear(4, 64), gpu.nn.BatchNorm1d(64), gpu.nn.Linear(64, 4))
    learner = learner.cuda().eval()
    here, x = learner[0].weight.device, np.arange(4, dtype="float32")

    @rb.worker("m", **FOUR)
    class Run:
        def setup(self) -> None:
            self.net = type(learner)(gpu.nn.Linear(4, 64), gpu.nn.BatchNorm1d(64), gpu.nn.Linear(64, 4)).to(here).eval()
            rt.follow(self.net, check_finite=True)

        def __call__(self, batch):
            with gpu.no_grad():
                return self.net(gpu.tensor(batch.inputs["x"], device=here)).cpu()

    def change() -> None:
        with gpu.no_grad():
            for p in learner.parameters():
                p.normal_()
            learner[1].num_batches_tracked += 1

    with broker_at(at), serving(Run, at), rb.publisher("m", learner, memory=memory, socket=at, wait=60) as p:
        p.publish(learner)
        with rb.connect("m", socket=at, wait=60, retry=60) as model:
            for _ in range(50):
                change()
                v = p.publish(learner)
                want = learner(gpu.tensor(x[None], device=here)).detach().cpu()[0]
                y, version = model(x, version=True)
                np.testing.assert_allclose(y, want, rtol=1e-3, atol=1e-3)
                assert version == v
            bad = {name: gpu.full_like(t, float("nan")) if t.is_floating_point() else t for name, t in learner.state_dict().items()}
            p.publish(bad)
            assert model(x, version=True)[1] == v and "has a NaN" in p.withdrawn.reason


def test_a_worker_gets_weights_in_device_memory_as_tensors(at, gpu):
    @rb.worker("m", live_weights=True, **FOUR)
    def run(batch):
        w = batch.weights["w"]
        assert w.is_cuda
        return (gpu.tensor(batch.inputs["x"], device=w.device) * w + batch.weights["b"].float()).cpu()

    x = np.arange(4, dtype="float32")
    tensors = {"w": gpu.ones(4), "b": gpu.zeros((), dtype=gpu.bfloat16)}
    with broker_at(at), serving(run, at), rb.publisher("m", tensors, memory="device:0", socket=at, wait=60) as p:
        p.publish({"w": gpu.ones(4), "b": gpu.zeros(())})
        with rb.connect("m", socket=at, wait=60) as model:
            for n in range(1, 100):
                p.publish({"w": gpu.full((4,), float(n), device="cuda"), "b": gpu.tensor(2.0)})
                np.testing.assert_array_equal(model(x), n * x + 2)
    with broker_at(at), serving(run, at), rb.publisher("m", {"w": np.ones(4, "float32")}, memory="device:0", socket=at, wait=60) as p:
        p.publish({"w": np.full(4, 3, "float32")})  # NumPy's arrays, too


@pytest.mark.parametrize("memory", ["device", None])
def test_recorded_graphs_follow_in_order_with_the_batches(at, tmp_path, gpu, memory):
    """Batches of many clients overlap with new versions; each answer is that of its version."""
    (tmp_path / "nets.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.w = torch.nn.Parameter(torch.zeros(1 << 20))\n"
        "    def forward(self, x): return x + self.w.min(), x + self.w.max()\n"
        "def net(): return Net()\n"
    )
    command = [sys.executable, "-m", "ringbatch.serve.torch_cli", "nets:net", "--input", "x:f32[1]", "--output", "a:f32[1]", "--output",
        "b:f32[1]", "--name", "m", "--live-weights", "--socket", at, "--no-check"]  # fmt: skip
    with broker_at(at), contextlib.ExitStack() as stack:
        served = [subprocess.Popen(command, cwd=tmp_path) for _ in range(2)]
        p = stack.enter_context(rb.publisher("m", {"w": gpu.zeros(1 << 20, device="cuda")}, memory=memory, socket=at, wait=120))
        p.publish({"w": gpu.ones(1 << 20, device="cuda")})
        failed, end = [], threading.Event()

        def ask() -> None:
            with rb.connect("m", socket=at, wait=120) as model:
                while not end.is_set():
                    floor = p.version
                    y, version = model(np.zeros(1, "float32"), version=True)
                    if not (y["a"] == y["b"] == version >= floor):
                        failed.append((y, version, floor))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        try:
            eventually(lambda: len([m for m in rb.stats(at)["models"] if m["workers_attached"] == 2]) == 1)
            for t in threads:
                t.start()
            for n in range(2, 300):
                assert p.publish({"w": gpu.full((1 << 20,), float(n), device="cuda")}) == n
        finally:
            end.set()
            for t in threads:
                t.join()
            for s in served:
                s.terminate()
            assert [s.wait(60) for s in served] == [0, 0]
        assert not failed, failed[:3]
