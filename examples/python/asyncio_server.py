# SPDX-License-Identifier: Apache-2.0
"""A server in plain asyncio: many connections, one process, no thread per request.

    python examples/python/asyncio_server.py [port]

Each line with 64 numbers is answered by a line with the class.
"""

import asyncio
import sys

import numpy as np
import ringbatch as rb


async def main(port: int) -> None:
    with rb.connect("classifier", window=256, wait=60) as model:

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                async for line in reader:
                    try:
                        x = np.array(line.split(), dtype="float32")
                        p = await model.ainfer(x, timeout=30)
                        writer.write(b"%d\n" % p.argmax())
                    except (ValueError, rb.Error) as e:
                        writer.write(f"error: {e}\n".encode())
                    await writer.drain()
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", port)
        print(f"listening on {server.sockets[0].getsockname()[1]}", flush=True)
        await asyncio.Event().wait()  # until Ctrl-C; serve_forever would wait for every client to hang up


if __name__ == "__main__":
    try:
        asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 8000))
    except KeyboardInterrupt:
        pass
