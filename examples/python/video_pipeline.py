# SPDX-License-Identifier: Apache-2.0
"""Several cameras, one detector: frames are written where the detector reads them.

    python examples/python/video_pipeline.py [cameras] [frames of each]

Every camera is a process. It decodes its next frame straight into shared memory while the
detector looks at the last one. A frame that comes too late is dropped.
"""

import argparse
import multiprocessing
import os
import signal
import tempfile

import numpy as np
import ringbatch as rb

HEIGHT, WIDTH = 120, 160


@rb.worker("detect", inputs={"frame": ("uint8", (HEIGHT, WIDTH, 3))}, outputs={"box": ("int32", (4,))}, max_batch_size=16)
def detect(batch):
    bright = batch.inputs["frame"].max(axis=3) > 200  # (rows, height, width)
    for row in range(batch.rows):
        y, x = np.nonzero(bright[row])
        batch.outputs["box"][row] = (x.min(), y.min(), x.max() + 1, y.max() + 1) if len(x) else (0, 0, 0, 0)


def decode(number, into):
    """Stands for a decoder that writes into given memory: a square that wanders."""
    into[...] = 16
    x, y = 3 * number % (WIDTH - 20), 2 * number % (HEIGHT - 20)
    into[y : y + 20, x : x + 20] = 255
    return x, y, x + 20, y + 20


def camera(frames):
    right = late = 0
    with rb.connect("detect", window=2, wait=60) as model:  # one is written while the other is looked at
        waiting = None
        for number in range(frames):
            request = model.request()
            box = decode(number, request.inputs["frame"])
            request.commit(timeout=5.0)
            if waiting:
                right, late = finish(*waiting, right, late)
            waiting = request, box
        right, late = finish(*waiting, right, late)
    return right, late


def finish(request, box, right, late):
    with request:
        try:
            request.wait()
        except (rb.Expired, rb.Overloaded):  # too late to be of use
            return right, late + 1
        return right + (tuple(request.outputs["box"]) == box), late


def positive(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: want 1 or more")
    return int(text)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cameras", type=positive, nargs="?", default=4)
    parser.add_argument("frames", type=positive, nargs="?", default=50)
    args = parser.parse_args()
    cameras, frames = args.cameras, args.frames
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("RINGBATCH_SOCKET", f"{folder}/broker.sock")
        server = multiprocessing.Process(target=rb.serve, args=(detect,), daemon=True)
        server.start()
        with multiprocessing.Pool(cameras, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
            ends = pool.map(camera, [frames] * cameras)
        seen = rb.stats()["models"][0]
        server.terminate()
        server.join()
    right, late = map(sum, zip(*ends))
    print(f"{right} of {cameras * frames} frames seen rightly, {late} too late, {seen['batches']} batches")


if __name__ == "__main__":
    main()
