# SPDX-License-Identifier: Apache-2.0
"""A streaming recogniser: state from chunk to chunk (a sequence), and a round for each frame of a chunk (lanes).

    python examples/python/recognise.py [speakers] [sentences of each]

Each chunk has another number of frames, and a speaker gets letters as parts, while later frames of the chunk are heard.
The "network" compares a frame with the sounds of letters; a letter that goes on is one letter, as in CTC and transducers,
also over the end of a chunk: that is the state. In the second half of the run, clients call for each frame instead.
"""

import multiprocessing as mp
import signal
import sys
import time

import numpy as np
import ringbatch as rb

LANES, SAMPLES, MOST = 16, 80, 40  # samples of a frame; frames of a chunk
LETTERS = "abcdefghijklmnopqrstuvwxyz "
SOUNDS = np.random.default_rng(1).normal(0, 1, (1 + len(LETTERS), SAMPLES)).astype("float32")  # the first one is silence


@rb.worker("speech", inputs={"frames": ("float32", (f"<={MOST}", SAMPLES))}, outputs={"text": ("uint8", (f"<={MOST}",))},
           state={"last": ("int32", ())}, lanes=LANES)  # fmt: skip
class Recogniser:
    def setup(self):
        self.frames = [np.zeros((0, SAMPLES), "float32")] * LANES
        self.at, self.last = np.zeros(LANES, int), np.zeros(LANES, "int32")

    def start(self, lanes, rows):  # a new sequence has a state of zero: silence
        for lane, frames in zip(lanes, rows.inputs["frames"]):
            self.frames[lane] = frames
        self.at[lanes], self.last[lanes] = 0, rows.state["last"]
        return {lane: ValueError("a chunk without a frame") for lane in lanes if not len(self.frames[lane])}

    def step(self, lanes):  # one frame of each busy lane
        heard = np.stack([self.frames[n][self.at[n]] for n in lanes])
        sounds = (heard @ SOUNDS.T).argmax(axis=1)
        new = (sounds != self.last[lanes]) & (sounds > 0)
        self.last[lanes] = sounds
        self.at[lanes] += 1
        text = [np.frombuffer(LETTERS[s - 1].encode() if letter else b"", "uint8") for s, letter in zip(sounds, new)]
        return {"text": text, "last": self.last[lanes]}, np.array([self.at[n] == len(self.frames[n]) for n in lanes])


@rb.worker("speech_frame", inputs={"frame": ("float32", (SAMPLES,))}, outputs={"letter": ("uint8", ())}, state={"last": ("int32", ())},
           max_batch_size=LANES)  # fmt: skip
def one_frame(batch):
    """The same for one frame: the caller loops."""
    sounds = (batch.inputs["frame"] @ SOUNDS.T).argmax(axis=1)
    new = (sounds != batch.state["last"]) & (sounds > 0)
    batch.state["last"] = sounds
    return {"letter": np.where(new, np.frombuffer(b"\0" + LETTERS.encode(), "uint8")[sounds], 0)}


def spoken(text: str, rng: np.random.Generator) -> np.ndarray:
    """The frames of a text: each letter is 1 to 4 frames long, and silence stands between equal ones."""
    sounds = []
    for before, c in zip(" " + text, text):
        sounds += [0] * (before == c) + [1 + LETTERS.index(c)] * int(rng.integers(1, 5))
    return SOUNDS[sounds] + rng.normal(0, 0.3, (len(sounds), SAMPLES)).astype("float32")


def speaker(number: int, sentences: int, lanes: bool) -> tuple:
    """Speaks sentences in chunks; counts those that were understood, and times the answers to chunks."""
    rng, right, took = np.random.default_rng(number), 0, []
    with rb.connect("speech" if lanes else "speech_frame", wait=60) as model:
        for _ in range(sentences):
            text = "".join(rng.choice(list(LETTERS), 30))
            frames, understood = spoken(text, rng), b""
            with model.sequence() as seq:
                while len(frames):
                    chunk, frames = np.split(frames, [int(rng.integers(1, MOST + 1))])
                    began = time.monotonic()
                    if lanes:
                        before = understood
                        for letters, restarted in seq.stream(chunk, timeout=30):
                            understood = (before if restarted else understood) + bytes(letters)
                    else:
                        understood += bytes(int(seq.step(frame, timeout=30)) for frame in chunk).replace(b"\0", b"")
                    took.append(time.monotonic() - began)
            right += understood.decode() == text
    return right, took


def main() -> None:
    speakers, sentences = (int(a) for a in (sys.argv[1:] or (16, 10)))
    server = mp.Process(target=rb.serve, args=([Recogniser, one_frame],), daemon=True)
    server.start()
    with mp.Pool(speakers, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        for lanes, way in ((True, "in lanes"), (False, "by a call for each frame")):
            rights, times = zip(*pool.starmap(speaker, [(i, sentences, lanes) for i in range(speakers)], chunksize=1))
            p50, p95 = 1e3 * np.percentile(np.concatenate(times), (50, 95))
            print(f"{sum(rights)} of {speakers * sentences} sentences were understood {way}: a chunk took {p50:.1f} ms (p50), {p95:.1f} ms (p95)")
    server.terminate()
    server.join()


if __name__ == "__main__":
    main()
