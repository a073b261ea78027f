# SPDX-License-Identifier: Apache-2.0
"""Embeddings of texts of many lengths: ringbatch, infinity and sentence-transformers, which serve one folder.

    python3 -m venv build/peers/infinity
    build/peers/infinity/bin/pip install 'infinity-emb[server,torch]' './python[hf]'
    build/peers/infinity/bin/python bench/peers/embeddings.py [--clients 8 64] [--rounds 3] [--seconds 3] [--json FILE]
    python3 bench/peers/embeddings.py --texts 64 --clients 8 --rounds 1 --seconds 1        # a minute: does it run here?

The folder has a BERT (--layers 2 --width 128) with random weights, mean pooling and a WordPiece tokenizer, made here. A client
sends one text of 8 to 500 tokens at a time and compares the answer with the text's embedding alone. All tokenize in the server.
The bound tokenizes and encodes its own texts with ringbatch's code, as many in a batch as ringbatch's largest: one process,
or --processes of them at once; shares are of the better one. The loop is sentence-transformers' encode. Without --device cuda
each process computes with one thread. The programs take turns, after an uncounted round; the table shows medians. What is not
installed is left out. Progress goes to stderr, and the figures so far to --json.
"""

from __future__ import annotations

import argparse
import base64
import concurrent.futures
import contextlib
import importlib.metadata
import importlib.util
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

MOST, ROWS, START_S, BEGAN = 512, 64, 600, time.monotonic()
DEVICE = os.environ.get("EMBEDDINGS_DEVICE", "cpu")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:5.1f} s] {text}", file=sys.stderr, flush=True)


def texts() -> list[str]:
    """Of 8 to 500 tokens, two of which the tokenizer adds."""
    rng = np.random.default_rng(0)
    words = np.array(vocabulary()[5:])
    return [" ".join(rng.choice(words, n - 2)) for n in rng.integers(8, 501, int(os.environ["EMBEDDINGS_TEXTS"]))]


def vocabulary() -> list[str]:
    syllables = ["".join(x) for x in itertools.product("bdfgklmnprst", "aeiou")]
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *("".join(pair) for pair in itertools.product(syllables, syllables))]


def make(folder: Path, layers: int, width: int) -> None:
    """Writes the model, and the embedding of each text alone: transformers' own, in float32."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.manual_seed(0)
    bert = folder / "bert"
    bert.mkdir()
    (bert / "vocab.txt").write_text("\n".join(vocabulary()))
    config = BertConfig(vocab_size=len(vocabulary()), hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64,
        intermediate_size=4 * width, max_position_embeddings=MOST)
    model, tokenizer = BertModel(config).eval(), BertTokenizerFast.from_pretrained(bert, model_max_length=MOST)
    model.save_pretrained(bert)
    tokenizer.save_pretrained(bert)
    # As sentence-transformers of every version reads it.
    parts = [("", "models.Transformer"), ("1_Pooling", "models.Pooling"), ("2_Normalize", "models.Normalize")]
    (bert / "modules.json").write_text(json.dumps([{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (path, kind) in enumerate(parts)]))
    (bert / "1_Pooling").mkdir()
    (bert / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}))
    model, vectors = model.to(DEVICE), []
    with torch.inference_mode():
        for text in texts():
            vectors.append(model(**tokenizer(text, return_tensors="pt").to(DEVICE)).last_hidden_state[0].mean(0))
        np.save(folder / "want.npy", torch.nn.functional.normalize(torch.stack(vectors), dim=1).cpu().numpy())


def loop(folder: Path, encode) -> None:
    """For each line "count seconds" it encodes as many texts in each call, and answers with a line of JSON."""
    given, want = texts(), np.load(folder / "want.npy")
    check(encode(given[:ROWS]), want[:ROWS])
    print("ready", flush=True)
    for line in sys.stdin:
        count, seconds = int(line.split()[0]), float(line.split()[1])
        took: list[float] = []
        encoded = 0
        for at in itertools.cycle(range(0, len(given), count)):
            start = time.monotonic()
            answers = encode(given[at : at + count])
            took.append(time.monotonic() - start)
            check(answers, want[at : at + count])
            encoded += len(answers)
            if sum(took) > seconds:
                break
        p50, p99 = np.percentile(took, [50, 99]) * 1e3
        print(json.dumps({"texts_per_s": encoded / sum(took), "p50_ms": p50, "p99_ms": p99}), flush=True)


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
    say(f"bound: {model.said}")

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
            n = next(number) % len(given)
            check(embed(given[n]), want[n])
            return float(x.sum(dtype=np.float64))  # as load.py expects

        return call

    return of_client


def ring():
    model = rb.connect("bert", window=1, wait=5)
    return lambda text: model(text)["embedding"]


def openai(port: int, path: str):
    """OpenAI's protocol, numbers in base64."""
    c = calls.Connection(f"127.0.0.1:{port}", path, {}, b"", memoryview(b""))

    def embed(text: str) -> np.ndarray:
        body = json.dumps({"model": "bert", "input": text, "encoding_format": "base64"}).encode()
        c.fill(body, memoryview(b""), {"Content-Type": "application/json"})
        return np.frombuffer(base64.b64decode(json.loads(c.post())["data"][0]["embedding"]), np.float32)

    return embed


