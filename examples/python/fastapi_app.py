# SPDX-License-Identifier: Apache-2.0
"""FastAPI: python numpy_worker.py &  uvicorn --workers 2 fastapi_app:app

Every uvicorn worker is a process with a connection of its own; their requests
share the model's batches. What may be sent again answers 503.
"""

from contextlib import asynccontextmanager

import numpy as np
import ringbatch as rb
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse


@asynccontextmanager
async def lifespan(app):
    with rb.connect("classifier", window=64, wait=60) as app.state.model:
        yield


app = FastAPI(lifespan=lifespan)


@app.exception_handler(rb.Error)
async def failed(request: Request, error: rb.Error):
    return JSONResponse({"detail": str(error)}, status_code=503 if error.retryable else 400)


@app.post("/classify")
async def classify(request: Request):
    numbers = await request.json()
    if not isinstance(numbers, list):
        raise HTTPException(400, "a list of numbers, please")
    scores = await app.state.model.ainfer(np.array(numbers, "float32"), timeout=30)
    return {"class": int(scores.argmax())}
