# SPDX-License-Identifier: Apache-2.0
"""JPEG bytes in, the five best classes out: how much of its bound does the GPU stage keep beside the decoding?

    python bench/python/image_pipeline.py [--decoders 14] [--nets 2] [--seconds 5] [--size 224x224] [--clients 256] [--waits auto …] [-- FLAGS of ringbatch torch]

decode (Pillow, one process for each core but two) → net (ResNet-50 by `ringbatch torch` under
a broker's configuration) → top5, in one ring. The bound is the same module in as
many processes, each fed full batches of its own without a broker, in turns
with the load, for each wait of the net's stage. Also what the decoders do by themselves: where they are the
limit the GPU has to wait. Needs the installed package, Pillow, torch and torchvision.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import ringbatch as rb

HERE = Path(__file__).resolve().parent
SIDE, CLASSES = 224, 1000
IMAGE = f"image:u8[{SIDE},{SIDE},3]"


# -- the stages


def make():
    """ResNet-50 on pixels: they are scaled on the device, so a picture is 150,528 bytes and not four times that."""
    import torch
    import torchvision

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = torchvision.models.resnet50(weights=None).eval().to(memory_format=torch.channels_last)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            pixels = image.permute(0, 3, 1, 2).to(self.net.fc.weight.dtype)  # channels last as it lies
            return self.net((pixels / 255 - 0.45) / 0.225).float()

    return Net()


def decode(jpeg: np.ndarray, to: np.ndarray) -> None:
    from PIL import Image

    with Image.open(io.BytesIO(jpeg)) as picture:
        picture.draft("RGB", (SIDE, SIDE))  # large ones are decoded at half the size, or a quarter
        picture = picture if picture.mode == "RGB" else picture.convert("RGB")
        to[:] = np.asarray(picture if picture.size == (SIDE, SIDE) else picture.resize((SIDE, SIDE)))


def play(stage: str) -> None:
    if stage == "decode":

        @rb.worker("images/decode", inputs={"jpeg": ("uint8", ("<=262144",))}, outputs={"image": ("uint8", (SIDE, SIDE, 3))}, ragged=True)
        def run(batch):
            for i, jpeg in enumerate(batch.inputs["jpeg"]):
                decode(jpeg, batch.outputs["image"][i])
    else:

        @rb.worker("images/top5", inputs={"scores": ("float32", (CLASSES,))}, outputs={"classes": ("int64", (5,))})
        def run(batch):
            scores = batch.inputs["scores"]
            best = np.argpartition(-scores, 5, axis=1)[:, :5]
            return np.take_along_axis(best, np.argsort(-np.take_along_axis(scores, best, 1), axis=1), 1)

    run.run(wait=60)


def configuration(a: argparse.Namespace) -> str:
    python, me = json.dumps(sys.executable), json.dumps(str(HERE / "image_pipeline.py"))
    net = json.dumps([rb.binary_path(), "torch", a.net, "--input", IMAGE, "--output", f"scores:f32[{CLASSES}]", *a.flags])
    return f"""
[[model]]
name = "images"
inputs = ["jpeg:u8[<=262144]"]
ragged = true
slots = {a.slots}

[[model.stage]]
name = "decode"
inputs = ["jpeg"]
outputs = ["{IMAGE}"]
max_batch_size = 4
wait_time = 0
[[model.stage.worker]]
command = [{python}, {me}, "--play", "decode"]
instances = {a.decoders}
env = {{ OMP_NUM_THREADS = "1" }}

[[model.stage]]
name = "net"
inputs = ["image"]
outputs = ["scores:f32[{CLASSES}]"]
max_batch_size = {a.batch}
[[model.stage.worker]]
command = {net}
instances = {a.nets}
env = {{ OMP_NUM_THREADS = "1" }}

[[model.stage]]
name = "top5"
inputs = ["scores"]
outputs = ["classes:i64[5]"]
max_batch_size = 64
[[model.stage.worker]]
command = [{python}, {me}, "--play", "top5"]
env = {{ OMP_NUM_THREADS = "1" }}
"""


# -- the bound


class Bound:
    """A process of `ringbatch torch --alone`: a byte asks for one more full batch."""

    def __init__(self, a: argparse.Namespace, env: dict[str, str]) -> None:
        command = [rb.binary_path(), "torch", a.net, "--input", IMAGE, "--alone", str(a.batch), *a.flags]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, bufsize=0)
        self.rows, self.images = a.batch, 0

    def run(self, until: float) -> None:
        self.images = 0
        while time.monotonic() < until:
            self.process.stdin.write(b".")
            while self.process.stdout.read(1) not in (b".", b""):
                pass  # what it says of itself
            self.images += self.rows


def bound_of(bounds: list[Bound], seconds: float) -> float:
    began = time.monotonic()
    threads = [threading.Thread(target=b.run, args=(began + seconds,)) for b in bounds]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return sum(b.images for b in bounds) / (time.monotonic() - began)


# -- the load


def pictures(size: str) -> np.ndarray:
    """Some JPEG files of that size, as rows of bytes; what is behind a file's end decoders ignore."""
    from PIL import Image

    width, height = map(int, size.split("x"))
    rng, files = np.random.default_rng(0), []
    for _ in range(16):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), "uint8")).resize((width, height), Image.Resampling.BICUBIC)
        noisy = np.clip(np.asarray(coarse, "int16") + rng.integers(-12, 13, (height, width, 3)), 0, 255).astype("uint8")
        file = io.BytesIO()
        Image.fromarray(noisy).save(file, "JPEG", quality=85)
        files.append(file.getvalue())
    longest = max(map(len, files))
    return np.stack([np.frombuffer(f.ljust(longest, b"\0"), "uint8") for f in files])


