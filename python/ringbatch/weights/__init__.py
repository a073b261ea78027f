# SPDX-License-Identifier: Apache-2.0
"""Live weights: a learner publishes versions of a model's tensors, workers follow. docs/weights.md is the manual."""

from .publishing import Publisher, publisher

__all__ = ["Publisher", "publisher"]
