# SPDX-License-Identifier: Apache-2.0
"""Embeddings of texts of many lengths on the CPU: ringbatch with packed rows, infinity and sentence-transformers.

    python3 -m venv build/peers/infinity
    build/peers/infinity/bin/pip install 'infinity-emb[server,torch]' ./python
    build/peers/infinity/bin/python bench/peers/embeddings.py [--clients 8 32] [--rounds 3] [--seconds 3] [--json FILE]

All compute one BERT of two layers, 128 wide, with random weights, mean pooling and a
WordPiece tokenizer made here. A client sends one text of 8 to 200 tokens at a time and
compares the answer with the text's embedding alone. ringbatch's clients tokenize; infinity
does it in the server: both times count. Each server computes with one thread. The loop is
one process without clients, with a thread for each core. It encodes 1, 32 or all texts in
a call. The programs take turns, after an uncounted round; the table shows medians.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import importlib.metadata
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import busy
import calls
import load
import numpy as np
import processes
import ringbatch as rb
import run as peers
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
TEXTS, MOST, ROWS, BUDGET, WIDTH, START_S = 512, 256, 32, 4096, 128, 120
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}


def texts() -> list[str]:
    """Of 8 to 200 tokens, two of which the tokenizer adds."""
    rng = np.random.default_rng(0)
    words = np.array(vocabulary()[5:])
    return [" ".join(rng.choice(words, n - 2)) for n in rng.integers(8, 201, TEXTS)]


def vocabulary() -> list[str]:
    syllables = ["".join(x) for x in itertools.product("bdfgklmnprst", "aeiou")]
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *("".join(pair) for pair in itertools.product(syllables, syllables))]


def make(folder: Path) -> None:
    """Writes the model, and the embedding of each text."""
    import torch
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.manual_seed(0)
    (folder / "vocab.txt").write_text("\n".join(vocabulary()))
    config = BertConfig(vocab_size=len(vocabulary()), hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=4 * WIDTH, max_position_embeddings=MOST)
    BertModel(config).save_pretrained(folder / "bert")
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=MOST).save_pretrained(folder / "bert")
    parts = [models.Transformer(str(folder / "bert"), max_seq_length=MOST), models.Pooling(WIDTH, "mean"), models.Normalize()]
    model = SentenceTransformer(modules=parts, device="cpu")
    model.save(str(folder / "model"))
    np.save(folder / "want.npy", np.stack([model.encode(text) for text in texts()]))


def packed():
    """The same weights for packed rows."""
    import torch
    from packed_encoder import attention
    from torch.nn import functional as F
    from transformers import BertModel

    class Packed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertModel.from_pretrained(os.environ["EMBEDDINGS"] + "/bert").eval()

        def forward(self, tokens, offsets):
            e, sizes = self.bert.embeddings, offsets.diff()
            place = torch.arange(len(tokens)) - offsets[:-1].repeat_interleave(sizes)
            x = e.LayerNorm(e.word_embeddings(tokens) + e.position_embeddings(place) + e.token_type_embeddings.weight[0])
            for layer in self.bert.encoder.layer:
                own = layer.attention.self
                q, k, v = (part(x).view(len(x), 2, -1) for part in (own.query, own.key, own.value))
                x = layer.attention.output(attention(q, k, v, offsets).flatten(1), x)
                x = layer.output(layer.intermediate(x), x)
            row = torch.arange(len(sizes)).repeat_interleave(sizes)
            return F.normalize(x.new_zeros(len(sizes), WIDTH).index_add_(0, row, x), dim=1)

    return Packed()


def loop(folder: Path) -> None:
    """For each line "count seconds" it encodes as many texts in each call, and answers with a line of JSON."""
    from sentence_transformers import SentenceTransformer

    model, given, want = SentenceTransformer(str(folder / "model"), device="cpu"), texts(), np.load(folder / "want.npy")
    print("ready", flush=True)
    for line in sys.stdin:
        count, seconds = int(line.split()[0]), float(line.split()[1])
        took: list[float] = []
        for at in itertools.cycle(range(0, TEXTS, count)):
            start = time.monotonic()
            answers = model.encode(given[at : at + count], batch_size=ROWS)
            took.append(time.monotonic() - start)
            check(answers, want[at : at + count])
            if sum(took) > seconds:
                break
        p50, p99 = np.percentile(took, [50, 99]) * 1e3
        print(json.dumps({"texts_per_s": count * len(took) / sum(took), "p50_ms": p50, "p99_ms": p99}), flush=True)


def check(got: np.ndarray, want: np.ndarray) -> None:
    if (least := float((got * want).sum(-1).min())) < 0.999:
        raise ValueError(f"a wrong embedding: cosine {least}")


def clients_of(embed_with, folder: Path):
    """For load.measure. In the client's process, embed_with() makes the function from a text to its embedding."""
    given, want = texts(), np.load(folder / "want.npy")

    def of_client(i: int, x: np.ndarray):
        embed, number = embed_with(), itertools.count(37 * i)

        def call() -> float:
            n = next(number) % TEXTS
            check(embed(given[n]), want[n])
            return float(x.sum(dtype=np.float64))  # as load.py expects

        return call

    return of_client


def ring(tokenizer: Tokenizer):
    model = rb.connect("bert", window=1, wait=START_S)
    return lambda text: model(np.array(tokenizer.encode(text).ids))


