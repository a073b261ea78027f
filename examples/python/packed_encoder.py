# SPDX-License-Identifier: Apache-2.0
"""A text encoder for texts of all lengths, packed into batches without padding: pip install './python[torch]'

    python examples/python/packed_encoder.py                          # 12 layers, 768 wide
    python examples/python/packed_encoder.py --layers 2 --width 128   # a small one

Starts a broker and serves an encoder (random weights). Sends texts of 1..200 tokens at once and
compares each embedding with that of the text alone. On the command line the same is

    PYTHONPATH=examples/python ringbatch torch packed_encoder:encoder --packed tokens --half \
        --input 'tokens:i64[<=512]' --max-batch-size=64 --max-batch-cost=8192
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import subprocess
import tempfile
import threading

import numpy as np
import ringbatch as rb
import ringbatch.torch
import torch
from torch import nn
from torch.nn import functional as F

MOST, WORDS, HEAD = 512, 30_000, 64  # the longest text, the vocabulary, the width of an attention head


def attention(q, k, v, offsets):
    """Each token attends to the tokens of its row."""
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        from torch.nn.attention.varlen import varlen_attn  # PyTorch 2.10 or newer

        return varlen_attn(q, k, v, offsets, offsets, MOST, MOST)
    rows = [slice(*ends) for ends in itertools.pairwise(offsets.tolist())]
    one_by_one = (F.scaled_dot_product_attention(*(x[row].transpose(0, 1) for x in (q, k, v))) for row in rows if row.start < row.stop)
    return torch.cat([y.transpose(0, 1) for y in one_by_one])


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.last_norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x, offsets):
        q, k, v = self.qkv(x).view(len(x), 3, -1, HEAD).unbind(1)
        return self.after_attention(x, attention(q, k, v, offsets).flatten(1))

    def after_attention(self, x, y):
        x = self.norm(x + self.out(y))
        return self.last_norm(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """BERT's shape. Row i is tokens[offsets[i]:offsets[i + 1]]; rows may be empty, and zeros may follow the last one."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(WORDS, width), nn.Embedding(MOST, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, tokens, offsets):
        at = torch.arange(len(tokens), dtype=torch.int32, device=tokens.device)
        row = torch.bucketize(at, offsets[1:], right=True)  # of each token
        x = self.norm(self.words(tokens) + self.places((at - offsets[row]).clamp(max=MOST - 1)))
        for layer in self.layers:
            x = layer(x, offsets)
        x = x.masked_fill((at >= offsets[-1])[:, None], 0)
        in_row = row == torch.arange(len(offsets) - 1, device=row.device)[:, None]
        # The sum has the direction of the mean, and all embeddings get the length 1.
        return F.normalize((in_row.to(x.dtype) @ x).float(), dim=1).to(x.dtype)


def encoder(layers: int = 12, width: int = 768) -> Encoder:
    torch.manual_seed(0)
    return Encoder(layers, width).eval()


@contextlib.contextmanager
def served(model: nn.Module, socket: str):
    """A broker, and the model in a thread of this process."""
    broker = subprocess.Popen([rb.binary_path(), "broker", "--socket", socket, "--log-level", "error"])
    stop = threading.Event()
    dtype = torch.float16 if torch.cuda.is_available() else None
    how = dict(packed=["tokens"], inputs=["tokens:i64[<=512]"], dtype=dtype, max_batch_size=64)
    thread = threading.Thread(target=ringbatch.torch.serve, args=(model, "encoder"), kwargs=dict(how, socket=socket, stop=stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        broker.terminate()
        broker.wait()


def main(folder: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--texts", type=int, default=100)
    a = parser.parse_args()
    model, socket = encoder(a.layers, a.width), os.path.join(folder, "run", "broker.sock")
    rng = np.random.default_rng(1)
    texts = [rng.integers(1, WORDS, n) for n in rng.integers(1, 201, a.texts)]
    with served(model, socket), rb.connect("encoder", socket=socket, wait=120) as client:
        answers = [np.array(future.result(), "float32") for future in [client.submit(text) for text in texts]]
        batches = client.stats()["batches"]
    device = next(model.parameters()).device
    with torch.inference_mode():
        alone = [model(torch.tensor(text, device=device), torch.tensor([0, len(text)], dtype=torch.int32, device=device)) for text in texts]
    apart = max(np.abs(answer - y[0].float().cpu().numpy()).max() for answer, y in zip(answers, alone))
    print(f"{len(texts)} texts in {batches} batches, at most {apart:.0e} from each alone")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="rb") as folder:
        main(folder)
