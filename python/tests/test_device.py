# SPDX-License-Identifier: Apache-2.0
"""Tensors on a GPU, with the stub driver of hack/cuda/stub: its device pointers are addresses of this machine, and a copy on a
stream pauses half way."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
import tempfile
import threading

import numpy as np
import pytest
from conftest import REPOSITORY, eventually, python, serving

import ringbatch as rb
from ringbatch.binding import ctypes_path, device
from ringbatch.serve.pipeline import declaration

ROW = 1024  # elements of f32


@pytest.fixture(scope="module", autouse=True)
def driver():
    """Loads the stub in this process and its children, also the broker's."""
    with tempfile.TemporaryDirectory(prefix="rb") as folder, pytest.MonkeyPatch.context() as m:
        path = os.path.join(folder, "libcuda.so.1")
        subprocess.run(["cc", "-shared", "-fPIC", "-pthread", "-O1", "-o", path, str(REPOSITORY / "hack" / "cuda" / "stub" / "libcuda.c")],
            check=True)
        m.setenv("RINGBATCH_LIBCUDA", path)
        m.setenv("STUB_CUDA_DELAY_US", "2000")
        m.setattr(device, "_torch", None)  # torch has no stub
        lib = ctypes.CDLL(path)
        lib.cuMemcpyAsync.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        yield lib


@pytest.fixture
def stream(driver):
    """A stream of this process."""
    made, context = ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.cuInit(0) == 0 and driver.cuStreamCreate(ctypes.byref(made), 0) == 0
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and driver.cuCtxSetCurrent(context) == 0
    yield made.value
    driver.cuStreamDestroy_v2(made)


@pytest.fixture
def gate(driver, stream):
    """Work that is queued on the stream waits until the event is set."""
    opened = threading.Event()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: opened.wait(60) and None)
    assert driver.cuLaunchHostFunc(ctypes.c_void_p(stream), function, None) == 0
    yield opened
    opened.set()
    driver.cuStreamSynchronize(ctypes.c_void_p(stream))


def at(a) -> int:
    return a.__cuda_array_interface__["data"][0]


def host(a: device.DeviceArray) -> np.ndarray:
    """The stub's device memory as an array."""
    i = a.__cuda_array_interface__
    memory = (ctypes.c_uint8 * a.nbytes).from_address(i["data"][0])
    return np.ndarray(i["shape"], i["typestr"], memory)


@rb.worker("double", inputs={"x": ("float32", (ROW,))}, outputs={"y": ("float32", (ROW,)), "first": ("float32", (), "host")},
    memory="device:0", max_batch_size=8, version="of two scripts")
def double(batch):
    for i in range(len(batch.runs)):
        x = host(batch.input_run("x", i))
        host(batch.output_run("y", i))[:] = 2 * x
        batch.output_run("first", i)[:] = x[:, 0]


@pytest.fixture(scope="module")
def served(socket):
    """Serves the model double in another process: a worker's waits must not block the stub in this one."""
    p = subprocess.Popen([sys.executable, __file__], env={**os.environ, "RINGBATCH_SOCKET": socket})
    try:
        yield socket
    finally:
        p.terminate()
        p.wait(60)


@pytest.fixture
def model(served):
    with rb.connect("double", socket=served, wait=60) as m:
        yield m


def test_a_slot_is_handed_out_by_cuda_array_interface(model):
    assert model.inputs[0].memory == "device:0" and model.outputs[1].memory == "host"
    assert repr(model.inputs[0]) == "x:f32[1024]@device:0"
    with model.request() as r:
        x = r.inputs["x"]
        assert x.shape == (ROW,) and x.__cuda_array_interface__["typestr"] == "<f4"
        host(x)[:] = np.arange(ROW)
        r.run()
        assert (host(r.outputs["y"]) == 2 * np.arange(ROW)).all()
        assert r.outputs["first"] == 0 and isinstance(r.outputs["first"], np.ndarray)
        y = r.outputs["y"]
    with pytest.raises(rb.Committed):
        at(x)
    with pytest.raises(rb.Released):
        at(y)


