# SPDX-License-Identifier: Apache-2.0
"""JPEG files in, the five best classes out: three stages in one ring.

    python image_pipeline.py                # serves; needs Pillow
    python image_pipeline.py photo.jpg ...  # a producer: sends the files' bytes

decode (CPU processes, one image after the other) → net (ResNet-50 on the GPU
where torchvision and a GPU are there, else a small model in NumPy; large
batches) → top5 (CPU). The picture never leaves the slot that the bytes came in:
602,112 bytes are written by decode and read by net, and the producer waits once.
"""

import io
import os
import sys

import numpy as np
import ringbatch as rb
from PIL import Image

CLASSES = 1000


@rb.worker(
    "decode", inputs={"jpeg": ("uint8", ("<=262144",))}, outputs={"image": ("float32", (3, 224, 224))}, ragged=True, max_batch_size=4, wait_time=0
)
def decode(batch):
    for i, jpeg in enumerate(batch.inputs["jpeg"]):
        try:
            with Image.open(io.BytesIO(np.asarray(jpeg))) as picture:
                pixels = np.asarray(picture.convert("RGB").resize((224, 224)), np.float32)
        except OSError as e:  # this request fails, its neighbours do not
            batch.fail(i, f"no picture: {e}")
            continue
        batch.outputs["image"][i] = pixels.transpose(2, 0, 1) / 255


@rb.worker("net", inputs={"image": ("float32", (3, 224, 224))}, outputs={"scores": ("float32", (CLASSES,))}, max_batch_size=32)
class Net:
    def setup(self):  # in the worker's process, before it attaches
        self.run = _resnet50() or _small()

    def forward(self, batch):
        return self.run(batch.inputs["image"])


def _resnet50():
    try:
        import torch
        import torchvision
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    net = torchvision.models.resnet50(weights=None).half().cuda().eval()

    def run(images):
        with torch.inference_mode():
            return net(torch.from_numpy(np.ascontiguousarray(images)).cuda().half()).float().cpu().numpy()

    return run


def _small():
    """The mean of each of 14 × 14 fields, and one layer."""
    weights = np.random.default_rng(1).standard_normal((3 * 14 * 14, CLASSES), np.float32)
    return lambda images: images.reshape(-1, 3, 14, 16, 14, 16).mean((3, 5)).reshape(len(images), -1) @ weights


@rb.worker("top5", inputs={"scores": ("float32", (CLASSES,))}, outputs={"classes": ("int64", (5,)), "values": ("float32", (5,))}, max_batch_size=64)
def top5(batch):
    scores = batch.inputs["scores"]
    best = np.argsort(-scores, axis=1)[:, :5]
    return {"classes": best, "values": np.take_along_axis(scores, best, axis=1)}


if len(sys.argv) > 1 and not os.environ.get("RINGBATCH_CHILD"):
    with rb.connect("images", wait=30) as model:
        for name in sys.argv[1:]:
            with open(name, "rb") as f:
                try:
                    print(name, *model(f.read())["classes"])
                except rb.Failed as e:
                    print(name, e)
else:
    rb.pipeline("images", [decode, Net, top5], processes=[2, 1, 1], slots=128)
