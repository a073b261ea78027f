# SPDX-License-Identifier: Apache-2.0
"""A reader of lines of text that goes round: one letter of each line a round, until the line ends.

    python examples/python/read_lines.py [clients] [lines of each]

The lines differ in length. A line that is read leaves its lane at once, and the next line takes it. The "network"
compares the columns under its eye with a font, so that answers can be checked; a recurrent decoder has the same form.
"""

import multiprocessing as mp
import signal
import sys

import numpy as np
import ringbatch as rb

LANES, HEIGHT, WIDTH, MOST = 32, 8, 6, 60  # of a letter; letters of a line
LETTERS = "abcdefghijklmnopqrstuvwxyz "
FONT = np.random.default_rng(0).integers(0, 2, (len(LETTERS), HEIGHT, WIDTH)).astype("float32")


def picture(text: str) -> np.ndarray:
    """An image of the text, with noise; white behind its end."""
    image = np.full((HEIGHT, WIDTH * MOST), 1.5, "float32")
    image[:, : WIDTH * len(text)] = np.concatenate([FONT[LETTERS.index(c)] for c in text], axis=1)
    return image + np.random.default_rng(len(text)).normal(0, 0.2, image.shape).astype("float32")


@rb.worker("lines", inputs={"image": ("float32", (HEIGHT, WIDTH * MOST))}, outputs={"text": ("uint8", (f"<={MOST}",)), "sure": ("float32", ())},
           lanes=LANES)  # fmt: skip
class Reader:
    def setup(self):
        self.image = np.zeros((LANES, HEIGHT, WIDTH * (MOST + 1)), "float32")  # each lane has its own state
        self.eye, self.sure = np.zeros(LANES, int), np.zeros(LANES, "float32")

    def start(self, lanes, rows):  # new lines begin in these lanes
        self.image[lanes], self.eye[lanes], self.sure[lanes] = 1.5, 0, 1
        self.image[lanes, :, :-WIDTH] = rows.inputs["image"]

    def step(self, lanes):  # one letter of each busy lane
        columns = self.eye[:, None] * WIDTH + np.arange(WIDTH)
        seen = np.take_along_axis(self.image, columns[:, None, :].repeat(HEIGHT, 1), axis=2)
        distance = np.abs(seen[:, None] - FONT).mean(axis=(2, 3))
        self.sure = np.minimum(self.sure, 1 - distance.min(axis=1))
        self.eye[lanes] += 1
        after = np.minimum(self.eye * WIDTH, self.image.shape[2] - WIDTH)
        done = np.take_along_axis(self.image.mean(axis=1), after[:, None] + np.arange(WIDTH), axis=1).mean(axis=1) > 1.2
        return {"text": np.frombuffer(LETTERS.encode(), "uint8")[distance.argmin(axis=1)], "sure": self.sure}, done


def client(number: int, lines: int) -> int:
    """Sends lines, and counts the right answers."""
    rng, right = np.random.default_rng(number), 0
    with rb.connect("lines", wait=60) as model:
        for _ in range(lines):
            text = "".join(rng.choice(list(LETTERS), min(MOST, 1 + int(rng.lognormal(2.5, 0.8)))))
            answer = model(picture(text), timeout=30)
            right += bytes(answer["text"]).decode() == text and answer["sure"] > 0.5
    return right


if __name__ == "__main__":
    clients, lines = (int(a) for a in (sys.argv[1:] or (8, 50)))
    server = mp.Process(target=rb.serve, args=(Reader,), daemon=True)
    server.start()
    with mp.Pool(clients, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        right = sum(pool.starmap(client, [(i, lines) for i in range(clients)]))
    server.terminate()
    server.join()
    print(f"{right} of {clients * lines} lines were read right")
