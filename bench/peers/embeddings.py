# SPDX-License-Identifier: Apache-2.0
"""Embeddings of texts of many lengths: ringbatch, infinity and sentence-transformers, which serve one folder.

    python3 -m venv build/peers/infinity
    build/peers/infinity/bin/pip install 'infinity-emb[server,torch]' './python[hf]'
    build/peers/infinity/bin/python bench/peers/embeddings.py [--clients 8 64] [--rounds 3] [--seconds 3] [--json FILE]

The folder has a BERT (--layers 2 --width 128) with random weights, mean pooling and a WordPiece tokenizer, made here. A client
sends one text of 8 to 500 tokens at a time and compares the answer with the text's embedding alone. All tokenize in the server.
The bound is a process that tokenizes and encodes its own texts with ringbatch's code, as many in a batch as ringbatch's
largest; the loop is sentence-transformers' encode. Without --device cuda each process computes with one thread. The programs
take turns, after an uncounted round; the table shows medians. infinity is left out if it is not installed.
"""

from __future__ import annotations

import argparse
import base64
import concurrent.futures
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

HERE = Path(__file__).resolve().parent
TEXTS, MOST, ROWS, START_S = 512, 512, 64, 600
DEVICE = os.environ.get("EMBEDDINGS_DEVICE", "cpu")
OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}


def texts() -> list[str]:
    """Of 8 to 500 tokens, two of which the tokenizer adds."""
    rng = np.random.default_rng(0)
    words = np.array(vocabulary()[5:])
    return [" ".join(rng.choice(words, n - 2)) for n in rng.integers(8, 501, TEXTS)]


def vocabulary() -> list[str]:
    syllables = ["".join(x) for x in itertools.product("bdfgklmnprst", "aeiou")]
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *("".join(pair) for pair in itertools.product(syllables, syllables))]


def make(folder: Path, layers: int, width: int) -> None:
    """Writes the model, and the embedding of each text alone."""
    import torch
    from sentence_transformers import SentenceTransformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.manual_seed(0)
    bert = folder / "bert"
    bert.mkdir()
    (bert / "vocab.txt").write_text("\n".join(vocabulary()))
    config = BertConfig(vocab_size=len(vocabulary()), hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64,
        intermediate_size=4 * width, max_position_embeddings=MOST)
    BertModel(config).save_pretrained(bert)
    BertTokenizerFast.from_pretrained(bert, model_max_length=MOST).save_pretrained(bert)
    # As sentence-transformers of every version reads it.
    parts = [("", "models.Transformer"), ("1_Pooling", "models.Pooling"), ("2_Normalize", "models.Normalize")]
    (bert / "modules.json").write_text(json.dumps([{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (path, kind) in enumerate(parts)]))
    (bert / "1_Pooling").mkdir()
    (bert / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}))
    model = SentenceTransformer(str(bert), device=DEVICE)
    np.save(folder / "want.npy", np.stack([model.encode(text) for text in texts()]))


def loop(folder: Path, encode) -> None:
    """For each line "count seconds" it encodes as many texts in each call, and answers with a line of JSON."""
    given, want = texts(), np.load(folder / "want.npy")
    print("ready", flush=True)
    for line in sys.stdin:
        count, seconds = int(line.split()[0]), float(line.split()[1])
        took: list[float] = []
        for at in itertools.cycle(range(0, TEXTS, count)):
            start = time.monotonic()
            answers = encode(given[at : at + count])
            took.append(time.monotonic() - start)
            check(answers, want[at : at + count])
            if sum(took) > seconds:
                break
        p50, p99 = np.percentile(took, [50, 99]) * 1e3
        print(json.dumps({"texts_per_s": count * len(took) / sum(took), "p50_ms": p50, "p99_ms": p99}), flush=True)


def sentence_transformers(folder: Path) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder / "bert"), device=DEVICE)
    if DEVICE == "cuda":
        model.half()
    loop(folder, lambda some: model.encode(some, batch_size=ROWS))


def bound(folder: Path) -> None:
    import torch
    from ringbatch.hf.serving import TextModel

    model = TextModel(folder / "bert", device=DEVICE, dtype=torch.float16 if DEVICE == "cuda" else None)
    model.choose_way()

    def encode(some: list[str]) -> np.ndarray:
        """While a batch is encoded, a thread tokenizes the next one."""
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            tokens = [thread.submit(model.tokens, some[at : at + ROWS]) for at in range(0, len(some), ROWS)]
            return np.concatenate([model.lines(t.result()) for t in tokens])

    loop(folder, encode)


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


