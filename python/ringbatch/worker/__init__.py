# SPDX-License-Identifier: Apache-2.0
"""Workers: the ring, batches, and the parts that PyTorch, ONNX Runtime and plain functions share."""
