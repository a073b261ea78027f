# SPDX-License-Identifier: Apache-2.0
"""openpi's WebSocket protocol in front of any model of a broker: client programs change only the port.

    pip install websockets msgpack                            # and ringbatch
    python examples/robots/door.py policy 8000:1 8001:0       # simulators at port 8000; robots at 8001, the most urgent level

Observations of all connections share batches. "observation/image" and "image" are the model's input "image", also in a nested
dict; keys that the model has no input for are left out. A refused observation is answered by text, openpi's sign of an error, and
the connection stays open. If the broker restarts, calls wait for it.
"""

import argparse
import asyncio
import contextlib
import functools
import http
import signal
import time

import msgpack
import numpy as np
import ringbatch as rb
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed

MOST_BYTES = 64 << 20  # of an observation


def of_array(a):
    """What msgpack cannot pack by itself: arrays and NumPy's numbers, as openpi_client.msgpack_numpy has them."""
    if isinstance(a, (np.ndarray, np.generic)) and a.dtype.name.startswith(("bfloat16", "float8")):
        a = a.astype("float32")
    if isinstance(a, np.ndarray) and a.dtype.kind in "biuf":
        return {b"__ndarray__": True, b"data": a.tobytes(), b"dtype": a.dtype.str, b"shape": a.shape}
    if isinstance(a, np.generic) and a.dtype.kind in "biuf":
        return {b"__npgeneric__": True, b"data": a.item(), b"dtype": a.dtype.str}
    raise TypeError(f"not sent: {type(a).__name__}")


def to_array(d):
    if b"__ndarray__" in d:
        return np.frombuffer(d[b"data"], np.dtype(d[b"dtype"])).reshape(d[b"shape"])
    return np.dtype(d[b"dtype"]).type(d[b"data"]) if b"__npgeneric__" in d else d


pack = functools.partial(msgpack.packb, default=of_array)
unpack = functools.partial(msgpack.unpackb, object_hook=to_array)


def leaves(observation):
    """Pairs of a name and a value, from a dict of dicts."""
    if not isinstance(observation, dict):
        raise ValueError(f"an observation is a dict, not {type(observation).__name__}")
    for key, value in observation.items():
        if isinstance(value, dict):
            yield from leaves(value)
        else:
            yield str(key).rsplit("/", 1)[-1], value


def inputs_of(model, observation) -> dict:
    names, found = {t.name for t in model.inputs}, {}
    for name, value in leaves(observation):
        if name in found:
            raise ValueError(f"two values for {name!r}")
        if name in names:
            found[name] = value
    if names - set(found):
        raise ValueError(f"not in the observation: {', '.join(sorted(names - set(found)))}; it has {', '.join(n for n, _ in leaves(observation))}")
    return found


async def answer(model, level: int, timeout: float, message, more: dict):
    """The model's outputs by name, or a text that says why there are none."""
    began = time.monotonic()
    try:
        outputs = await model.ainfer(inputs_of(model, unpack(message)), priority=level, timeout=timeout)
    except (rb.Error, ValueError, TypeError, KeyError, OverflowError, msgpack.UnpackException) as e:
        return f"{type(e).__name__}: {e}"
    if not isinstance(outputs, dict):
        outputs = {model.outputs[0].name: outputs}
    return pack({**outputs, "server_timing": {"infer_ms": 1e3 * (time.monotonic() - began), **more}})


async def talk(model, level: int, timeout: float, connection) -> None:
    """One connection, until it closes."""
    with contextlib.suppress(ConnectionClosed):
        await connection.send(pack({"model": model.name, "inputs": [str(t) for t in model.inputs], "level": level}))
        more = {}
        async for message in connection:
            began = time.monotonic()
            await connection.send(await answer(model, level, timeout, message, more))
            more = {"prev_total_ms": 1e3 * (time.monotonic() - began)}


def health(connection, request):
    return connection.respond(http.HTTPStatus.OK, "OK\n") if request.path == "/healthz" else None


def port_and_level(text: str) -> tuple[int, int]:
    port, _, level = text.partition(":")
    return int(port), int(level or 0)


async def run(args) -> None:
    with rb.connect(args.model, window=args.window, wait=60, retry=60, cast=True) as model:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with contextlib.AsyncExitStack() as stack:
            for port, level in args.ports:
                each = functools.partial(talk, model, level, args.timeout)
                # No pings: a simulator that computes for a minute, or is stopped, answers none.
                options = {"compression": None, "max_size": MOST_BYTES, "ping_interval": None, "process_request": health}
                server = serve(each, args.host, port, **options)
                for s in (await stack.enter_async_context(server)).sockets:
                    print(f"{args.model} at level {level}: port {s.getsockname()[1]}", flush=True)
            await stop.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("ports", nargs="+", type=port_and_level, metavar="PORT:LEVEL", help="0 is any free port")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--window", type=int, default=64, help="observations at once, of all connections")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds until an observation is answered with an error")
    asyncio.run(run(parser.parse_args()))