def test_a_commit_returns_at_once_and_takes_effect_after_the_copy_of_its_stream(model, driver, stream, gate):
    source = [np.full(ROW, n, np.float32) for n in range(1, 6)]
    with contextlib.ExitStack() as stack:
        sent = []
        for s in source:  # each copy pauses half way
            r = stack.enter_context(model.request())
            assert driver.cuMemcpyAsync(at(r.inputs["x"]), s.ctypes.data, s.nbytes, stream) == 0
            sent.append(r.commit(stream=stream))
        assert not any(r.done() for r in sent)
        gate.set()
        for n, r in enumerate(sent, 1):
            r.wait()
            assert (host(r.outputs["y"]) == 2 * n).all(), "the worker has read half a row"


def test_several_are_committed_on_one_stream_together(model, driver, stream):
    source = [np.full(ROW, n, np.float32) for n in range(4)]
    with contextlib.ExitStack() as stack:
        some = [stack.enter_context(model.request()) for _ in source]
        for r, s in zip(some, source):
            assert driver.cuMemcpyAsync(at(r.inputs["x"]), s.ctypes.data, s.nbytes, stream) == 0
        model.commit(some, stream=stream)
        with pytest.raises(rb.Committed):
            some[0].inputs["x"]
        for n, r in enumerate(some):
            assert (host(r.wait().outputs["y"]) == 2 * n).all()


def test_a_commit_that_ignored_the_stream_would_be_seen(model, driver, stream, gate):
    """Commits without the stream, as the tests above must detect."""
    s = np.full(ROW, 7, np.float32)
    with model.request() as r:
        assert driver.cuMemcpyAsync(at(r.inputs["x"]), s.ctypes.data, s.nbytes, stream) == 0
        model._core.lib.rb_commit(model._core.handle, r._id, 0, 0)
        r.wait()
        assert not (host(r.outputs["y"]) == 14).any()
        gate.set()
        driver.cuStreamSynchronize(ctypes.c_void_p(stream))


def test_without_a_stream_and_without_torch_everything_is_waited_for(model, driver, stream):
    s = np.full(ROW, 3, np.float32)
    with model.request() as r:
        assert driver.cuMemcpyAsync(at(r.inputs["x"]), s.ctypes.data, s.nbytes, stream) == 0
        r.run()
        assert (host(r.outputs["y"]) == 6).all()


def test_a_slot_is_not_used_again_while_a_stream_reads_it(served, driver, stream, gate):
    kept = np.zeros(ROW, np.float32)
    with rb.connect("double", socket=served, wait=60, window=1) as m:
        r = m.request()
        host(r.inputs["x"])[:] = 4
        r.run(stream=0)  # not the stopped stream
        assert driver.cuMemcpyAsync(kept.ctypes.data, at(r.outputs["y"]), kept.nbytes, stream) == 0
        r.release(stream=stream)
        with pytest.raises(rb.Full):
            m.request(timeout=0.05)
        gate.set()
        with m.request(timeout=60) as r:
            host(r.inputs["x"])[:] = 5
            r.run()
    assert (kept == 8).all()


def test_streams_of_other_packages_are_accepted_and_other_objects_refused(model, driver, stream):
    class OfTorch:
        cuda_stream = stream

    class OfCuPy:
        ptr = stream

    class OfCuda:
        def __cuda_stream__(self):
            return 0, stream

    for s in (OfTorch(), OfCuPy(), OfCuda(), stream):
        with model.request() as r:
            host(r.inputs["x"])[:] = 1
            assert r.run(stream=s).outputs["first"] == 1
    with model.request() as r, pytest.raises(rb.Invalid, match="want a stream"):
        r.commit(stream="the first")


def test_arrays_on_the_wrong_side_are_refused_by_name(model):
    with pytest.raises(rb.Invalid, match="PyTorch, which is not installed"):
        model(np.zeros(ROW, np.float32))


class OnTheGPU:
    """An array like those of torch and CuPy."""

    dtype, shape = np.dtype("float32"), (16,)
    __cuda_array_interface__ = {"version": 3, "shape": (16,), "typestr": "<f4", "data": (4096, False)}


