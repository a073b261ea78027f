# SPDX-License-Identifier: Apache-2.0
"""``follow``: live weights are copied into a module in place, so CUDA graphs and compiled code stay valid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .. import errors
from ..binding.tensors import NAMES, Tensor
from ..weights import Follower
from ..worker import following
from ..worker.ring import RingBatch
from .planes import DTYPES


def follow(net: torch.nn.Module, *, check_finite: bool = False) -> None:
    """Inside ``setup`` of a worker's class: before the first batch of each version, its weights are copied into the module.

    Names and shapes must be those of ``net.state_dict()``; types are converted. A version
    that does not fit is withdrawn. check_finite: so is a version with a NaN or an infinity.
    """
    following.register(ModuleLoad(net, check_finite))


class ModuleLoad:
    """Copies versions into a module."""

    def __init__(self, net: Any, check_finite: bool = False) -> None:
        if not isinstance(net, torch.nn.Module):
            raise errors.Invalid(f"live weights are copied into a torch.nn.Module, got {type(net).__name__}")
        self._net, self._check_finite = net, check_finite

    def __call__(self, tensors: list[Tensor], arrays: Mapping[str, np.ndarray]) -> None:
        state = self._net.state_dict()  # now: the module may have moved to a device, or to 16 bits
        published = {t.name: as_tensor(t, arrays[t.name]) for t in tensors}
        for name in [*state, *published]:  # all of them before the first copy
            own, other = state.get(name), published.get(name)
            if own is None or other is None:
                raise errors.Invalid(f"{'the module has no' if own is None else 'the version has no'} {name!r}")
            if own.shape != other.shape:
                raise errors.Shape(f"{name!r}: the module has {list(own.shape)}, the version {list(other.shape)}")
            if self._check_finite and not torch.isfinite(other).all():
                raise errors.Invalid(f"{name!r} has a NaN or an infinity")
        devices = {t.device for t in state.values() if t.is_cuda}
        for d in devices:  # batches that still run use the weights before
            torch.cuda.synchronize(d)
        with torch.no_grad():
            for name, own in state.items():
                own.copy_(published[name])
        for d in devices:
            torch.cuda.synchronize(d)


class FollowingLane:
    """A lane whose batches run with the version in force when they are submitted."""

    def __init__(self, lane: Any, follower: Follower) -> None:
        self._lane, self._follower = lane, follower
        self.done, self.wait, self.patience, self.release = lane.done, lane.wait, lane.patience, lane.release

    def submit(self, batch: RingBatch) -> None:
        batch.set_version(self._follower.update())
        self._lane.submit(batch)


def as_tensor(t: Tensor, array: np.ndarray) -> torch.Tensor:
    """A torch tensor over the array."""
    if t.kind == "bf16":
        array = array.view(np.int16)
    return torch.from_numpy(array).view(DTYPES[NAMES.index(t.kind)])
