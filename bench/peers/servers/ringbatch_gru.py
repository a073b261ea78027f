# SPDX-License-Identifier: Apache-2.0
"""The GRU with the state in the ring, or, with the argument "carried", as an input and an output."""

import sys
from pathlib import Path

import ringbatch as rb

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import gru  # noqa: E402

X, Y, H = {"x": ("float32", (gru.UNITS,))}, {"y": ("float32", (gru.ANSWER,))}, {"h": ("float32", (gru.STATE,))}


@rb.worker("gru", inputs=X, outputs=Y, state=H, max_batch_size=32)
def sequence(batch):
    y, batch.state["h"] = gru.step(batch.inputs["x"], batch.state["h"])
    return y


@rb.worker("gru", inputs={**X, **H}, outputs={**Y, "next": H["h"]}, max_batch_size=32)
def carried(batch):
    return gru.step(batch.inputs["x"], batch.inputs["h"])


(carried if sys.argv[1] == "carried" else sequence).run(wait=20)
