# SPDX-License-Identifier: Apache-2.0
"""JPEG files in, the five best classes out: three stages in one ring.

    python image_pipeline.py                # serves; needs Pillow
    python image_pipeline.py photo.jpg ...  # a producer: sends the files' bytes

decode (CPU processes, one image after the other) → net (ResNet-50 on the GPU
where torchvision and a GPU are there, else a small model in NumPy; large
batches) → top5 (CPU). The picture stays in the slot of its request: decode writes
150,528 bytes, net reads them there, and the producer waits once.
Pixels stay bytes until they are on the GPU, which scales them.
"""

import io
import os
import sys

import numpy as np
import ringbatch as rb
from PIL import Image

CLASSES = 1000


@rb.worker("decode", inputs={"jpeg": ("uint8", ("<=262144",))}, outputs={"image": ("uint8", (224, 224, 3))},
    ragged=True, max_batch_size=4, wait_time=0)
def decode(batch):
    for i, jpeg in enumerate(batch.inputs["jpeg"]):
        try:
            with Image.open(io.BytesIO(jpeg)) as picture:
                picture.draft("RGB", (224, 224))  # decodes a large picture at a fraction of its size
                pixels = np.asarray(picture.convert("RGB").resize((224, 224)))
        except OSError as e:  # only this request fails
            batch.fail(i, f"no picture: {e}")
            continue
        batch.outputs["image"][i] = pixels


@rb.worker("net", inputs={"image": ("uint8", (224, 224, 3))}, outputs={"scores": ("float32", (CLASSES,))}, max_batch_size=32)
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
    net = torchvision.models.resnet50(weights=None).half().cuda().eval().to(memory_format=torch.channels_last)

    @torch.inference_mode()
    def run(images):
        pixels = torch.tensor(images, device="cuda").permute(0, 3, 1, 2)  # channels last, without a copy
        return net(pixels.half() / 255).float().cpu().numpy()

    return run


def _small():
    """The mean of each of 14 × 14 fields, and one layer."""
    weights = np.random.default_rng(1).standard_normal((3 * 14 * 14, CLASSES), np.float32)
    return lambda images: (images.reshape(-1, 14, 16, 14, 16, 3).mean((2, 4), "float32") / 255).reshape(len(images), -1) @ weights


@rb.worker("top5", inputs={"scores": ("float32", (CLASSES,))}, outputs={"classes": ("int64", (5,)), "values": ("float32", (5,))},
    max_batch_size=64)
def top5(batch):
    scores = batch.inputs["scores"]
    best = np.argsort(-scores, axis=1)[:, :5]
    return {"classes": best, "values": np.take_along_axis(scores, best, axis=1)}


if len(sys.argv) > 1 and not os.environ.get("RINGBATCH_CHILD"):
    with rb.connect("images", wait=60) as model:
        for name in sys.argv[1:]:
            with open(name, "rb") as f:
                try:
                    print(name, *model(f.read())["classes"])
                except rb.Failed as e:
                    print(name, e)
else:
    rb.pipeline("images", [decode, Net, top5], processes=[2, 1, 1], slots=128)
