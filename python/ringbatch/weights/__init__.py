# SPDX-License-Identifier: Apache-2.0
"""Live weights: a learner publishes versions of a model's tensors, workers follow. docs/weights.md is the manual."""
