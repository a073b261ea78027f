# SPDX-License-Identifier: Apache-2.0
"""Serves a Hugging Face folder: text in, vectors or labels out.

    import ringbatch.hf

    ringbatch.hf.serve("./all-MiniLM-L6-v2")

or from the command line: ``ringbatch serve ./all-MiniLM-L6-v2``. docs/serve.md is the manual.
"""

from .serving import serve

__all__ = ["serve"]
