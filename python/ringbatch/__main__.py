# SPDX-License-Identifier: Apache-2.0
"""``python -m ringbatch``: the ringbatch command."""

from __future__ import annotations

import os
import sys

from .binding.library import binary_path


def main() -> None:
    os.environ["PYTHON"] = sys.executable  # for ringbatch torch, onnx and serve
    os.execv(binary_path(), ["ringbatch", *sys.argv[1:]])


if __name__ == "__main__":
    main()
