# SPDX-License-Identifier: Apache-2.0
"""A producer of relaybench in Python, as most users' producers are.

    python relay_producer.py --dir FOLDER --bare ADDRESS [--in_flight_per_producer 1]

It speaks the protocol of cmd/relaybench/producer.go: lines of a kind of call and
milliseconds come in, lines of calls a second and the median in µs go out. The
call to the bare server gets bytes that were encoded before and its answer
is not decoded: nothing of a client's own work counts against gRPC. It has
--in_flight_per_producer requests in flight, from one thread.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque

import grpc
import numpy as np
import ringbatch as rb


def varint(n: int) -> bytes:
    out = b""
    while n > 127:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


class Ring:
    """Calls of a ring; several in flight by request(), as docs/python.md has it."""

    def __init__(self, name: str, socket: str, window: int, x: np.ndarray) -> None:
        self.model = rb.connect(name, socket=socket, window=window, wait=60)
        self.x, self.bytes = x, x.tobytes()

    def check(self, y: np.ndarray) -> None:
        if y.tobytes() != self.bytes:
            raise ValueError("not the answer")

    def call(self) -> None:
        self.check(self.model(self.x))

    def begin(self) -> rb.Request:
        request = self.model.request()
        request.inputs["x"][...] = self.x
        return request.commit()

    def end(self, request: rb.Request) -> None:
        with request:
            self.check(request.wait().outputs["y"])


class Bare:
    """Calls of the bare server."""

    def __init__(self, address: str, x: np.ndarray) -> None:
        tensor = field(1, b"x") + field(2, b"UINT8") + field(3, varint(1) + varint(64))
        self.message = field(1, b"small") + field(5, tensor) + field(7, x.tobytes())
        self.method = grpc.insecure_channel(address).unary_unary("/inference.GRPCInferenceService/ModelInfer")
        self.method(self.message, wait_for_ready=True)

    def call(self) -> None:
        self.method(self.message)

    def begin(self) -> grpc.Future:
        return self.method.future(self.message)

    def end(self, future: grpc.Future) -> None:
        future.result()


def run(way: Ring | Bare, in_flight: int, seconds: float) -> tuple[float, float]:
    """Calls a second and their median in µs."""
    took, sent = [], deque()
    begin = last = time.perf_counter()
    while last < begin + seconds:
        if in_flight == 1:
            way.call()
            now = time.perf_counter()
            took.append(now - last)
        else:
            while len(sent) < in_flight:
                sent.append((time.perf_counter(), way.begin()))
            since, first = sent.popleft()
            way.end(first)
            now = time.perf_counter()
            took.append(now - since)
        last = now
    for _, rest in sent:
        way.end(rest)
    took.sort()
    return len(took) / (last - begin), 1e6 * took[len(took) // 2]


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--role")
    p.add_argument("--dir", required=True)
    p.add_argument("--bare", required=True)
    p.add_argument("--per_process", type=int, default=1, choices=[1])
    p.add_argument("--in_flight_per_producer", type=int, default=1, dest="in_flight")
    args = p.parse_args()
    x = np.tile(np.array([1, 2, 3, 4], np.uint8), 16)
    socket, bare = f"{args.dir}/local/b.sock", Bare(args.bare, x)
    ways: dict[str, Ring | Bare] = {"bare": bare, "one_by_one": bare}
    ways |= {kind: Ring(name, socket, args.in_flight, x) for kind, name in (("relay", "small"), ("local", "local"))}
    print("ready", flush=True)
    for line in sys.stdin:
        kind, milliseconds = line.split()
        try:
            rate, us = run(ways[kind], 1 if kind == "one_by_one" else args.in_flight, int(milliseconds) / 1000)
        except Exception as e:
            print("failed:", e, flush=True)
            continue
        print(rate, us, flush=True)


if __name__ == "__main__":
    main()
