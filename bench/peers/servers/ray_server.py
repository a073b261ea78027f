# SPDX-License-Identifier: Apache-2.0
"""Ray Serve: one proxy, one replica, @serve.batch, bytes in and bytes out."""

import os
import signal

import numpy as np
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

WAIT_S = int(os.environ["PEERS_WAIT_MS"]) / 1e3


@serve.deployment(num_replicas=1, max_ongoing_requests=256, ray_actor_options={"num_cpus": 1})
class Sum:
    @serve.batch(max_batch_size=32, batch_wait_timeout_s=WAIT_S)
    async def add(self, inputs: list) -> list:
        return list(np.stack(inputs).sum(axis=1))

    async def __call__(self, request: Request) -> Response:
        y = await self.add(np.frombuffer(await request.body(), np.float32))
        return Response(y.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=os.environ["PEERS_TEMP"], object_store_memory=256 << 20, log_to_driver=False,
        configure_logging=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(os.environ["PEERS_PORT"]), "access_log": False},
        logging_config={"log_level": "ERROR", "enable_access_log": False})
    serve.run(Sum.bind(), route_prefix="/inference")
    print("ready", flush=True)
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
    serve.shutdown()
    ray.shutdown()
