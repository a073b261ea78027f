# SPDX-License-Identifier: Apache-2.0
"""A detector that finds 0 to 16 boxes, and a recogniser that reads each box.

    python detect_and_read.py         # serves both models
    python detect_and_read.py ask     # 24 images through both

Images of one request may have different numbers of boxes, also none.
The boxes of all callers share the recogniser's batches.
"""

import sys

import numpy as np
import ringbatch as rb

SIZE, MOST_BOXES, CROP = 64, 16, 8


@rb.worker(
    "detector",
    inputs={"image": ("uint8", (SIZE, SIZE))},
    outputs={"boxes": ("int32", (f"<={MOST_BOXES}", 2))},  # y, x of a corner
    max_batch_size=8,
    wait_time=0.002,
)
def detect(batch):
    """A stand-in for a network: a box is where a cell of the image is not empty."""
    cells = batch.inputs["image"].reshape(-1, SIZE // CROP, CROP, SIZE // CROP, CROP).max((2, 4))
    return [np.argwhere(found)[:MOST_BOXES].astype("int32") * CROP for found in cells]  # one array per image


@rb.worker(
    "recogniser",
    inputs={"crop": ("uint8", (CROP, CROP))},
    outputs={"label": ("int64", ())},
    max_batch_size=64,
    wait_time=0.002,
)
def recognise(batch):
    return batch.inputs["crop"].max((1, 2)).astype("int64")


def read(images, detector, recogniser):
    """The labels in each image."""
    found = detector(images)
    crops = [image[y : y + CROP, x : x + CROP] for image, boxes in zip(images, found) for y, x in boxes]
    labels = iter(recogniser(np.stack(crops)).tolist() if crops else ())  # more rows than a batch holds are split
    return [[next(labels) for _ in boxes] for boxes in found]


def ask():
    rng = np.random.default_rng(0)
    images = np.zeros((24, SIZE, SIZE), "uint8")
    for i, image in enumerate(images):
        for cell in rng.choice(64, i % (MOST_BOXES + 1), replace=False):
            image[cell // 8 * CROP + 3, cell % 8 * CROP + 3] = 1 + cell
    with rb.connect("detector", wait=60) as detector, rb.connect("recogniser", wait=60) as recogniser:
        labels = read(images, detector, recogniser)
    wrong = [i for i, image in enumerate(images) if sorted(labels[i]) != sorted(image[image > 0].tolist())]
    counts = [len(found) for found in labels]
    print(f"{sum(counts)} boxes in {len(images)} images, {min(counts)} to {max(counts)} each, {len(wrong)} images wrong")


if __name__ == "__main__":
    if sys.argv[1:] == ["ask"]:
        ask()
    else:
        rb.serve([detect, recognise], processes=[1, 2])
