# SPDX-License-Identifier: Apache-2.0
"""FastAPI: python numpy_worker.py &  uvicorn --workers 2 fastapi_app:app

Every uvicorn worker is a process with its own connection; their requests share the model's batches.
The body is 64 numbers, or a list of such rows. FastAPI refuses other JSON with status 422.
"""

from contextlib import asynccontextmanager
from typing import Union

import ringbatch as rb
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse


@asynccontextmanager
async def lifespan(app):
    with rb.connect("classifier", window=64, wait=60, cast=True) as app.state.model:
        yield


app = FastAPI(lifespan=lifespan)


def status_of(error: rb.Error) -> int:
    if isinstance(error, (rb.errors.Full, rb.errors.QueueFull, rb.errors.RingFull, rb.errors.Overloaded)):
        return 429
    if isinstance(error, TimeoutError):  # Expired among them
        return 504
    if isinstance(error, (ValueError, TypeError)):  # Shape, DType, TooLarge: the caller's mistake
        return 400
    return 503 if error.retryable else 500  # 500: Failed, WorkerDied


@app.exception_handler(rb.Error)
async def failed(request: Request, error: rb.Error):
    return JSONResponse({"detail": str(error)}, status_code=status_of(error))


@app.post("/classify")
async def classify(numbers: Union[list[float], list[list[float]]]):
    scores = await app.state.model.ainfer(numbers, timeout=30)
    return {"class": scores.argmax(-1).tolist()}  # a number, or a list with one for each row
