# SPDX-License-Identifier: Apache-2.0
"""BentoML: one service with one worker, adaptive batching on, bytes in and bytes out.

BentoML's tensor type travels as JSON. Here a validator and a serializer of pydantic take the body as it is,
which is far quicker.
"""

import os
from typing import Annotated, Any

import bentoml
import numpy as np
from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

RAW = WithJsonSchema({"type": "string", "format": "binary"})
Input = Annotated[Any, BeforeValidator(lambda body: np.frombuffer(body, np.float32)[None]), RAW]
Output = Annotated[Any, PlainSerializer(lambda y: y.tobytes()), RAW]


@bentoml.service(workers=1, threads=1, traffic={"timeout": 60}, logging={"access": {"enabled": False}}, metrics={"enabled": False})
class Sum:
    @bentoml.api(batchable=True, max_batch_size=32, max_latency_ms=int(os.environ["PEERS_LATENCY_MS"]), route="/inference")
    def add(self, x: Input, /) -> Output:
        return x.sum(axis=1)
