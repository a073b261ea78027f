#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A client without the library: Python's standard library, and docs/protocol.md.

It follows that document and speaks to the broker directly: socket, msgpack, shared memory, futex.
It shows the steps of a client in another language, and its test keeps the document true.
For real work use the package (docs/python.md).

    client.py SOCKET MODEL IDLE

MODEL is x:f32[4] -> y:f32[4]; its worker doubles, and fails a request that has a negative
number. IDLE has the same tensors and no worker: requests wait there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import re
import select
import socket
import struct
import sys
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any

COMMIT, CANCEL = 1, 2
OK, FAILED, WORKER_DIED, BROKER_GONE, VERSION, LAYOUT, NO_MEMORY, FULL = 0, 1, 7, 10, 13, 14, 16, 27
HELD = 1 << 8
SIZES = {"bool": 1, "u8": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1}
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
SYS_FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
MADV_POPULATE_WRITE = 23


class Error(Exception):
    """A status other than OK: its number in docs/errors.md, and its text."""

    def __str__(self) -> str:
        return "status {}: {}".format(*self.args)


# Section 1: the msgpack of the control plane, and frames.


def pack(v: Any) -> bytes:
    if isinstance(v, dict):
        return struct.pack(">BH", 0xDE, len(v)) + b"".join(pack(k) + pack(x) for k, x in v.items())
    if isinstance(v, str):
        return struct.pack(">BH", 0xDA, len(v.encode())) + v.encode()
    return struct.pack(">Bq", 0xD3, v)


def unpack(b: bytes, at: int = 0) -> tuple[Any, int]:
    """The value at b[at], and where the next one begins."""
    t, at = b[at], at + 1
    if t < 0x80 or t >= 0xE0:  # small integers
        return t if t < 0x80 else t - 256, at
    if t in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[t], at
    if 0xCC <= t <= 0xD3:  # u8 … u64, i8 … i64
        width = 1 << (t & 3)
        return int.from_bytes(b[at : at + width], "big", signed=t >= 0xD0), at + width
    if t < 0xC0:  # short: the length is in the type
        kind, n = ("text", t & 31) if t >= 0xA0 else ("list", t & 15) if t >= 0x90 else ("map", t & 15)
    else:
        long = {0xD9: ("text", 1), 0xDA: ("text", 2), 0xDB: ("text", 4), 0xDC: ("list", 2), 0xDD: ("list", 4), 0xDE: ("map", 2),
            0xDF: ("map", 4)}
        kind, width = long[t]
        n, at = int.from_bytes(b[at : at + width], "big"), at + width
    if kind == "text":
        return b[at : at + n].decode(), at + n
    values = []
    for _ in range(2 * n if kind == "map" else n):
        v, at = unpack(b, at)
        values.append(v)
    return dict(zip(values[::2], values[1::2])) if kind == "map" else values, at