def gateway(tokenizer: Tokenizer, port: int):
    """The Open Inference Protocol with binary tensors."""
    c = calls.Connection(f"127.0.0.1:{port}", "/v2/models/bert/infer", {}, b"", memoryview(b""))

    def embed(text: str) -> np.ndarray:
        x = np.array(tokenizer.encode(text).ids)
        about = {"inputs": [{"name": "tokens", "datatype": "INT64", "shape": [1, len(x)], "parameters": {"binary_data_size": x.nbytes}}],
            "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}
        before = json.dumps(about).encode()
        c.fill(before, memoryview(x).cast("B"), {"Inference-Header-Content-Length": str(len(before))})
        return np.frombuffer(c.post()[-4 * WIDTH :], np.float32)

    return embed


def infinity(port: int):
    """OpenAI's protocol, numbers in base64."""
    c = calls.Connection(f"127.0.0.1:{port}", "/embeddings", {}, b"", memoryview(b""))

    def embed(text: str) -> np.ndarray:
        body = json.dumps({"model": "bert", "input": text, "encoding_format": "base64"}).encode()
        c.fill(body, memoryview(b""), {"Content-Type": "application/json"})
        return np.frombuffer(base64.b64decode(json.loads(c.post())["data"][0]["embedding"]), np.float32)

    return embed


def until_it_answers(embed_with) -> None:
    for _ in range(START_S):
        with contextlib.suppress(OSError, RuntimeError):
            return embed_with()(texts()[0])
        time.sleep(1)
    raise SystemExit(f"a server did not answer for {START_S} s")


def run(a: argparse.Namespace, folder: Path) -> dict[str, list[dict]]:
    os.environ.update(OFFLINE, RINGBATCH_SOCKET=str(folder / "b.sock"), EMBEDDINGS=str(folder))
    os.environ["PYTHONPATH"] = f"{HERE}:{HERE.parents[1]}/examples/python"
    itself = [sys.executable, __file__, "--role"]
    subprocess.run([*itself, "make", str(folder)], check=True, stdout=subprocess.DEVNULL)
    http, port = peers.free_ports(2)
    for command in (
        [rb.binary_path(), "broker", "--log-level", "error"],
        [sys.executable, "-m", "ringbatch.torch", "embeddings:packed", "--name", "bert", "--packed", "tokens", "--device", "cpu",
            "--input", f"tokens:i64[<={MOST}]", f"--max-batch-size={ROWS}", f"--max-batch-cost={BUDGET}"],
        [rb.binary_path(), "gateway", "--http", str(http), "--grpc", "off", "--log-level", "error"],
        [str(Path(sys.executable).with_name("infinity_emb")), "v2", "--model-id", str(folder / "model"), "--served-model-name", "bert",
            "--engine", "torch", "--device", "cpu", "--dtype", "float32", "--batch-size", str(ROWS), "--port", str(port),
            "--host", "127.0.0.1", "--log-level", "error"],
    ):  # fmt: skip
        processes.start(command, {**os.environ, **processes.ONE_THREAD}, sys.stderr, sys.stderr)
    looping = subprocess.Popen([*itself, "loop", str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    tokenizer = Tokenizer.from_file(str(folder / "bert" / "tokenizer.json"))
    programs = {"ringbatch, Python client": lambda: ring(tokenizer), "ringbatch gateway, HTTP": lambda: gateway(tokenizer, http),
        "infinity, HTTP": lambda: infinity(port)}
    for embed_with in programs.values():
        until_it_answers(embed_with)
    looping.stdout.readline()
    processes.same_priority()
    found: dict[str, list[dict]] = {}
    for turn in range(-1, a.rounds):
        seconds = a.seconds if turn >= 0 else 1.0
        turns = {}
        for clients, (name, embed_with) in itertools.product(a.clients, programs.items()):
            got = load.measure(clients_of(embed_with, folder), 64, clients, seconds)
            turns[f"{name}; {clients} clients"] = {"texts_per_s": got.pop("requests_per_s"), **got}
        for count in (1, ROWS, TEXTS):
            looping.stdin.write(f"{count} {seconds}\n")
            looping.stdin.flush()
            turns[f"sentence-transformers loop; {count} in a call"] = json.loads(looping.stdout.readline())
        for name, figures in turns.items():
            found.setdefault(name, []).extend([figures] * (turn >= 0))
        print(f"round {turn + 1} of {a.rounds}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--role", nargs=2, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.role:
        return {"make": make, "loop": loop}[a.role[0]](Path(a.role[1]))
    processes.adopt()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="rb") as folder, contextlib.ExitStack() as stack:
        stack.callback(processes.end_all)
        found = {name: busy.medians(turns) for name, turns in run(a, Path(folder)).items()}
    print("| program; load | texts/s | p50 ms | p99 ms |\n|---|---|---|---|")
    for name, m in found.items():
        print(f"| {name} | {m['texts_per_s']:,.0f} | {m['p50_ms']:.1f} | {m['p99_ms']:.1f} |")
    if a.json:
        versions = {p: importlib.metadata.version(p) for p in ("infinity-emb", "sentence-transformers", "torch", "transformers")}
        Path(a.json).write_text(json.dumps({"versions": versions, "medians": found}, indent=1))


if __name__ == "__main__":
    main()
