"""``python -m ringbatch``: the ringbatch command."""

from __future__ import annotations

import os
import sys

from ._library import binary_path


def main() -> None:
    os.execv(binary_path(), ["ringbatch", *sys.argv[1:]])


if __name__ == "__main__":
    main()
