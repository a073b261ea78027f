# SPDX-License-Identifier: Apache-2.0
"""Workers: the ring, batches, and what PyTorch, ONNX Runtime and plain functions share."""