def call(path: str, request: dict[str, Any]) -> tuple[socket.socket, dict[str, Any], list[int]]:
    """Sends one request; returns the connection, the reply and its descriptors."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(path)
    body = pack(request)
    with contextlib.suppress(BrokenPipeError):  # refused unread: the reply says why
        sock.sendall(struct.pack("<I", len(body)) + body)
    data, fds, _, _ = socket.recv_fds(sock, 65536, 4)
    while len(data) < 4 or len(data) < 4 + struct.unpack_from("<I", data)[0]:
        more = sock.recv(65536)
        if not more:
            raise Error(BROKER_GONE, "the broker hung up")
        data += more
    reply, _ = unpack(data, 4)
    if reply["code"] != OK:
        raise Error(reply["code"], reply["message"])
    return sock, reply, list(fds)


# Section 2: segments.


class Segment:
    """A checked and mapped descriptor, as bytes and as numbers with atomic loads and stores."""

    def __init__(self, fd: int, size: int, kind: int, a: dict[str, Any], epoch: int) -> None:
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals != seals or os.fstat(fd).st_size != size:
            raise Error(LAYOUT, f"segment {kind} is not sealed, or not of {size} bytes")
        prot = mmap.PROT_READ if kind == 2 else mmap.PROT_READ | mmap.PROT_WRITE
        self.at = libc.mmap(None, size, prot, mmap.MAP_SHARED, fd, 0)
        if self.at == ctypes.c_void_p(-1).value:
            raise Error(NO_MEMORY, os.strerror(ctypes.get_errno()))
        os.close(fd)
        self.bytes = memoryview((ctypes.c_ubyte * size).from_address(self.at)).cast("B")
        self.u32, self.u64 = self.bytes.cast("I"), self.bytes.cast("Q")
        got = struct.unpack_from("<QIIQQQII16s", self.bytes)
        want = (0x48435442474E4952, 1, kind, size, epoch, a["geometry"], a["slots"], a["max_batch"], bytes(16))
        if kind != 1 and got != want:
            raise Error(VERSION if got[1] != 1 else LAYOUT, f"segment {kind} has the header {got}, not {want}")


def up(n: int) -> int:
    return (n + 4095) // 4096 * 4096


def row_size(tensor: str) -> int:
    """Bytes of one row of name:dtype[dims] at its maximum shape."""
    dtype, dims = re.fullmatch(r".*:(\w+)\[(.*)\]", tensor).groups()  # type: ignore[union-attr]
    n = SIZES[dtype]
    for d in filter(None, dims.split(",")):
        n *= int(d.replace("<=", ""))
    return n


def fnv1a(text: str) -> int:
    h = 0xCBF29CE484222325
    for c in text.encode():
        h = (h ^ c) * 0x100000001B3 % (1 << 64)
    return h


# Section 3: a client's life.


class Client:
    """One window of a model with one f32 input and output; for one thread."""

    def __init__(self, path: str, model: str, window: int) -> None:
        asked = time.monotonic_ns()
        self.sock, reply, fds = call(path, {"version": 1, "op": "client", "model": model, "name": "protocol", "window": window})
        a, epoch = reply["attached"], reply["epoch"]
        if not asked <= a["clock"] <= time.monotonic_ns():
            raise Error(LAYOUT, "the broker is in another time namespace: deadlines would be off")
        slots, self.first, self.window = a["slots"], a["first_slot"], a["window"]
        tensors = f"{' '.join(a['inputs'])} -> {' '.join(a['outputs'])}"
        planes, end = [], 4096  # offset and stride of each
        for t in a["inputs"] + a["outputs"]:
            planes.append((end, row_size(t)))
            end = up(end + slots * row_size(t))
        self.input, self.output = planes
        self.words = up(4096 + 64 * slots)
        self.records = up(self.words + 8 * slots)
        self.reasons = up(self.records + 64 * slots)
        self.capacity = 1 << (4 * self.window - 1).bit_length()
        sizes = end, up(self.reasons + 1024 * slots), up(4096 + 64 * self.capacity)
        if sizes != (a["planes_size"], a["board_size"], a["session_size"]):
            raise Error(LAYOUT, f"the segments should have {sizes} bytes")
        if fnv1a(f"ringbatch 1 slots={slots} max_batch={a['max_batch']} {tensors}") != a["geometry"]:
            raise Error(LAYOUT, "the geometry is of something else")
        self.planes, self.board, self.session = (Segment(fds[i], sizes[i], i + 1, a, epoch) for i in range(3))
        self.doorbell, self.tail, self.fence = fds[3], 0, threading.Lock()
        self.generation = dict.fromkeys(range(self.first, self.first + self.window), a["first_gen"])
        self.free = set(self.generation)
        self.rows: dict[int, int] = {}  # by first slot: of requests in flight
        self.released: dict[int, int] = {}  # by first slot: of requests that a worker may still hold
        for offset, stride in planes:
            begin = (offset + self.first * stride) // mmap.PAGESIZE * mmap.PAGESIZE
            length = offset + (self.first + self.window) * stride - begin
            failed = libc.madvise(self.planes.at + begin, length, MADV_POPULATE_WRITE)
            if failed and ctypes.get_errno() != errno.EINVAL:  # EINVAL: before Linux 5.14
                raise Error(NO_MEMORY, os.strerror(ctypes.get_errno()))

    def claim(self, rows: int) -> int:
        """Takes free adjacent slots; returns the first."""
        for slot in list(self.released):
            if not self.board.u64[self.words // 8 + slot] & HELD:
                self.free.update(range(slot, slot + self.released.pop(slot)))
        for slot in sorted(self.free):
            if self.free.issuperset(range(slot, slot + rows)):
                self.free.difference_update(range(slot, slot + rows))
                return slot
        raise Error(FULL, "every slot of this client's window is in use")

    def push(self, kind: int, slot: int, rows: int, deadline: int = 0) -> None:
        if self.tail - self.session.u64[128 // 8] >= self.capacity:
            raise Error(FULL, "the ring is full")
        entry = struct.pack("<BbHIIIqq32x", kind, -1, 0, rows, slot, self.generation[slot], deadline, time.monotonic_ns())
        at = 4096 + self.tail % self.capacity * 64
        self.session.bytes[at : at + 64] = entry
        self.tail += 1
        self.session.u64[64 // 8] = self.tail
        self.fence.acquire()  # a full fence on x86-64; where there is none, ring always
        self.fence.release()
        if self.session.u64[136 // 8] == self.tail - 1 or platform.machine() != "x86_64":
            os.write(self.doorbell, struct.pack("<Q", 1))

    def commit(self, *rows: list[float], timeout: float | None = None) -> int:
        """Sends one request of these rows; returns its first slot."""
        slot = self.claim(len(rows))
        for i, row in enumerate(rows):
            at = self.input[0] + (slot + i) * self.input[1]
            self.planes.bytes[at : at + self.input[1]] = array("f", row).tobytes()
        self.generation[slot] = (self.generation[slot] + 1) % (1 << 32)
        self.push(COMMIT, slot, len(rows), 0 if timeout is None else time.monotonic_ns() + int(timeout * 1e9))
        self.rows[slot] = len(rows)
        return slot

    def cancel(self, slot: int) -> None:
        self.push(CANCEL, slot, self.rows[slot])

    def wait(self, slot: int) -> list[list[float]]:
        """Waits for the end of the request and releases it; returns its output or raises its status."""
        bell, pause = 4096 + 64 * self.first, struct.pack("@qq", 0, 50_000_000)
        while True:
            seen = self.board.u32[bell // 4]
            word = self.board.u64[self.words // 8 + slot]
            if word >> 32 == self.generation[slot]:
                break
            if select.select([self.sock], [], [], 0)[0]:
                raise Error(BROKER_GONE, "the broker hung up")
            libc.syscall(SYS_FUTEX, ctypes.c_void_p(self.board.at + bell), 0, ctypes.c_uint32(seen), pause, None, 0)
        rows = self.released[slot] = self.rows.pop(slot)
        status, reason = word & 0xFF, ""
        if status in (FAILED, WORKER_DIED):  # other ends leave no text
            length, at = self.board.u32[(self.records + 64 * slot + 24) // 4], self.reasons + 1024 * slot
            reason = bytes(self.board.bytes[at : at + min(length, 1024)]).decode(errors="replace")
        if status != OK:
            raise Error(status, reason)
        at, stride = self.output[0] + slot * self.output[1], self.output[1]
        return [array("f", bytes(self.planes.bytes[at + i * stride : at + (i + 1) * stride])).tolist() for i in range(rows)]

    def close(self) -> None:
        """Detaches. The mappings stay until the process ends."""
        self.sock.shutdown(socket.SHUT_RDWR)  # a forked child may have a copy
        self.sock.close()
        os.close(self.doorbell)


def tell(what: str, ask: Callable[[], object]) -> None:
    try:
        print(f"{what}: {ask()}")
    except Error as e:
        print(f"{what}: {e}")


def main(path: str, model: str, idle: str) -> None:
    c = Client(path, model, 8)
    tell("one", lambda: c.wait(c.commit([1, 2, 3, 4])))
    several = [c.commit([i] * 4) for i in range(8)]
    tell("several", lambda: [c.wait(slot)[0][0] for slot in several])
    tell("rows", lambda: c.wait(c.commit([1] * 4, [2] * 4, [3] * 4, timeout=600)))
    tell("failed", lambda: c.wait(c.commit([-1] * 4)))
    tell("many", lambda: sum(c.wait(c.commit([i] * 4))[0][0] for i in range(1000)))
    w = Client(path, idle, 2)
    tell("deadline", lambda: w.wait(w.commit([0] * 4, timeout=0.01)))
    slot = w.commit([0] * 4)
    w.cancel(slot)
    tell("cancel", lambda: w.wait(slot))
    tell("version", lambda: call(path, {"version": 99, "op": "ping"}))
    tell("model", lambda: Client(path, "nobody's", 1))
    tell("window", lambda: Client(path, model, 1 << 20))
    w.generation[w.first] += 1  # skips one: the broker hangs up
    tell("generation", lambda: w.wait(w.commit([0] * 4)))
    c.close()
    w.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
