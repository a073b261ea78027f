# SPDX-License-Identifier: Apache-2.0
"""``python -m ringbatch``: the ringbatch command, and ``weights load``, which only Python has."""

from __future__ import annotations

import os
import sys

from .binding.library import binary_path
from .errors import Error


def main() -> None:
    if sys.argv[1:3] == ["weights", "load"]:
        from .serve.weights_cli import main as load_weights

        sys.exit(load_weights(sys.argv[3:]))
    os.environ["PYTHON"] = sys.executable  # for ringbatch torch, onnx and serve
    try:
        command = binary_path()
        if os.path.exists(sys.argv[0]) and os.path.samefile(command, sys.argv[0]):  # it would start itself for ever
            raise Error(f"RINGBATCH_BINARY={command} is the script that looks for it: unset it, or name what `make build` makes")
    except Error as e:
        sys.exit(f"ringbatch: {e}")
    os.execv(command, ["ringbatch", *sys.argv[1:]])


if __name__ == "__main__":
    main()
