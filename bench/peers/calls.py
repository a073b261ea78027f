# SPDX-License-Identifier: Apache-2.0
"""How a client calls each kind of server.

KINDS[kind](address, size) runs once, before the clients are forked, so that its imports
are loaded once. It returns make(i, x), which client i calls with its input; make returns
the function that sends a request and returns the sum.
"""

from __future__ import annotations

import json
import os
import socket
import struct

import numpy as np


class Connection:
    """HTTP/1.1, kept alive, over a plain socket. It is the same for every HTTP server and has little Python,
    so that the comparison is of servers and not of client libraries."""

    def __init__(self, address: str, path: str, headers: dict[str, str], before: bytes, body: memoryview) -> None:
        self.address = address.rsplit(":", 1)
        self._connect()
        self.start = f"POST {path} HTTP/1.1\r\nHost: {address}\r\n"
        self.fill(before, body, headers)

    def fill(self, before: bytes, body: memoryview, headers: dict[str, str]) -> None:
        """Sets the next requests."""
        lines = [*(f"{k}: {v}" for k, v in headers.items()), f"Content-Length: {len(before) + len(body)}", "", ""]
        self.head, self.body = (self.start + "\r\n".join(lines)).encode() + before, body

    def _connect(self) -> None:
        self.socket = socket.create_connection((self.address[0], int(self.address[1])), timeout=60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rest = b""

    def _send(self) -> bytes:
        """Sends the request; the beginning of the answer."""
        sent = self.socket.sendmsg([self.head, self.body])
        if sent < len(self.head) + len(self.body):
            self.socket.sendall(self.body[sent - len(self.head) :])
        return self.rest or self._more()

    def post(self) -> bytes:
        try:
            data = self._send()
        except ConnectionError:  # most servers close idle connections after some seconds
            self._connect()
            data = self._send()
        while (at := data.find(b"\r\n\r\n")) < 0:
            data += self._more()
        head, data = data[:at].lower(), data[at + 4 :]
        if b"transfer-encoding: chunked" in head:
            body, self.rest = self._chunks(data)
        else:
            size = int(head.split(b"\r\ncontent-length:", 1)[1].split(b"\r\n", 1)[0])
            while len(data) < size:
                data += self._more()
            body, self.rest = data[:size], data[size:]
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(f"{head.splitlines()[0].decode()}: {body[:200]!r}")
        return body

    def _more(self) -> bytes:
        got = self.socket.recv(65536)
        if not got:
            raise ConnectionError("the server hung up")
        return got

    def _chunks(self, data: bytes) -> tuple[bytes, bytes]:
        body = b""
        while True:
            while (at := data.find(b"\r\n")) < 0:
                data += self._more()
            size, data = int(data[:at].split(b";")[0], 16), data[at + 2 :]
            while len(data) < size + 2:
                data += self._more()
            body, data = body + data[:size], data[size + 2 :]
            if size == 0:
                return body, data


def http(address: str, size: int):
    """The input's bytes as they are, and the four bytes of a float32 back."""

    def make(i: int, x: np.ndarray):
        c = Connection(address, "/inference", {"Content-Type": "application/octet-stream"}, b"", memoryview(x).cast("B"))
        return lambda: struct.unpack("<f", c.post())[0]

    return make


def gateway(address: str, size: int):
    """The Open Inference Protocol with binary tensors: a little JSON before the bytes."""
    about = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, size // 4], "parameters": {"binary_data_size": size}}],
        "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}
    before = json.dumps(about).encode()

    def make(i: int, x: np.ndarray):
        c = Connection(address, f"/v2/models/sum{size}/infer", {"Inference-Header-Content-Length": str(len(before))}, before,
            memoryview(x).cast("B"))
        return lambda: struct.unpack("<f", c.post()[-4:])[0]

    return make


def ringbatch(address: str, size: int):
    import ringbatch as rb

    def make(i: int, x: np.ndarray):
        os.environ["RINGBATCH_SOCKET"] = address
        model = rb.connect(f"sum{size}", window=1, wait=20)
        return lambda: model(x)[0]

    return make


def triton_grpc(address: str, size: int):
    """tritonclient's own way. Also for ringbatch's gateway, which speaks the same."""
    import tritonclient.grpc as triton

    def make(i: int, x: np.ndarray):
        c = triton.InferenceServerClient(address)
        wanted = [triton.InferRequestedOutput("y")]

        def call() -> float:
            given = triton.InferInput("x", [1, len(x)], "FP32")
            given.set_data_from_numpy(x[None])
            return c.infer(f"sum{size}", [given], outputs=wanted).as_numpy("y")[0, 0]

        return call

    return make


def triton_shm(address: str, size: int):
    """Input and output in system shared memory, gRPC for the call."""
    import tritonclient.grpc as triton
    import tritonclient.utils.shared_memory as shm

    def make(i: int, x: np.ndarray):
        c = triton.InferenceServerClient(address)
        name = f"peers-{os.getpid()}"
        region = shm.create_shared_memory_region(name, f"/{name}", size + 4)
        c.register_system_shared_memory(name, f"/{name}", size + 4)
        # The mapping stays after the name is gone: nothing is left in /dev/shm.
        os.unlink(f"/dev/shm/{name}")
        given, wanted = triton.InferInput("x", [1, len(x)], "FP32"), triton.InferRequestedOutput("y")
        given.set_shared_memory(name, size)
        wanted.set_shared_memory(name, 4, offset=size)

        def call() -> float:
            shm.set_shared_memory_region(region, [x])
            c.infer(f"sum{size}", [given], outputs=[wanted])
            return shm.get_contents_as_numpy(region, np.float32, [1], offset=size)[0]

        return call

    return make


KINDS = {
    "http": http,
    "ringbatch": ringbatch,
    "gateway": gateway,
    "triton_grpc": triton_grpc,
    "triton_shm": triton_shm,
}