def ring():
    model = rb.connect("bert", window=1, wait=START_S)
    return lambda text: model(text)["embedding"]


def openai(port: int, path: str):
    """OpenAI's protocol, numbers in base64."""
    c = calls.Connection(f"127.0.0.1:{port}", path, {}, b"", memoryview(b""))

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
    threads = processes.ONE_THREAD if a.device == "cpu" else {}
    os.environ.update(OFFLINE, **threads, TOKENIZERS_PARALLELISM=str(a.device != "cpu").lower(), EMBEDDINGS_DEVICE=a.device)
    os.environ["RINGBATCH_SOCKET"] = str(folder / "run" / "b.sock")
    (folder / "run").mkdir(mode=0o700)
    itself = [sys.executable, __file__, "--role"]
    subprocess.run([*itself, "make", str(folder), str(a.layers), str(a.width)], check=True, stdout=subprocess.DEVNULL)
    http, port = peers.free_ports(2)
    served, infinity = str(folder / "bert"), Path(sys.executable).with_name("infinity_emb")
    half = ["--half"] if a.device == "cuda" else []
    worker = [sys.executable, "-m", "ringbatch.serve.hf_cli", served, "--name", "bert", "--device", a.device, *half,
        f"--max-batch-size={ROWS}"]  # fmt: skip
    commands = [
        [rb.binary_path(), "broker", "--log-level", "error"],
        *[worker] * a.processes,
        [rb.binary_path(), "gateway", "--http", str(http), "--grpc", "off", "--log-level", "error"],
    ]
    if infinity.exists():
        commands.append([str(infinity), "v2", "--model-id", served, "--served-model-name", "bert", "--engine", "torch",
            "--device", a.device, "--dtype", "float16" if half else "float32", "--batch-size", str(ROWS), "--port", str(port),
            "--host", "127.0.0.1", "--log-level", "error"])  # fmt: skip
    for command in commands:
        processes.start(command, dict(os.environ), sys.stderr, sys.stderr)
    loops = {name: subprocess.Popen([*itself, role, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name, role in (("bound", "bound"), ("sentence-transformers loop", "sentence_transformers"))}  # fmt: skip
    programs = {"ringbatch, Python client": ring, "ringbatch gateway, HTTP": lambda: openai(http, "/v1/embeddings")}
    if infinity.exists():
        programs["infinity, HTTP"] = lambda: openai(port, "/embeddings")
    else:
        print("infinity is not installed here", file=sys.stderr)
    for embed_with in programs.values():
        until_it_answers(embed_with)
    for p in loops.values():
        while p.stdout.readline() != "ready\n":
            pass
    processes.same_priority()
    found: dict[str, list[dict]] = {}
    for turn in range(-1, a.rounds):
        seconds = a.seconds if turn >= 0 else 1.0
        turns = {}
        for clients, (name, embed_with) in itertools.product(a.clients, programs.items()):
            got = load.measure(clients_of(embed_with, folder), 64, clients, seconds)
            turns[f"{name}; {clients} clients"] = {"texts_per_s": got.pop("requests_per_s"), **got}
        for (name, p), count in itertools.product(loops.items(), (ROWS, TEXTS)):
            p.stdin.write(f"{count} {seconds}\n")
            p.stdin.flush()
            turns[f"{name}; {count} in a call"] = json.loads(p.stdout.readline())
        for name, figures in turns.items():
            found.setdefault(name, []).extend([figures] * (turn >= 0))
        print(f"round {turn + 1} of {a.rounds}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1, help="workers of ringbatch")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.role:
        roles = {f.__name__: f for f in (make, bound, sentence_transformers)}
        return roles[a.role[0]](Path(a.role[1]), *map(int, a.role[2:]))
    processes.adopt()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="rb") as folder, contextlib.ExitStack() as stack:
        stack.callback(processes.end_all)
        found = {name: busy.medians(turns) for name, turns in run(a, Path(folder)).items()}
    print("| program; load | texts/s | p50 ms | p99 ms |\n|---|---|---|---|")
    for name, m in found.items():
        print(f"| {name} | {m['texts_per_s']:,.0f} | {m['p50_ms']:.1f} | {m['p99_ms']:.1f} |")
    if a.json:
        versions = {}
        for package in ("infinity-emb", "sentence-transformers", "torch", "transformers"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
        Path(a.json).write_text(json.dumps({"versions": versions, "medians": found}, indent=1))


if __name__ == "__main__":
    main()
