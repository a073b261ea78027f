#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tensors in device memory on a real GPU: right answers, order, deaths, nothing left behind.

    python3 hack/gpu/device_check.py        # with RINGBATCH_BINARY and RINGBATCH_LIBRARY, as hack/gpu/device_ring.py

1. What Python hands out: views, calls, submit, asyncio, casts, refusals by name.
2. Order: producers whose stream is late, workers in other processes and streams, and never half a row; a producer that
   commits on another stream than it writes on is seen.
3. Deaths: the worker that allocated the memory and a producer are killed; every other request ends right.
4. nvidia-smi shows the same before and after.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback

import numpy as np
import ringbatch as rb
from ringbatch.binding import device

ROW = 150_528  # f32: 602,112 bytes
failures: list[str] = []


def check(what: str, holds: bool) -> None:
    print(("ok   " if holds else "FAIL ") + what, flush=True)
    if not holds:
        failures.append(what)


def refused(what: str, error: type[Exception], words: str, call) -> None:
    try:
        call()
    except error as e:
        check(f"{what}: {type(e).__name__}: {e}", words in str(e))
    except Exception as e:
        check(f"{what}: {type(e).__name__}: {e}", False)
    else:
        check(f"{what}: not refused", False)


# -- the workers, in processes of their own


@rb.worker(
    "spread", inputs={"x": ("float32", (ROW,), "device:0")}, outputs={"y": ("float32", (ROW,), "device:0"), "ends": ("float32", (2,))}, max_batch_size=16, slots=512
)
def spread(batch):
    """y is x + 1; ends are the smallest and the largest number of each row: they differ where half a row was read."""
    x = batch.inputs["x"]
    batch.outputs["y"][:] = x + 1
    batch.outputs["ends"][:] = device.torch().stack([x.amin(1), x.amax(1)], 1).cpu().numpy()


