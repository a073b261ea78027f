# SPDX-License-Identifier: Apache-2.0
"""``follow``: live weights are copied into a module in place, so CUDA graphs and compiled code stay valid."""

from __future__ import annotations

from typing import Any

import torch

from ..weights.following import Follower
from ..weights.modules import ModuleLoad
from ..worker import following
from ..worker.ring import RingBatch


def follow(net: torch.nn.Module, *, check_finite: bool = False) -> None:
    """Inside ``setup`` of a worker's class: before the first batch of each version, its weights are copied into the module.

    Names and shapes must be those of ``net.state_dict()``; types are converted. A version
    that does not fit is withdrawn. check_finite: so is a version with a NaN or an infinity.
    """
    following.register(ModuleLoad(net, check_finite))


class FollowingLane:
    """A lane whose batches run with the version in force when they are submitted."""

    def __init__(self, lane: Any, follower: Follower) -> None:
        self._lane, self._follower = lane, follower
        self.done, self.wait, self.patience = lane.done, lane.wait, lane.patience

    def submit(self, batch: RingBatch) -> None:
        batch.set_version(self._follower.update())
        self._lane.submit(batch)

    def release(self) -> None:
        self._lane.release()
        self._follower.settle(wait=False)
