"""``python -m ringbatch``: the ringbatch command."""

import os
import sys

from ._library import binary_path

if __name__ == "__main__":
    os.execv(binary_path(), ["ringbatch", *sys.argv[1:]])
