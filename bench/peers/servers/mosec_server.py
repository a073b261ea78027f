# SPDX-License-Identifier: Apache-2.0
"""python mosec_server.py --port P --bytes B --wait SECONDS (the other flags are mosec's own)"""

import os

import numpy as np
from mosec import Server, Worker

MOST, WAIT_MS = 32, int(os.environ["PEERS_WAIT_MS"])


class Sum(Worker):
    def deserialize(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, np.float32)  # no copy

    def serialize(self, data: np.float32) -> bytes:
        return data.tobytes()

    def forward(self, data: list) -> list:
        return list(np.stack(data).sum(axis=1))


if __name__ == "__main__":
    server = Server()
    server.append_worker(Sum, num=1, max_batch_size=MOST, max_wait_time=WAIT_MS)
    server.run()
