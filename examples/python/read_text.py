# SPDX-License-Identifier: Apache-2.0
"""Reads text in images with two models: a detector finds words, a recogniser reads each of them.

    python read_text.py                # serves detector, recogniser and read_text
    python read_text.py ask            # one image through it

The worker of the model "read_text" is a client of the two others: it sends 0 to 8
crops of each image to the recogniser, and crops of different images share batches.
The networks have the shapes of a well-known tutorial (an EAST-like detector, a
convolutional recogniser with a CTC head), small and with random weights: they read
nonsense at a realistic cost. They run on PyTorch if it is installed, else on NumPy.
"""

import asyncio
import sys

import numpy as np
import ringbatch as rb

HEIGHT, WIDTH = 96, 192  # of an image
CROP = (32, 100)  # of a word
MOST_WORDS, LETTERS = 8, "-abcdefghijklmnopqrstuvwxyz0123456789"  # the first is CTC's blank
STEPS = CROP[1] // 4

# -- networks: layers of 3 × 3 convolutions


def weights(channels, seed):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((o, i, 3, 3)).astype("float32") * np.float32((2 / (9 * i)) ** 0.5) for i, o in zip(channels, channels[1:])]


try:
    import torch

    torch.set_num_threads(1)  # one core for each instance

    def conv(x, w, stride=1):
        with torch.inference_mode():
            return torch.relu(torch.nn.functional.conv2d(torch.from_numpy(x), torch.from_numpy(w), stride=stride, padding=1)).numpy()
except ModuleNotFoundError:

    def conv(x, w, stride=1):
        x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        patches = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))[:, :, ::stride, ::stride]
        return np.maximum(np.einsum("nchwij,ocij->nohw", patches, w, optimize=True), 0)


class Detector:
    """Down by 16 and up again to a quarter, merging on the way; then a map of scores and one of box sizes."""

    down, up, heads = weights([3, 8, 16, 32, 32], 1), weights([64, 32, 16], 2)[:1] + weights([48, 16], 3), weights([16, 3], 4)[0]

    def __call__(self, images):
        x, levels = images.transpose(0, 3, 1, 2).astype("float32") / 255, []
        for w in self.down:
            x = conv(x, w, 2)
            levels.append(x)
        x = conv(np.concatenate([levels[3].repeat(2, 2).repeat(2, 3), levels[2]], 1), self.up[0])
        x = conv(np.concatenate([x.repeat(2, 2).repeat(2, 3), levels[1]], 1), self.up[1])
        return conv(x, self.heads)  # [n, score and two sizes, HEIGHT / 4, WIDTH / 4]


def boxes_of(maps):
    """The best scores that do not touch each other: y, x, height, width."""
    score, sizes = maps[0].copy(), maps[1:]
    enough, found = score.mean() + 2 * score.std(), []
    while len(found) < MOST_WORDS and score.max() > enough:
        y, x = np.unravel_index(score.argmax(), score.shape)
        h, w = 12 + int(4 * min(sizes[0, y, x], 3)), 32 + int(8 * min(sizes[1, y, x], 4))
        found.append((min(4 * y, HEIGHT - h), min(4 * x, WIDTH - w), h, w))
        score[max(0, y - 4) : y + 5, max(0, x - 8) : x + 9] = -1
    return np.array(found, "int32").reshape(-1, 4)


class Recogniser:
    """Convolutions down to one row of features, a letter for each column."""

    layers, head = weights([1, 16, 32, 32, 32, 32], 5), np.random.default_rng(6).standard_normal((32, len(LETTERS))).astype("float32")

    def __call__(self, crops):
        x = crops[:, None].astype("float32") / 255
        for i, w in enumerate(self.layers):
            x = conv(x, w, 2 if i < 2 else 1)
        return x.mean(2).transpose(0, 2, 1) @ self.head  # [n, STEPS, letters]


# -- the two models


@rb.worker(
    "detector",
    inputs={"image": ("uint8", (HEIGHT, WIDTH, 3))},
    outputs={"boxes": ("int32", (f"<={MOST_WORDS}", 4))},
    max_batch_size=16,
)
class Detect:
    def setup(self):
        self.net = Detector()

    def __call__(self, batch):
        return [boxes_of(maps) for maps in self.net(batch.inputs["image"])]


@rb.worker("recogniser", inputs={"word": ("uint8", CROP)}, outputs={"letters": ("int32", (STEPS,))}, max_batch_size=16)
class Recognise:
    def setup(self):
        self.net = Recogniser()

    def __call__(self, batch):
        return self.net(batch.inputs["word"]).argmax(2).astype("int32")


# -- the model that calls both


def crop(image, box):
    y, x, h, w = box
    rows, columns = y + np.arange(CROP[0]) * h // CROP[0], x + np.arange(CROP[1]) * w // CROP[1]
    return image[rows][:, columns].mean(2).astype("uint8")


@rb.worker(
    "read_text",
    inputs={"image": ("uint8", (HEIGHT, WIDTH, 3))},
    outputs={"words": ("uint8", (f"<={MOST_WORDS}", STEPS))},
    max_batch_size=1,
    wait_time=0,
    concurrency=16,
)
class ReadText:
    async def setup(self):
        self.detector, self.recogniser = rb.connect("detector", wait=60), rb.connect("recogniser", wait=60)

    async def __call__(self, batch):
        return list(await asyncio.gather(*map(self.read, batch.inputs["image"])))

    async def read(self, image):
        boxes = await self.detector.ainfer(image)
        if not len(boxes):
            return np.zeros((0, STEPS), "uint8")  # no words found
        letters = await self.recogniser.ainfer(np.stack([crop(image, box) for box in boxes]))
        return np.stack([as_text(row) for row in letters])


def as_text(letters):
    """CTC: drops repeated letters and blanks."""
    text = "".join(LETTERS[a] for a, b in zip(letters, [-1, *letters]) if a != b and a)
    return np.frombuffer(text.encode().ljust(STEPS, b"\0"), "uint8")


# -- a caller


def image(seed=0):
    """Dark strokes on light ground."""
    rng = np.random.default_rng(seed)
    made = np.full((HEIGHT, WIDTH, 3), 230, "uint8")
    for _ in range(40):
        y, x = rng.integers(0, HEIGHT - 12), rng.integers(0, WIDTH - 12)
        made[y : y + rng.integers(2, 12), x : x + rng.integers(2, 12)] = rng.integers(0, 120)
    return made


if __name__ == "__main__":
    if sys.argv[1:] == ["ask"]:
        with rb.connect("read_text", wait=60) as model:
            words = [bytes(w).rstrip(b"\0").decode() for w in model(image())]
        print(f"{len(words)} words: {' '.join(words)}")
    else:
        rb.serve([Detect, Recognise, ReadText])
