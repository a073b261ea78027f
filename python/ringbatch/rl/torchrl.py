# SPDX-License-Identifier: Apache-2.0
"""A policy for TorchRL: a model of the broker answers it.

    from ringbatch.rl.torchrl import RingbatchPolicy

    policy = RingbatchPolicy("policy", in_keys=["observation"], out_keys=["action"], version_key="policy_version")
    for batch in Collector(env, policy, frames_per_batch=256):
        ...

The weights are the server's, so a collector need not update them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import ringbatch as rb

from ..binding.library import Process

try:
    import torch
    from tensordict import TensorDictBase
    from tensordict.nn import TensorDictModuleBase
    from tensordict.utils import NestedKey
except ImportError as e:
    raise ImportError(f"ringbatch.rl.torchrl needs TorchRL: pip install torchrl ({e})") from e


class RingbatchPolicy(TensorDictModuleBase):
    """Each element of the tensordict's batch is a row of one request. The policy connects at its first call in each process.

    in_keys, out_keys: in the order of the model's inputs and outputs; they may be nested.
    version_key: gets the version of the live weights that answered (int64).
    init_key: for a model with state. Where it is true, the state begins at zero. ``InitTracker`` writes it.
    state_keys: get the state before the step, by the name of the state: a learner begins its unroll there.
    timeout: of each request. connect: as in :func:`ringbatch.connect`; by default the window has room for one request.

    If the broker restarts, or in a forked child, the state is gone: calls raise StateLost until ``init_key`` is true everywhere.
    So reset all environments. A collector ends with the error: make a new one with the same policy.
    """

    def __init__(
        self, model: str, in_keys: list[NestedKey], out_keys: list[NestedKey], *, version_key: NestedKey | None = None,
        init_key: NestedKey = "is_init", state_keys: Mapping[str, NestedKey] | None = None, timeout: float | None = None, **connect: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self._state_keys, self._version_key, self._init_key = dict(state_keys or {}), version_key, init_key
        self.in_keys, self._answer_keys = in_keys, out_keys
        self.out_keys = [*out_keys, *self._state_keys.values(), *([] if version_key is None else [version_key])]
        self._name, self._timeout, self._connect = model, timeout, connect
        self._model: rb.Model | None = None
        self._sequence: rb.Sequence | None = None
        self._process = Process.generation

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        shape = tuple(tensordict.batch_size)
        rows = tensordict.batch_size.numel() if shape else None
        model, device = self._model or self._open(rows), tensordict.device
        inputs = [self._rows(tensordict, key, len(shape), rows) for key in self.in_keys]
        if self._sequence is not None:
            if tensordict.get(self._init_key, None) is None:
                raise KeyError(f"{self._name} has state, and there is no {self._init_key!r}: append InitTracker() to the environment")
            init = tensordict[self._init_key].reshape(-1).cpu().numpy()
            if self._process != Process.generation:  # forked since
                if not init.all():
                    raise rb.StateLost(f"the state of {self._name} stayed in the parent process: reset all environments")
                self._sequence, self._process = model.sequence(rows), Process.generation
            self._sequence.reset(init)
            for name, key in self._state_keys.items():
                tensordict.set(key, _tensor(self._sequence.state(name), shape, device))
            answers, version = self._sequence.step(*inputs, timeout=self._timeout, version=True)
        else:
            answers, version = model(*inputs, timeout=self._timeout, version=True)
        try:
            for key, answer in zip(self._answer_keys, answers.values() if isinstance(answers, dict) else [answers]):
                tensordict.set(key, _tensor(answer, shape, device))
            if self._version_key is not None:
                tensordict.set(self._version_key, torch.full(shape, version, device=device))
        except BaseException:
            if self._sequence is not None:
                self._sequence.undo()
            raise
        return tensordict

    def _open(self, rows: int | None) -> rb.Model:
        model = rb.connect(self._name, **{"window": rows or 1, **self._connect})
        if (len(model.inputs), len(model.outputs)) != (len(self.in_keys), len(self._answer_keys)):
            raise rb.Invalid(f"{model!r} has other inputs or outputs than in_keys={self.in_keys}, out_keys={self._answer_keys}")
        self._sequence = model.sequence(rows) if model.state else None
        self._model, self._process = model, Process.generation
        return model

    @staticmethod
    def _rows(tensordict: TensorDictBase, key: NestedKey, dims: int, rows: int | None) -> np.ndarray:
        value = tensordict[key].detach().cpu()
        return (value if rows is None else value.reshape(rows, *value.shape[dims:])).numpy()

    def __getstate__(self) -> dict[str, Any]:  # a copy, and another process, connect themselves
        return {**self.__dict__, "_model": None, "_sequence": None}

    def close(self) -> None:
        """Disconnects; the next call connects again, with a state of zero."""
        model, self._model, self._sequence = self._model, None, None
        if model is not None:
            model.close()


def _tensor(array: Any, shape: tuple[int, ...], device: torch.device | None) -> torch.Tensor:
    value = torch.as_tensor(array, device=device)
    return value.reshape(*shape, *value.shape[1:]) if shape else value
