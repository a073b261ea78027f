# SPDX-License-Identifier: Apache-2.0
"""Streaming audio: microphones send chunks of 10 ms, and a filter goes on where the last chunk ended.

    python examples/python/streaming_audio.py [microphones] [chunks of each]

The state of a stream is the end of its last chunk, and its loudness. Chunks of all microphones share batches.
"""

import multiprocessing as mp
import signal
import sys

import numpy as np
import ringbatch as rb

CHUNK, TAPS = 160, 64  # 10 ms at 16 kHz; a filter that looks 4 ms back
LOW = np.hamming(TAPS).astype("float32") / np.hamming(TAPS).sum(dtype="float32")


@rb.worker("lowpass", inputs={"chunk": ("float32", (CHUNK,))}, outputs={"y": ("float32", (CHUNK,)), "loud": ("float32", ())},
           state={"tail": ("float32", (TAPS - 1,)), "loud_before": ("float32", ())}, max_batch_size=32)  # fmt: skip
def lowpass(batch):
    chunk = batch.inputs["chunk"]
    heard = np.concatenate([batch.state["tail"], chunk], axis=1)  # zeros where a stream begins
    loud = 0.9 * batch.state["loud_before"] + 0.1 * np.abs(chunk).max(axis=1)
    batch.state["tail"], batch.state["loud_before"] = heard[:, 1 - TAPS :], loud
    windows = np.lib.stride_tricks.sliding_window_view(heard, TAPS, axis=1)  # (rows, CHUNK, TAPS)
    return {"y": windows @ LOW, "loud": loud}


def microphone(number: int, chunks: int) -> bool:
    """Streams a tone with noise; whether the chunks give the same as the whole signal at once."""
    time = np.arange(chunks * CHUNK) / 16000
    sound = np.sin(2 * np.pi * (200 + 50 * number) * time) + np.random.default_rng(number).normal(0, 0.5, time.shape)
    sound = sound.astype("float32")
    heard = []
    with rb.connect("lowpass", wait=60) as model, model.sequence() as stream:
        for chunk in sound.reshape(-1, CHUNK):
            answer = stream.step(chunk, timeout=30)  # a chunk that fails may be sent again: the state stays
            heard.append(answer["y"])
    whole = np.convolve(sound, LOW)[: len(sound)]  # the filter is symmetric
    return bool(np.allclose(np.concatenate(heard), whole, atol=1e-4) and answer["loud"] > 0.5)


if __name__ == "__main__":
    microphones, chunks = (int(a) for a in (sys.argv[1:] or (8, 100)))
    server = mp.Process(target=rb.serve, args=(lowpass,), daemon=True)
    server.start()
    with mp.Pool(microphones, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        same = sum(pool.starmap(microphone, [(i, chunks) for i in range(microphones)]))
    batches = rb.stats()["models"][0]["batches"]
    server.terminate()
    server.join()
    print(f"{same} of {microphones} streams are as if filtered at once; {microphones * chunks} chunks in {batches} batches")
