# SPDX-License-Identifier: Apache-2.0
"""``Options``: how a module runs, and how it is tried before it is served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """``serve(net, "classify", inputs=["x:f32[8]"], options=Options(channels_last=True))``"""

    channels_last: bool = False
    #: None records a torch.nn.Module if that works and the results agree.
    cuda_graphs: bool | None = None
    #: TorchScript may fold and fuse operations if the results agree.
    freeze: bool = True
    #: "on" serves the module compiled by torch.compile; "auto" does so if the results agree and a full batch is
    #: faster. The code is kept for the next start.
    compile: str = "off"
    #: The module's argument for the true sizes of padded rows (int64, one per row). Requests do not bring it.
    lengths: str | None = None
    #: The same for their mask (bool).
    mask: str | None = None
    #: The value that the module ignores as padding, or ["tokens=1"] for single inputs.
    pad: Sequence[str] | str | float | None = None
    #: Round sizes up to buckets (powers of two, or buckets=...) if the module ignores padding (docs/sizes.md).
    pad_sizes: bool = True
    #: Refuse a module whose rows give other results in a batch than alone, or whose outputs differ from the declared
    #: ones. If inputs vary, wrong outputs are always refused, because padding is cut off by them.
    check: bool = True
    #: How far results may differ, as a part of the largest number; None: 0.001, or 0.02 on a GPU and for modules
    #: that are quantized or compute with 16 bits.
    tolerance: float | None = None
    #: Batches in flight.
    depth: int = 2
    #: "device" puts the tensors into the memory of the module's GPU, for producers on that GPU (docs/gpu.md). One
    #: tensor names its own: "x:f16[3,224,224]@device".
    memory: str | None = None