class Program:
    """A process of this script that answers each line with a line."""

    def __init__(self, role: str, folder: Path) -> None:
        self.role, command = role, [sys.executable, __file__, "--role", role, str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        assert self.process.stdout
        if text := self.process.stdout.readline():
            return text.strip()
        raise load.Failed(f"{self.role} ended with status {self.process.wait()}")

    def until_ready(self) -> None:
        while self.line() != "ready":
            pass

    def ask(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


def together(programs: list[Program], count: int, seconds: float) -> dict[str, float]:
    for p in programs:
        p.ask(f"{count} {seconds}")
    found = [json.loads(p.line()) for p in programs]
    return {**busy.medians(found), "texts_per_s": sum(x["texts_per_s"] for x in found)}


def until_it_answers(embed_with, servers: list[subprocess.Popen]) -> None:
    for _ in range(START_S):
        if ended := [p for p in servers if p.poll() is not None]:
            raise load.Failed(f"{' '.join(map(str, ended[0].args))} ended with status {ended[0].returncode}")
        with contextlib.suppress(OSError, RuntimeError, rb.Error):
            return embed_with()(texts()[0])
        time.sleep(1)
    raise load.Failed(f"a server did not answer for {START_S} s")


def run(a: argparse.Namespace, folder: Path, found: dict[str, list[dict]], keep) -> None:
    """Fills found with the figures of each round. keep: called after each figure."""
    threads = processes.ONE_THREAD if a.device == "cpu" else {}
    os.environ.update(OFFLINE, **threads, TOKENIZERS_PARALLELISM=str(a.device != "cpu").lower(), EMBEDDINGS_DEVICE=a.device,
        EMBEDDINGS_TEXTS=str(a.texts), RINGBATCH_SOCKET=str(folder / "run" / "b.sock"))  # fmt: skip
    (folder / "run").mkdir(mode=0o700)
    say("making the folder, and the embedding of each text alone")
    subprocess.run([sys.executable, __file__, "--role", "make", str(folder), str(a.layers), str(a.width)], check=True,
        stdout=subprocess.DEVNULL)  # fmt: skip
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
    say(f"starting {a.processes} workers and the loops")
    servers = [processes.start(command, dict(os.environ), sys.stderr, sys.stderr) for command in commands]
    sizes = dict.fromkeys((min(ROWS, a.texts), a.texts))
    bounds = [Program("bound", folder) for _ in range(a.processes)]
    loops = {f"bound, {n} process{'es' * (n > 1)}": bounds[:n] for n in dict.fromkeys((1, a.processes))}
    if importlib.util.find_spec("sentence_transformers"):
        loops["sentence-transformers loop"] = [Program("sentence_transformers", folder)]
    programs = {"ringbatch, Python client": ring, "ringbatch gateway, HTTP": lambda: openai(http, "/v1/embeddings")}
    if infinity.exists():
        programs["infinity, HTTP"] = lambda: openai(port, "/embeddings")
    else:
        say("infinity is not installed here")
    for name, embed_with in programs.items():
        until_it_answers(embed_with, servers)
        say(f"{name} answers")
    for p in dict.fromkeys(p for some in loops.values() for p in some):
        p.until_ready()
        say(f"{p.role} is ready")
    processes.same_priority()
    cells = {f"{name}; {n} clients": lambda seconds, n=n, w=w: load.measure(clients_of(w, folder), 64, n, seconds)
        for n, (name, w) in itertools.product(a.clients, programs.items())}  # fmt: skip
    cells |= {f"{name}; {n} in a call": lambda seconds, n=n, some=some: together(some, n, seconds)
        for name, some in loops.items() for n in dict.fromkeys((max(a.clients) // len(some), *sizes))}  # fmt: skip
    for turn in range(-1, a.rounds):
        for name, measure in cells.items():
            try:
                figures = measure(a.seconds if turn >= 0 else min(1.0, a.seconds))
            except (load.Failed, OSError) as e:
                say(f"{name}: {e}")
                continue
            figures.setdefault("texts_per_s", figures.pop("requests_per_s", None))
            say(f"round {turn + 1} of {a.rounds}: {name}: {figures['texts_per_s']:,.0f} texts/s{batches() if name.startswith('ringbatch') else ''}")
            if turn >= 0:
                found.setdefault(name, []).append(figures)
                keep()


def batches() -> str:
    """Of the last second."""
    model = rb.stats()["models"][0]
    alone = ", one batch at a time" * bool(model["learned"].get("one_at_a_time"))
    return f"; {model['windows'][0]['rows_per_batch']:.0f} in a batch, wait {model['wait_time_ms']:.2f} ms{alone}"


def with_shares(found: dict[str, list[dict]]) -> dict[str, dict]:
    """Medians, and the part of the best bound."""
    medians = {name: busy.medians(turns) for name, turns in found.items()}
    best = max((m["texts_per_s"] for name, m in medians.items() if name.startswith("bound")), default=float("nan"))
    return {name: {**m, "share_of_bound": m["texts_per_s"] / best} for name, m in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--processes", type=int, default=1, help="workers of ringbatch, and processes of the bound")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.role:
        roles = {f.__name__: f for f in (make, bound, sentence_transformers)}
        return roles[a.role[0]](Path(a.role[1]), *map(int, a.role[2:]))
    processes.adopt()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    versions, found = {}, {}
    for package in ("infinity-emb", "sentence-transformers", "torch", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)

    def keep() -> None:
        if a.json:
            Path(a.json).write_text(json.dumps({"versions": versions, "medians": with_shares(found)}, indent=1))

    with tempfile.TemporaryDirectory(prefix="rb") as folder, contextlib.ExitStack() as stack:
        stack.callback(processes.end_all)
        try:
            run(a, Path(folder), found, keep)
        except load.Failed as e:
            sys.exit(f"embeddings: {e}")
        finally:
            print("| program; load | texts/s | of the bound | p50 ms | p99 ms |\n|---|---|---|---|---|")
            for name, m in with_shares(found).items():
                print(f"| {name} | {m['texts_per_s']:,.0f} | {100 * m['share_of_bound']:.0f} % | {m['p50_ms']:.1f} | {m['p99_ms']:.1f} |")


if __name__ == "__main__":
    main()
