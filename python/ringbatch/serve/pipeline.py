# SPDX-License-Identifier: Apache-2.0
"""``pipeline``: several functions for each request, in one ring."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from .. import errors
from ..binding.tensors import sides
from ..worker.policy import policy_text
from ..worker.worker import Worker
from .supervisor import serve_all

# Settings of the ring, common to all stages.
_RING = ("slots", "max_window", "private", "ragged", "buckets", "priorities", "default_priority")


def pipeline(
    name: str,
    stages: Sequence[Worker],
    *,
    processes: int | Sequence[int] = 1,
    outputs: Sequence[str] | None = None,
    socket: str | os.PathLike[str] | None = None,
    broker: bool = True,
    http: int | str | None = None,
    grpc: int | str | None = None,
    **policy: Any,
) -> None:
    """Serves a pipeline until Ctrl-C or SIGTERM, then stops everything it started.

    stages: functions decorated with ``@ringbatch.worker``, in order; the model's name
        of each is the stage's. A stage reads inputs of the pipeline and outputs of
        stages before it, by name. A tensor that no stage writes is an input of the pipeline.
    processes: worker processes of each stage, or a list with a number for each.
    outputs: the tensors that clients read; default: the outputs of the last stage.
    policy: settings of the ring, and defaults for the stages.

    The rest is as in ``serve``. Clients connect to the pipeline by its name.
    """
    stages = list(stages)
    if not stages or not all(isinstance(s, Worker) for s in stages):
        raise errors.Invalid("pipeline wants a list of functions decorated with @ringbatch.worker")
    serve_all(stages, processes, socket, broker, http, grpc, (name, declaration(stages, outputs, policy)))


def declaration(stages: Sequence[Worker], outputs: Sequence[str] | None, policy: dict[str, Any]) -> str:
    """The declaration of docs/pipelines.md."""
    inputs: list[str] = []
    written: dict[str, str] = {}  # by name
    settings = _pairs(policy_text(policy))
    listed = []
    for stage in stages:
        reads, writes, keeps = sides(stage.signature)
        for text in reads:
            if _name(text) not in written and text not in inputs:
                inputs.append(text)
        written.update((_name(text), text) for text in writes)
        own = _pairs((stage._options.policy or b"").decode())
        for key in [k for k in own if k.split(".")[0] in _RING]:
            settings.setdefault(key, own[key])
            del own[key]
        listed.append({"name": stage.model, "inputs": reads, "outputs": writes, "policy": own, **({"state": keeps} if keeps else {})})
    if outputs is not None:
        missing = [o for o in outputs if o not in written]
        if missing:
            raise errors.Invalid(f"no stage writes {missing[0]!r}; they write {', '.join(written)}")
    given = [written[o] for o in outputs] if outputs is not None else listed[-1]["outputs"]
    return json.dumps({"inputs": inputs, "outputs": given, "policy": settings, "stages": listed})


def _name(tensor: str) -> str:
    return tensor.split(":", 1)[0]


def _pairs(text: str) -> dict[str, str]:
    return dict(line.rsplit("=", 1) for line in text.split() if line)