def serve() -> None:
    import torch

    torch.zeros(1, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        spread.run(wait=30)


# -- producers


def late(count: int, ordered: bool) -> int:
    """Rows of one number each, written in two halves by a stream that is late; how many came back as something else."""
    import torch

    wrong = 0
    with rb.connect("spread", wait=60, window=16) as m, torch.cuda.stream(torch.cuda.Stream()):
        other = torch.cuda.Stream()
        under_way: list[tuple[rb.Request, float]] = []
        for n in range(count):
            value = float(os.getpid() % 1000 * 10_000 + n)
            r = m.request()
            x = r.inputs["x"]
            torch.cuda._sleep(60_000)
            x[: ROW // 2].fill_(value)
            torch.cuda._sleep(60_000 if n % 16 else 8_000_000)  # some tens of microseconds, or some milliseconds
            x[ROW // 2 :].fill_(value)
            r.commit() if ordered else r.commit(stream=other)
            under_way.append((r, value))
            while len(under_way) > (8 if n + 1 < count else 0):
                r, value = under_way.pop(0)
                r.wait()
                right = (r.outputs["ends"] == value).all() and bool((r.outputs["y"][:: ROW // 7] == value + 1).all())
                wrong += not right
                r.release()
    return wrong


def calls() -> None:
    import torch

    with rb.connect("spread", wait=60, window=32) as m:
        x = torch.rand(ROW, device="cuda")
        with m.request() as r:
            v = r.inputs["x"]
            check(f"request() gives a tensor of torch: {tuple(v.shape)} {v.dtype} {v.device}", v.is_cuda and v.shape == (ROW,))
            inside = m._core.device.base <= v.data_ptr() < m._core.device.base + m._core.device.bytes
            check("it is the slot itself, also by DLPack", inside and torch.from_dlpack(v).data_ptr() == v.data_ptr())
            v.copy_(x)
            r.run()
            check("its answer is a view on the GPU, and the small one an array", torch.equal(r.outputs["y"], x + 1) and isinstance(r.outputs["ends"], np.ndarray))
            y = r.outputs["y"]
        check("what is over is empty", v.numel() == 0 and y.numel() == 0)
        out = m(x)
        check("model(x) on the GPU", out["y"].is_cuda and torch.equal(out["y"], x + 1) and out["ends"][0] == x.min().item())
        many = torch.rand(40, ROW, device="cuda")
        check("40 rows in pieces", torch.equal(m(many)["y"], many + 1))
        futures = [m.submit(row) for row in many]
        check("40 futures", all(torch.equal(f.result(30)["y"], row + 1) for f, row in zip(futures, many)))

        async def together():
            return await asyncio.gather(*(m.ainfer(row) for row in many))

        check("40 in asyncio", all(torch.equal(a["y"], row + 1) for a, row in zip(asyncio.run(together()), many)))
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(3_000_000)
            z = x * 2
            check("model(x) on a stream that is late", torch.equal(m(z)["y"], z + 1))
        refused("an array on the CPU", rb.Invalid, "is on the CPU", lambda: m(x.cpu().numpy()))
        refused("a tensor of another type", rb.DType, "expected torch.float32", lambda: m(x.half()))
        refused("a tensor of another shape", rb.Shape, "expected", lambda: m(x[:5]))
        array = device.DeviceArray(m._core.device, x.data_ptr(), (ROW,), "f32")
        check("a DeviceArray as torch's view and by DLPack", torch.equal(torch.as_tensor(array, device="cuda"), x) and torch.equal(torch.from_dlpack(array), x))
        check("what has __cuda_array_interface__ is taken", torch.equal(m(array)["y"], x + 1))
    with rb.connect("spread", cast=True) as m:
        check("cast=True takes an array of the CPU", torch.equal(m(x.cpu().numpy())["y"], x + 1))
        check("and another type", torch.equal(m(x.half())["y"], x.half().float() + 1))
    host_model(x)


def host_model(x) -> None:
    """A model in host memory, and a tensor on the GPU."""

    @rb.worker("host", inputs={"x": ("float32", (ROW,))}, outputs={"y": ("float32", (2,))})
    def host(batch):
        batch.outputs["y"][:] = batch.inputs["x"][:, :2]

    import threading

    stop = threading.Event()
    thread = threading.Thread(target=lambda: host.run(stop=stop, wait=10))
    thread.start()
    try:
        with rb.connect("host", wait=20) as m:
            refused("a tensor on the GPU into a model in host memory", rb.Invalid, "is on a GPU", lambda: m(x))
        with rb.connect("host", cast=True) as m:
            check("with cast=True it is copied", (m(x) == x[:2].cpu().numpy()).all())
    finally:
        stop.set()
        thread.join()


# -- everything


def used() -> int:
    out = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"], capture_output=True, text=True).stdout
    return int(out.split()[0])


def child(*role: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, __file__, *role], stdout=subprocess.PIPE, text=True)


def everything(folder: str) -> None:
    os.environ["RINGBATCH_SOCKET"] = socket = os.path.join(folder, "b.sock")
    broker = subprocess.Popen([rb.binary_path(), "broker", "--socket", socket, "--log_level", "error", "--drain_time", "1s"])
    workers = []
    try:
        while not os.path.exists(socket):
            time.sleep(0.01)
        workers.append(child("serve"))  # it allocates
        client = child("calls")
        print(client.communicate(timeout=60)[0], end="", flush=True)
        check("everything that Python hands out", client.returncode == 0)
        workers.append(child("serve"))
        producers = [child("late", "400", "ordered") for _ in range(3)]
        results = [p.communicate(timeout=90)[0].strip() for p in producers]
        check(f"three late producers, two workers: rows that were not whole: {results}", results == ["0"] * 3)
        careless = child("late", "200", "careless").communicate(timeout=90)[0].strip()
        check(f"a producer that commits on another stream is seen: {careless} of 200", careless not in ("", "0"))
        producers = [child("late", "1500", "ordered") for _ in range(3)]
        time.sleep(9)  # they are in the midst of it
        workers[0].send_signal(signal.SIGKILL)
        producers[0].send_signal(signal.SIGKILL)
        results = [p.communicate(timeout=90)[0].strip() for p in producers[1:]]
        check(f"the worker that allocated and a producer were killed; wrong rows of the others: {results}", results == ["0"] * 2)
        workers.append(child("serve"))
        after = child("late", "100", "ordered").communicate(timeout=90)[0].strip()
        check(f"and a new worker and a new producer: {after}", after == "0")
    finally:
        for p in [*workers, broker]:
            p.terminate()
        for p in [*workers, broker]:
            try:
                p.wait(20)
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait()


def main() -> int:
    role = sys.argv[1:]
    if role == ["serve"]:
        serve()
    elif role == ["calls"]:
        calls()
        return len(failures) > 0
    elif role[:1] == ["late"]:
        print(late(int(role[1]), role[2] == "ordered"))
    else:
        if device.torch() is None or not device.torch().cuda.is_available():
            print("no GPU here")
            return 1
        before = used()
        with tempfile.TemporaryDirectory(prefix="rb") as folder:
            os.chmod(folder, 0o700)
            try:
                everything(folder)
            except Exception:
                traceback.print_exc()
                failures.append("ended by an exception")
        time.sleep(1)
        check(f"GPU memory in use, MiB: {before} before, {used()} after", used() <= before)
        print(f"{len(failures)} failures", *failures, sep="\n", flush=True)
    return len(failures) > 0


if __name__ == "__main__":
    sys.exit(main())
