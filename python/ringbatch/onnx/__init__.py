# SPDX-License-Identifier: Apache-2.0
"""Serves an ONNX file with ONNX Runtime: whole batches straight from the ring.

    import ringbatch.onnx

    ringbatch.onnx.serve("encoder.onnx", "encoder", dims={"seq": "<=512"}, max_batch_size=32)

or from the command line:

    ringbatch onnx encoder.onnx --dim seq='<=512'

The graph has the inputs and outputs. Adjacent rows are read and written in the ring,
without a copy.
"""

from .serving import serve

__all__ = ["serve"]
