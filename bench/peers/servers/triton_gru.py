# SPDX-License-Identifier: Apache-2.0
"""The GRU for Triton's Python backend, which keeps the state of each sequence itself."""

import gru
import numpy as np
import triton_python_backend_utils as pb

ZERO = np.zeros(gru.STATE, np.float32)


class TritonPythonModel:
    def initialize(self, args: dict) -> None:
        self.states: dict[int, np.ndarray] = {}

    def execute(self, requests: list) -> list:
        def rows(name: str) -> np.ndarray:
            return np.concatenate([pb.get_input_tensor_by_name(r, name).as_numpy() for r in requests])

        ids, starts = rows("CORRID").ravel().tolist(), rows("START").ravel().tolist()
        old = [ZERO if start else self.states[i] for i, start in zip(ids, starts)]
        y, new = gru.step(rows("x"), np.stack(old))
        self.states.update(zip(ids, new))
        return [pb.InferenceResponse([pb.Tensor("y", y[i : i + 1])]) for i in range(len(ids))]
