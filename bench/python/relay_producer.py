# SPDX-License-Identifier: Apache-2.0
"""A producer of relaybench in Python, as most users' producers are.

    python relay_producer.py --dir FOLDER --bare ADDRESS [--role … --goroutines 1]

It speaks the protocol of cmd/relaybench/producer.go: lines of a kind of call and
milliseconds come in, lines of calls a second and the median in µs go out. The
call to the bare server gets bytes that were encoded before and its answer
is not decoded: nothing of a client's own work counts against gRPC.
"""

from __future__ import annotations

import argparse
import sys
import time

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


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--role")
    p.add_argument("--dir", required=True)
    p.add_argument("--bare", required=True)
    p.add_argument("--goroutines", type=int, default=1)
    args = p.parse_args()
    x = np.tile(np.array([1, 2, 3, 4], np.uint8), 16)
    socket = f"{args.dir}/local/b.sock"
    relay, local = (rb.connect(name, socket=socket, window=1, wait=60) for name in ("small", "local"))
    tensor = field(1, b"x") + field(2, b"UINT8") + field(3, varint(1) + varint(64))
    message = field(1, b"small") + field(5, tensor) + field(7, x.tobytes())
    bare = grpc.insecure_channel(args.bare).unary_unary("/inference.GRPCInferenceService/ModelInfer")

    def checked(y: np.ndarray) -> None:
        if y.tobytes() != x.tobytes():
            raise ValueError("not the answer")

    calls = {"bare": lambda: bare(message), "relay": lambda: checked(relay(x)), "local": lambda: checked(local(x))}
    bare(message, wait_for_ready=True)
    print("ready", flush=True)
    for line in sys.stdin:
        kind, milliseconds = line.split()
        call, took, begin = calls[kind], [], time.perf_counter()
        last, end = begin, begin + int(milliseconds) / 1000
        try:
            while last < end:
                call()
                now = time.perf_counter()
                took.append(now - last)
                last = now
        except Exception as e:
            print("failed:", e, flush=True)
            continue
        took.sort()
        print(len(took) / (last - begin), 1e6 * took[len(took) // 2], flush=True)


if __name__ == "__main__":
    main()
