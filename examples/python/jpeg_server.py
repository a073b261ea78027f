# SPDX-License-Identifier: Apache-2.0
"""JPEG files of any length share a batch, without padding.

    python jpeg_server.py                  # serves
    python jpeg_server.py photo.jpg ...    # asks: the mean colour of each
"""

import io
import sys

import numpy as np
import ringbatch as rb
from PIL import Image, UnidentifiedImageError

MOST_BYTES = 1 << 20


@rb.worker(
    "mean_colour",
    inputs={"jpeg": ("uint8", (f"<={MOST_BYTES}",))},
    outputs={"rgb": ("float32", (3,))},
    max_batch_size=32,
    wait_time=0.005,
    slots=256,
    ragged=True,
)
def mean_colour(batch):
    for row, jpeg in enumerate(batch.inputs["jpeg"]):  # a view of exactly the sent bytes
        try:
            picture = Image.open(io.BytesIO(jpeg)).convert("RGB")
            batch.outputs["rgb"][row] = np.asarray(picture).mean((0, 1))
        except (UnidentifiedImageError, OSError) as e:
            batch.fail(batch.request_of(row), f"not a picture: {e}")  # only this request fails


def ask(files):
    with rb.connect("mean_colour", window=32, wait=60) as model:
        answers = []
        for name in files:
            with open(name, "rb") as f:
                answers.append((name, model.submit(f.read())))
        for name, answer in answers:
            try:
                print(name, *answer.result().round().astype(int))
            except rb.Failed as e:
                print(name, e)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        ask(sys.argv[1:])
    else:
        rb.serve(mean_colour)
