# SPDX-License-Identifier: Apache-2.0
"""The gateway beside the workers of serve."""

from __future__ import annotations

import errno
import json
import socket as sockets

from .. import errors


def gateway_table(socket: str, http: int | str | None, grpc: int | str | None) -> str:
    """The gateway in a broker's configuration; empty if no port is given."""
    if http is None and grpc is None:
        return ""
    for flag, given in ("http", http), ("grpc", grpc):
        _check_free(_address(given), flag)
    flags = {"socket": socket, "http": _address(http), "grpc": _address(grpc)}
    return "[gateway]\n" + "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in flags.items())


def _address(given: int | str | None) -> str:
    if given is None:
        return "off"
    if not str(given).isdigit():
        return str(given)
    if int(given) > 65535:
        raise errors.Invalid(f"{given} is no port: want 0..65535, or an address, 0.0.0.0:8000")
    return f"127.0.0.1:{given}"


def _check_free(address: str, flag: str) -> None:
    """Raises if another process listens on the address. The gateway reports other errors."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return
    with sockets.socket() as s:
        s.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        try:
            s.bind((host, int(port)))
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                raise errors.Invalid(f"port {port} is taken; choose another with {flag}=PORT") from None
