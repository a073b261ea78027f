# SPDX-License-Identifier: Apache-2.0
"""Classifies uploaded JPEGs. Needs ringbatch, and: pip install fastapi uvicorn pillow

    python net.py & uvicorn --workers 4 app:app       # one model process for all web workers
    MODEL_COPIES=1 uvicorn --workers 4 app:app        # the usual way: a copy of the model in every web worker
    curl --data-binary @photo.jpg http://127.0.0.1:8000/classify
"""

import asyncio
import functools
import io
import os
from contextlib import asynccontextmanager

import numpy as np
import ringbatch as rb
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from net import SIDE, Net
from PIL import Image


@asynccontextmanager
async def lifespan(app):
    if os.environ.get("MODEL_COPIES"):
        net = Net()
        app.state.classify = lambda picture: asyncio.to_thread(lambda: net(picture[None])[0])
        yield
    else:
        with rb.connect("pictures", window=32, wait=60) as model:
            app.state.classify = functools.partial(model.ainfer, timeout=30)
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


def pixels(jpeg: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(jpeg), formats=["JPEG"]) as picture:
        picture.draft("RGB", (SIDE, SIDE))  # decodes a large picture at a fraction of its size
        return np.asarray(picture.convert("RGB").resize((SIDE, SIDE)))


@app.post("/classify")
async def classify(request: Request):
    try:
        picture = await asyncio.to_thread(pixels, await request.body())
    except (OSError, Image.DecompressionBombError) as e:
        raise HTTPException(400, f"not a JPEG: {e}") from e
    scores = await app.state.classify(picture)
    return {"class": int(scores.argmax())}
