# SPDX-License-Identifier: Apache-2.0
"""Adapters for reinforcement learning. Each module needs its own package, and is imported by name:

    import ringbatch.rl.gymnasium   # an actor loop for vector environments
    import ringbatch.rl.torchrl     # a policy for collectors
    import ringbatch.rl.openspiel   # an evaluator for MCTS
"""
