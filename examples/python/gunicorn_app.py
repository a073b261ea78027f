# SPDX-License-Identifier: Apache-2.0
"""A WSGI application for a pre-fork server, with or without --preload.

    gunicorn --chdir examples/python --workers 4 --preload gunicorn_app:app

The parent imports this file and forks. Each worker process connects at its first request.
"""

import functools
import json

import numpy as np
import ringbatch as rb


@functools.cache
def model() -> rb.Model:
    return rb.connect("classifier", wait=60)


def app(environ, start_response):
    numbers = environ.get("QUERY_STRING", "").replace("x=", "").split(",")
    try:
        p = model()(np.array(numbers, dtype="float32"), timeout=30)
        status, answer = "200 OK", {"class": int(p.argmax()), "p": float(p.max())}
    except (ValueError, TypeError) as e:  # rb.Shape and rb.DType among them
        status, answer = "400 Bad Request", {"error": str(e)}
    except TimeoutError as e:  # rb.Expired among them
        status, answer = "504 Gateway Timeout", {"error": str(e)}
    except rb.Error as e:  # not retryable: rb.Failed, rb.WorkerDied
        status = "503 Service Unavailable" if e.retryable else "500 Internal Server Error"
        answer = {"error": str(e), "retryable": e.retryable}
    start_response(status, [("Content-Type", "application/json")])
    return [json.dumps(answer).encode()]
