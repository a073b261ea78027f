# SPDX-License-Identifier: Apache-2.0
"""LitServe, bytes in and bytes out: the body is neither JSON nor a form."""

import os
from typing import Annotated

import litserve as ls
import numpy as np
from fastapi import Body, Response
from pydantic import AfterValidator


class Raw(bytes):
    """LitServe formats every request for its log, even if the log is off. With many bytes that takes milliseconds."""

    def __str__(self) -> str:
        return "bytes"

    __repr__ = __str__


class Sum(ls.LitAPI):
    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request: Annotated[bytes, AfterValidator(Raw), Body(media_type="application/octet-stream")]) -> np.ndarray:
        return np.frombuffer(request, np.float32)

    def batch(self, inputs: list) -> np.ndarray:
        return np.stack(inputs)

    def predict(self, x: np.ndarray) -> np.ndarray:
        return x.sum(axis=1)

    def unbatch(self, output: np.ndarray) -> list:
        return list(output)

    def encode_response(self, output: np.float32) -> Response:
        return Response(output.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    api = Sum(max_batch_size=32, batch_timeout=int(os.environ["PEERS_WAIT_MS"]) / 1e3, api_path="/inference")
    server = ls.LitServer(api, accelerator="cpu", devices=1, workers_per_device=1, fast_queue=True, timeout=60)
    server.run(host="127.0.0.1", port=int(os.environ["PEERS_PORT"]), num_api_servers=1, log_level="error", access_log=False,
        generate_client_file=False)
