# SPDX-License-Identifier: Apache-2.0
"""``python -m ringbatch.torch``: the command ``ringbatch torch``."""

from ..serve.torch_cli import main_and_exit

main_and_exit()