def stats(socket: str) -> dict[str, dict]:
    answer = subprocess.run([rb.binary_path(), "stats", "--json", "--socket", socket], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return {m["name"]: m for m in json.loads(answer.stdout or "{}").get("models") or []}


def load(socket: str, images: str, wait: str, a: argparse.Namespace) -> dict:
    subprocess.run([rb.binary_path(), "set", "images/net", f"wait_time={wait}", "--socket", socket], check=True, stdout=subprocess.DEVNULL)
    before = stats(socket)["images/net"]
    flags = ["--clients", str(a.clients), "--in", f"jpeg={images}", "--warmup", "1", "--seconds", str(a.seconds), "--json"]
    result = json.loads(subprocess.check_output([rb.binary_path(), "bench", "images", "--socket", socket, *flags]))
    after, latency = stats(socket)["images/net"], result["latency_ms"]
    rows = (after["rows"] - before["rows"]) / (after["batches"] - before["batches"])
    return {"images_per_s": result["throughput"], "p50_ms": latency["p50"], "p99_ms": latency["p99"], "rows_per_batch": rows}


def decoding(files: np.ndarray, seconds: float) -> None:
    """What one process decodes, prints images/s."""
    to, n, begun = np.empty((SIDE, SIDE, 3), "uint8"), 0, time.monotonic()
    while time.monotonic() - begun < seconds:
        decode(files[n % len(files)], to)
        n += 1
    print(n / (time.monotonic() - begun))


def main() -> None:
    argv, _, flags = " ".join(sys.argv[1:]).partition(" -- ")
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--decoders", type=int, default=max(1, len(os.sched_getaffinity(0)) - 2))
    p.add_argument("--net", default="image_pipeline:make", help="what makes the net")
    p.add_argument("--nets", type=int, default=2)
    p.add_argument("--batch", type=int, default=32, help="rows of the net's largest batch")
    p.add_argument("--clients", type=int, default=256)
    p.add_argument("--waits", nargs="+", default=["auto"], help="wait_time of the net's stage")
    p.add_argument("--slots", type=int, default=512)
    p.add_argument("--seconds", type=float, default=5)
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--size", default="224x224", help="of the JPEG files")
    p.add_argument("--play", choices=("decode", "top5"), help=argparse.SUPPRESS)
    p.add_argument("--decoding", help=argparse.SUPPRESS)
    a = p.parse_args(argv.split())
    a.flags = flags.split()
    if a.play:
        return play(a.play)
    if a.decoding:
        return decoding(np.load(a.decoding), a.seconds)
    with tempfile.TemporaryDirectory(prefix="rb") as folder:
        os.chmod(folder, 0o700)
        socket, images, toml = (str(Path(folder, n)) for n in ("b.sock", "jpeg.npy", "b.toml"))
        files = pictures(a.size)
        np.save(images, files)
        Path(toml).write_text(configuration(a))
        alone = [subprocess.Popen([sys.executable, __file__, "--decoding", images, "--seconds", "2"], stdout=subprocess.PIPE) for _ in range(a.decoders)]
        decoded = sum(float(d.communicate()[0]) for d in alone)
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(paths), "RINGBATCH_SOCKET": socket}
        broker = subprocess.Popen([rb.binary_path(), "broker", "--config", toml, "--socket", socket, "--log_level", "warn"], env=env)
        bounds = [Bound(a, {**env, "OMP_NUM_THREADS": "1"}) for _ in range(a.nets)]
        try:
            while len(stats(socket).get("images/net", {}).get("workers") or []) < a.nets:
                assert broker.poll() is None, "the broker ended"
                time.sleep(0.2)
            bound_of(bounds, 1)
            found = {wait: [(bound_of(bounds, a.seconds), load(socket, images, wait, a)) for _ in range(a.rounds)] for wait in a.waits}
        finally:
            for process in [*(b.process for b in bounds), broker]:
                process.terminate()
                process.wait()
    print(f"{files.shape[1]:,} bytes a JPEG of {a.size}; {a.decoders} processes that only decode: {decoded:,.0f} images/s")
    for wait, rounds in found.items():
        bound = statistics.median(b for b, _ in rounds)
        result = {key: statistics.median(r[key] for _, r in rounds) for key in rounds[0][1]}
        shares = ", ".join(f"{r['images_per_s'] / b:.1%}" for b, r in rounds)
        done = result["images_per_s"]
        print(f"wait_time {wait}: {done:,.0f} images/s, {done / bound:.1%} of the {bound:,.0f} of the net's {a.nets} processes by themselves (rounds {shares}), {done / decoded:.1%} of the decoders'; "
              f"{result['rows_per_batch']:.1f} rows a batch of the net, p50 {result['p50_ms']:.1f} ms, p99 {result['p99_ms']:.1f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
