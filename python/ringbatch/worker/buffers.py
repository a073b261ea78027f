# SPDX-License-Identifier: Apache-2.0
"""Arrays for batches that are not contiguous."""

from __future__ import annotations

import numpy as np

from ..binding.tensors import Tensor


class Buffers:
    """Arrays that later batches use again."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, str, tuple[int, ...]], np.ndarray] = {}

    def get(self, side: str, t: Tensor, rows: int, shape: tuple[int, ...]) -> np.ndarray:
        key = (side, t.name, shape)
        array = self._arrays.get(key)
        if array is None or len(array) < rows:
            array = self._arrays[key] = np.empty((rows, *shape), t.dtype)
        return array[:rows]