def test_an_array_on_a_gpu_is_not_copied_down_silently(echo):
    with rb.connect("echo", socket=echo) as m, pytest.raises(rb.Invalid, match="is on a GPU. Nothing is copied between them silently"):
        m(OnTheGPU())


def test_the_number_of_a_request_lives_as_long_as_its_commit_over_ctypes():
    seen = []

    class Library:
        def rb_commit_on_stream(self, handle, requests, count, stream, timeout, flags):
            others = [ctypes.c_uint64(0) for _ in range(100)]  # take the memory of freed objects
            seen.append((ctypes.c_uint64.from_address(requests).value, count, len(others)))
            return 0

    client = ctypes_path.Client.__new__(ctypes_path.Client)
    client._lib, client._on_device, client.stream = Library(), True, lambda given: 0
    client.commit_all([12345], 0, 0)
    assert seen == [(12345, 1, 100)]


def test_scattered_rows_on_a_device_are_refused_with_the_call_to_use(socket):
    refused = []

    @rb.worker("apart", inputs={"x": ("float32", (4,))}, outputs={"y": ("float32", (4,))}, memory="device", max_batch_size=2, wait_time=60)
    def apart(batch):
        try:
            batch.inputs["x"]
        except rb.Invalid as e:
            refused.append(str(e))
        for i in range(len(batch.runs)):
            batch.output_run("y", i)

    with serving(apart, socket), rb.connect("apart", socket=socket, wait=60, window=3) as m:
        a, b, c = (m.request() for _ in range(3))
        m.commit([a, c])
        a.wait()
        c.wait()
        for r in (a, b, c):
            r.release()
    assert refused and "input_run" in refused[0]


def mapped() -> int:
    """The number of device mappings of this process."""
    with open("/proc/self/maps") as f:
        return f.read().count("stub-cuda")


def test_a_connection_maps_the_memory_once_and_leaves_nothing_behind(served):
    gc.collect()  # objects of earlier tests
    assert mapped() == 0
    with serving(double, served):
        eventually(lambda: mapped() == 1)  # another process serves the model, too
        with rb.connect("double", socket=served, wait=60) as m, m.request() as r:
            host(r.inputs["x"])[:] = 1
            r.run()
            y = r.outputs["y"]
            assert mapped() == 2  # the worker's and the connection's
        assert mapped() == 2  # y keeps the mapping
        del m, r, y
        assert mapped() == 1
    gc.collect()
    assert mapped() == 0


@rb.worker("decode", inputs={"raw": ("uint8", (8,))}, outputs={"x": ("float32", (8,), "device:0")})
def decode(batch):
    for i in range(len(batch.runs)):
        host(batch.output_run("x", i))[:] = batch.input_run("raw", i)


@rb.worker("sum", inputs={"x": ("float32", (8,), "device:0")}, outputs={"s": ("float32", ())})
def summed(batch):
    for i in range(len(batch.runs)):
        batch.output_run("s", i)[:] = host(batch.input_run("x", i)).sum(1)


def test_stages_of_a_pipeline_hand_tensors_on_in_device_memory_and_its_clients_need_no_gpu(socket):
    text = declaration([decode, summed], None, {})
    with serving(decode.as_stage("staged", text), socket), serving(summed.as_stage("staged", text), socket):
        with rb.connect("staged", socket=socket, wait=60) as m:
            assert m(np.arange(8, dtype=np.uint8)) == 28
        code = "with rb.connect('staged') as m: print(m(np.arange(8, dtype=np.uint8)))"
        assert python(code, socket=socket, STUB_CUDA_GPUS="") == "28.0"


def test_a_thread_that_never_used_cuda_commits_too(model):
    answers = []

    def run() -> None:
        with model.request() as r:
            host(r.inputs["x"])[:] = 5
            answers.append(float(r.run().outputs["first"]))

    t = threading.Thread(target=run)
    t.start()
    t.join(60)
    assert answers == [5]


if __name__ == "__main__":
    device._torch = None
    double.run(wait=60)
